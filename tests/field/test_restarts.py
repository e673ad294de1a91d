"""Engines that are started anew under the id that they had before: step numbers begin again, and time does not."""

from __future__ import annotations

from kvtrace import stages
from tests.field.scenes import by_id, engines_only, lacking, repeated
from tests.trace import MS, Trace, causes_ms, ns, push


def _restarted(first: Trace, second: Trace) -> Trace:
    """Return the two 60 s apart, P and D started anew in between: step numbers begin again."""
    return repeated(first, second.later(60_000, 0))


def test_steps_of_an_engine_that_was_started_anew_are_its_own() -> None:
    alone = push().answer()
    answers = by_id(_restarted(push(), push(name="r2")))

    for name in ("r1", "r2"):
        assert causes_ms(answers[name]) == causes_ms(alone)
        assert (answers[name].verdict, answers[name].ttft_ns) == ("complete", 60 * MS)


def test_the_first_ttft_does_not_end_in_the_next_engines_step() -> None:
    """With nothing but the engines' own points the first token is D's sample: 54 ms, not 60,054."""
    bare = lacking(engines_only(push()), lambda e: "http" in e.stage or e.stage == "decode.first_token_out")
    answers = by_id(_restarted(bare, lacking(engines_only(push(name="r2")), lambda e: "http" in e.stage)))

    assert answers["r1"].ttft_ns == bare.answer().ttft_ns == 51 * MS
    assert answers["r1"].first_token_ns == ns(54)


def test_a_step_that_was_not_seen_is_not_the_next_engines() -> None:
    """Lacking D's first step altogether, no later one stands in for it."""
    first = lacking(push(), lambda e: e.stage.startswith("step.") and e.a == 9)
    answers = by_id(_restarted(first, push(name="r2")))

    assert causes_ms(answers["r1"]) == causes_ms(first.answer())
    assert stages.FIRST_STEP.name not in causes_ms(answers["r1"])
