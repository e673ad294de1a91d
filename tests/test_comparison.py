"""`kvtrace explain RUN --against OTHER`: what differs and how surely, what else differs, and when nothing is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace import cli
from kvtrace.findings import rates
from kvtrace.intervals import BLOCKS
from kvtrace.report import comparison, comparison_page, contrasts
from kvtrace.report.samples import Figure, Group
from kvtrace.report.samples import Sample as Drawn
from kvtrace.store import Store
from tests.golden_files import check_golden
from tests.printed import plain_console, text_of
from tests.sample_store import MS, PUSH_PATH, Sample

Row = dict[str, Any]

FACTS = {"vllm": "0.32.0", "model": "tiny"}
HOSTILE = "[red]x[/red]\x1b[31m\r"
# By which so many ms a request's forward takes longer: 2 in the mean, and no two blocks of requests alike.
JITTER = (0, 1, 3, 2, 4, 0, 6, 0, 2, 1, 3)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "KVTRACE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def recording(
    count: int = 66, *, facts: dict[str, str] | None = None, jitter: int = 0, sample: Sample | None = None,
    longer: dict[str, int] | None = None, every_ms: int = 500, **values: Any,
) -> Sample:  # fmt: skip
    """Return requests of 102 ms in the mean, some of whose causes take so many ms `longer`."""
    sample = Sample(facts={**FACTS, **(facts or {})}) if sample is None else sample
    for number in range(count):
        extra = {**(longer or {}), "prefill.forward": JITTER[(number + jitter) % len(JITTER)]}
        path = tuple((c, kind, where, what, ms + extra.get(c, 0)) for c, kind, where, what, ms in PUSH_PATH)
        name = f"kvt-{len(sample.requests):03}"
        sample.add(name, path, start_ms=every_ms * number, **values)
        tail = 30 + JITTER[(number + jitter) % len(JITTER)]
        sample.add_pace(name, (("decode.token", "compute.run", tail), ("step.connector", "coordination", 2)), (10, 11))
    return sample


def compared(tmp_path: Path, run: Sample, against: Sample) -> Row:
    """Write both and return the comparison."""
    paths = run.write(tmp_path / "run.duckdb"), against.write(tmp_path / "against.duckdb")
    with Store.open(paths[0]) as one, Store.open(paths[1]) as other:
        return comparison.compare(one, other)


def told(document: Row) -> str:
    """Return the sentence and all cautions."""
    names = ("run.duckdb", "against.duckdb")
    return "\n".join([contrasts.sentence(document, names), *contrasts.cautions(document, names)])


def explain(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["explain", *map(str, arguments)])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


# What differs ------------------------------------------------------------------------------------------------


def test_the_cause_that_takes_longer_is_named_with_its_time(tmp_path: Path) -> None:
    """The same requests, but that stage.wait takes 40 ms longer and detection 5 ms less: 35 ms in all."""
    document = compared(tmp_path, recording(longer={"stage.wait": 40, "detection": -5}), recording(jitter=3))
    (group,) = document["groups"]
    causes = {one["cause"]: one for one in group["causes"]}

    assert [one["cause"] for one in group["causes"]][:2] == ["stage.wait", "detection"]
    assert causes["stage.wait"] == {
        "cause": "stage.wait", "class": "coordination", "run": 43 * MS, "against": 3 * MS,
        "difference": 40 * MS, "low": 40 * MS, "high": 40 * MS, "told_apart": True,
    }  # fmt: skip
    assert causes["detection"]["difference"] == -5 * MS
    assert causes["prefill.forward"]["told_apart"] is False
    assert causes["prefill.forward"]["low"] < 0 < causes["prefill.forward"]["high"]
    mean = group["ttft_ns"]["mean"]
    assert (mean["run"], mean["against"], mean["difference"]) == (137 * MS, 102 * MS, 35 * MS)
    assert mean["low"] < 35 * MS < mean["high"] < 38 * MS
    assert told(document).startswith(
        "The first token comes 35.0 ms (34 %) later in run.duckdb than in against.duckdb (means of 137.0 and 102.0 ms; "
    )
    assert "most of it stage.wait, +40.0 ms (+40.0 to +40.0), in spite of detection, -5.000 ms" in told(document)


def test_a_difference_that_a_new_start_makes_is_called_small(tmp_path: Path) -> None:
    """4 ms of 102 are told apart, and less than two starts of one deployment differ by."""
    document = compared(tmp_path, recording(longer={"wire": 4}), recording(jitter=3))

    assert "The first token comes 4.000 ms (4 %) later" in told(document)
    assert "So small a difference can come of starting the same deployment anew." in told(document)


def test_a_difference_near_0_has_the_digits_that_show_it() -> None:
    line = {"run": 20 * MS, "against": 20 * MS - 40_000, "difference": 40_000, "low": 3_000, "high": 77_000}

    assert contrasts.span({**line, "told_apart": True}) == "+0.003 to +0.077"
    assert contrasts.digits({**line, "told_apart": True}, 20 * MS) == 3
    assert contrasts.digits({**line, "told_apart": False}, 20 * MS) == 1
    assert contrasts.in_ms(-40_000, 1) == "0.0"


def test_prompts_that_differ_by_less_than_a_hundredth_are_no_reason(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(), recording(jitter=3, prompt_tokens=601))

    assert document["groups"][0]["prompt_tokens"]["mean"]["told_apart"] is True
    assert "may be the reason" not in told(document)


def test_requests_that_scatter_alike_are_not_told_apart(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(), recording(jitter=3))
    (group,) = document["groups"]
    lines = [*group["causes"], *group["classes"], *group["ttft_ns"].values(), *group["tpot_ns"].values()]

    assert {line["told_apart"] for line in lines} == {False, None}
    assert told(document).startswith(
        "Nothing is told apart between run.duckdb and against.duckdb: mean TTFT is 102.0 against 102.0 ms, 0.0 ms, 95 %"
    )


def test_what_differs_where_the_mean_does_not_is_said(tmp_path: Path) -> None:
    """Posts take 3 ms longer and detection 3 ms less, so that the sum stays; TPOT is 5 ms longer."""
    run = recording(longer={"post": 3, "detection": -3})
    for pace, request in zip(run.pace, run.requests, strict=True):
        pace["tpot_ns"] += 5 * MS
        request["tpot_ns"] += 5 * MS
    document = compared(tmp_path, run, recording(jitter=3))

    assert document["groups"][0]["ttft_ns"]["mean"]["told_apart"] is False
    assert told(document).startswith("Mean TTFT of run.duckdb and against.duckdb is not told apart (")
    assert "; what is: TPOT mean (+5.000 ms" in told(document)
    assert "detection, -3.000 ms (-3.000 to -3.000) and post, +3.000 ms (+3.000 to +3.000)." in told(document)


def test_percentiles_are_those_that_explain_shows(tmp_path: Path) -> None:
    """p50 of the jitter 0 to 6 is 2; a p99 of 66 requests is bounded by nothing."""
    document = compared(tmp_path, recording(longer={"wire": 8}), recording(jitter=3))
    ttft = document["groups"][0]["ttft_ns"]

    assert (ttft["p50"]["run"], ttft["p50"]["against"], ttft["p50"]["told_apart"]) == (110 * MS, 102 * MS, True)
    assert (ttft["p99"]["difference"], ttft["p99"]["low"], ttft["p99"]["told_apart"]) == (8 * MS, None, None)


def test_many_requests_bound_a_high_percentile(tmp_path: Path) -> None:
    ttft = compared(tmp_path, recording(3_300, longer={"wire": 8}), recording(3_300, jitter=3))["groups"][0]["ttft_ns"]

    assert (ttft["p99"]["difference"], ttft["p99"]["told_apart"]) == (8 * MS, True)


def test_rates_are_those_of_the_findings(tmp_path: Path) -> None:
    run, against = recording(), recording(every_ms=400)
    document = compared(tmp_path, run, against)
    found = document["load"]["rates"]
    with Store.open(tmp_path / "run.duckdb") as one, Store.open(tmp_path / "against.duckdb") as other:
        expected = [rates.rates(store) for store in (one, other)]

    for name in ("offered_rate_hz", "served_rate_hz"):
        assert [found[name][side] for side in ("run", "against")] == [one[name] for one in expected if one]
    assert found["offered_rate_hz"]["difference"] == -0.5
    assert found["offered_rate_hz"]["told_apart"] is True
    assert "offered load (2.00 and 2.50 requests/s)" in told(document)


# Invariants --------------------------------------------------------------------------------------------------

CAUSES = [("wire", "transfer"), ("post", "transfer"), ("report", "coordination"), ("prefill.forward", "compute.run")]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Draw a sample of blocks with any times by cause."""
    counts = draw(st.lists(st.integers(1, 9), min_size=BLOCKS, max_size=BLOCKS))
    times = st.lists(st.integers(0, 10**10), min_size=BLOCKS, max_size=BLOCKS)
    causes = {cause: draw(times) for cause in draw(st.lists(st.sampled_from(CAUSES), min_size=1, unique=True))}
    ttft = [sum(parts) for parts in zip(*causes.values(), strict=True)]
    group = Group("push", "router", sum(counts), sum(counts), {"complete": sum(counts)})
    return Drawn(group, {"ttft_ns": Figure(ttft, counts, {}, {})}, causes, {"prefill": 1, "decode": 1})


def both_ways(one: Drawn, other: Drawn) -> list[dict[str, Row]]:
    """Return all lines by name, the one against the other and the other way round."""
    found = []
    for sides in ((one, other), (other, one)):
        causes = comparison._causes(sides, judged=True)
        lines = {line["cause"]: line for line in causes["causes"]} | {line["class"]: line for line in causes["classes"]}
        mean = comparison._mean(sides, "ttft_ns", lines=8, judged=True)
        found.append({**lines, "TTFT": mean})
    return found


@given(drawn(), drawn())
def test_differences_by_cause_and_by_class_add_up_to_that_of_the_mean_ttft(one: Drawn, other: Drawn) -> None:
    """To the nanosecond, and so do the means of either side."""
    found, _ = both_ways(one, other)
    causes = [line for name, line in found.items() if name in dict(CAUSES)]
    classes = [line for name, line in found.items() if name in dict(CAUSES).values()]

    for value in ("run", "against", "difference"):
        assert sum(line[value] for line in causes) == found["TTFT"][value]
        assert sum(line[value] for line in classes) == found["TTFT"][value]


@given(drawn(), drawn())
def test_swapping_the_recordings_negates_every_difference(one: Drawn, other: Drawn) -> None:
    found, swapped = both_ways(one, other)

    for name, line in found.items():
        assert swapped[name] == {
            **line, "run": line["against"], "against": line["run"], "difference": -line["difference"],
            "low": -line["high"], "high": -line["low"],
        }  # fmt: skip


def test_swapping_two_stores_negates_too(tmp_path: Path) -> None:
    """Percentiles and rates, which the database works out."""
    one = recording(longer={"wire": 8})
    other = recording(jitter=3, every_ms=400)
    (tmp_path / "swapped").mkdir()
    documents = compared(tmp_path, one, other), compared(tmp_path / "swapped", other, one)
    for found in zip(*(list(lines_of(document)) for document in documents), strict=True):
        assert found[1]["difference"] == -found[0]["difference"]
        assert found[1]["told_apart"] == found[0]["told_apart"]
        if found[0]["low"] is not None:
            assert (found[1]["low"], found[1]["high"]) == (-found[0]["high"], -found[0]["low"])


def lines_of(document: Row) -> list[Row]:
    (group,) = document["groups"]
    names = ("ttft_ns", "tpot_ns", "prompt_tokens", "output_tokens")
    return [*document["load"]["rates"].values(), *(line for name in names for line in group[name].values())]


# When nothing is said, and why -------------------------------------------------------------------------------


def test_of_few_requests_no_interval_is_told(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(19, longer={"wire": 50}), recording())
    (group,) = document["groups"]

    assert group["no_intervals"] == "few requests"
    assert {line["told_apart"] for line in [*group["causes"], *group["prompt_tokens"].values()]} == {None}
    assert told(document).startswith("No verdict: 19 and 66 requests are too few, each side needs 20. Mean TTFT is 152")
    assert "Whether run.duckdb kept up is not known" in told(document)


def test_a_saturated_recording_gives_no_verdict(tmp_path: Path) -> None:
    """Offered 100 requests/s and served 50: each waits 10 ms longer than the one before."""
    growing = Sample()
    for number in range(60):
        path = (("prefill.queue", "compute.queue", "prefill", "", 10 * number + 10),)
        growing.add(f"a-{number}", path, (), start_ms=10 * number)
    document = compared(tmp_path, recording(60, every_ms=10), growing)
    (group,) = document["groups"]

    assert (group["no_intervals"], group["because_of"]) == ("saturated", ["against"])
    assert {line["told_apart"] for line in [*group["causes"], *group["classes"], *group["ttft_ns"].values()]} == {None}
    assert told(document).startswith(
        "No verdict: against.duckdb was offered more than it served, so TTFT there is queue growth."
    )
    assert "against.duckdb was saturated: offered 100.00 requests/s, served 50.00" in told(document)


def test_a_ttft_that_wanders_gives_no_verdict(tmp_path: Path) -> None:
    """Slow in the second half: what is usual cannot be known of a recording in which it changed once."""
    run = recording(33)
    recording(33, longer={"wire": 40}, sample=run)
    for number, request in enumerate(run.requests):
        request["start_ns"] += 500 * MS * 33 * (number >= 33)
    document = compared(tmp_path, run, recording(jitter=3))

    assert document["groups"][0]["no_intervals"] == "wanders"
    assert "No verdict: TTFT wanders in run.duckdb" in told(document)


def test_scopes_are_never_compared(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(), recording(scope="client"))

    assert document["groups"] == []
    assert told(document).startswith(
        "No comparison: run.duckdb has requests of scope router, against.duckdb of scope client, and times that begin"
    )


def test_the_scope_that_both_have_is_compared_and_the_rest_is_said_to_be_left_out(tmp_path: Path) -> None:
    run, against = recording(), recording(40, scope="client")
    recording(30, sample=run, scope="engine")
    recording(30, sample=against, scope="engine")
    document = compared(tmp_path, run, against)

    assert [group["run"]["scope"] for group in document["groups"]] == ["engine"]
    assert told(document).startswith("Of push, scope engine: nothing is told apart")
    why = ", since the other recording has none alike."
    assert f"Compared with nothing: 66 requests of run.duckdb (push, scope router){why}" in told(document)
    assert f"Compared with nothing: 40 requests of against.duckdb (push, scope client){why}" in told(document)


def test_push_is_compared_with_pull_where_each_has_only_one(tmp_path: Path) -> None:
    """Requests that D served alone stand beside them in both, and are compared with their like."""
    run, against = recording(longer={"wire": 10}), recording(mode="pull")
    for sample in (run, against):
        recording(25, sample=sample, mode="local")
    document = compared(tmp_path, run, against)

    modes = [(group["run"]["mode"], group["against"]["mode"]) for group in document["groups"]]
    assert modes == [("push", "pull"), ("local", "local")]
    assert "10.0 ms (10 %) later in run.duckdb (push) than in against.duckdb (pull)" in told(document)


@pytest.mark.parametrize(
    ("modes", "others", "pairs"),
    [
        (["push", "pull"], ["push", "pull"], [("pull", "pull"), ("push", "push")]),
        (["push", "pull"], ["pull"], [("pull", "pull")]),
        (["push"], ["local"], [("push", "local")]),
        (["push", "unknown"], ["pull"], [("push", "pull")]),
        (["push", "pull"], ["local"], []),
    ],
)
def test_like_is_compared_with_like(modes: list[str], others: list[str], pairs: list[tuple[str, str]]) -> None:
    sides = [[Group(mode, "router", 5, 5) for mode in names] for names in (modes, others)]

    assert [(one.mode, other.mode) for one, other in comparison._pairs(*sides)] == pairs


def test_several_modes_on_one_side_alone_compare_with_nothing(tmp_path: Path) -> None:
    run = recording(30)
    recording(30, sample=run, mode="pull")

    assert told(compared(tmp_path, run, recording(mode="local"))).startswith(
        "No comparison: run.duckdb has pull (scope router) and push (scope router), against.duckdb local (scope router)"
    )


def test_what_another_program_left_untold_is_a_group_like_any_other(tmp_path: Path) -> None:
    """No mode, scope or verdict, and no time on any path: nothing of it is raised."""
    run = recording(mode=None, scope=None, verdict=None, ttft_ns=0)
    run.segments.clear()
    document = compared(tmp_path, run, run)
    console = plain_console(80)
    comparison_page.print_comparison(document, ("a", "b"), console)

    (group,) = document["groups"]
    assert (group["run"]["mode"], group["run"]["scope"], group["run"]["with_first_token"]) == ("unknown", "unknown", 66)
    assert group["causes"] == []
    assert "66 unknown against 66 unknown" in " ".join(text_of(console).split())


def test_without_requests_or_first_tokens_the_store_is_named(tmp_path: Path) -> None:
    silent = Sample()
    silent.add("a", (), verdict="aborted")

    assert told(compared(tmp_path, recording(), Sample())).startswith("No comparison: against.duckdb holds no request.")
    alone = told(compared(tmp_path, silent, recording()))
    assert alone.startswith("No comparison: none of run.duckdb's requests had a first token.")
    assert "Compared with nothing: 1 request of run.duckdb (push, scope router), since none had a first token." in alone


# What else differs -------------------------------------------------------------------------------------------


def lab(max_num_seqs: int, cache: str) -> dict[str, str]:
    """Return the facts of a run of the lab with its commands."""
    transfer = json.dumps({"kv_connector": "NixlPushConnector", "engine_id": f"x{max_num_seqs}", "kv_buffer": "cpu"})
    words = f"--max-num-seqs {max_num_seqs} {cache} --port {8000 + max_num_seqs} --kv-transfer-config '{transfer}'"
    variables = f"KVTRACE_SPOOL=/s{max_num_seqs} VLLM_CPU_KVCACHE_SPACE={max_num_seqs // 4}"
    line = f"{variables} vllm serve --model /tmp/{max_num_seqs}/tiny {words}"
    return {"command.prefill-0": line, "workload": json.dumps({"rate_qps": 2.0, "input_len": 600, "seed": 1})}


def test_other_versions_models_flags_and_caches_are_named_and_what_each_run_has_anew_is_not(tmp_path: Path) -> None:
    run = {"vllm": "0.33.0", "model": "/models/large", "hostname": HOSTILE, **lab(8, "--enable-prefix-caching")}
    document = compared(tmp_path, recording(facts=run), recording(facts=lab(16, "--no-enable-prefix-caching")))

    assert document["differs"] == [
        {"what": "model", "run": "/models/large", "against": "tiny"},
        {"what": "vllm", "run": "0.33.0", "against": "0.32.0"},
        {"what": "prefill VLLM_CPU_KVCACHE_SPACE", "run": "2", "against": "4"},
        {"what": "prefill --max-num-seqs", "run": "8", "against": "16"},
        {"what": "prefill --enable-prefix-caching", "run": "on", "against": "off"},
    ]
    assert "vllm (0.33.0 in run.duckdb, 0.32.0 in against.duckdb)" in told(document)
    assert "With which flags" not in told(document)


def test_flags_that_nobody_recorded_are_said_to_be_unknown(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(facts=lab(8, "")), recording())

    assert document["differs"] == []
    assert "the engines of against.duckdb ran is not known" in told(document)


def test_a_command_that_was_recorded_is_compared_by_its_flags(tmp_path: Path) -> None:
    one, other = ({"command": f"vllm serve m --block-size={size} --port 1{size} --x 'a'"} for size in (16, 32))
    document = compared(tmp_path, recording(facts=one), recording(facts=other))
    broken = compared(tmp_path, recording(facts=one), recording(facts={"command": "vllm 'serve"}))
    nested = compared(tmp_path, recording(facts={"workload": "[" * 100_000}), recording())

    assert document["differs"] == [{"what": "command --block-size", "run": "16", "against": "32"}]
    assert broken["flags_known"] == {"run": True, "against": False}
    assert nested["differs"] == []


def test_secrets_in_commands_are_no_part_of_a_comparison(tmp_path: Path) -> None:
    words = "HF_TOKEN={0} VLLM_API_KEY={0} vllm serve m --api-key {0} --max-num-batched-tokens {1}"
    one, other = ({"command": words.format(*values)} for values in (("mine", 64), ("yours", 128)))
    document = compared(tmp_path, recording(facts=one), recording(facts=other))

    assert [line["what"] for line in document["differs"]] == ["command --max-num-batched-tokens"]


@pytest.mark.parametrize(
    ("run", "against", "is_other"),
    [("meta-llama/Tiny", "elsewhere/Tiny", True), ("/a/Tiny", "/b/Tiny", False), ("/a/Tiny", "./Tiny", False)],
)
def test_a_models_owner_counts_and_its_folder_does_not(run: str, against: str, is_other: bool, tmp_path: Path) -> None:
    document = compared(tmp_path, recording(facts={"model": run}), recording(facts={"model": against}))

    assert document["differs"] == ([{"what": "model", "run": run, "against": against}] if is_other else [])


def test_what_is_secret_is_not_told(tmp_path: Path) -> None:
    """A limit of tokens is none. An older kvtrace kept commands as they were."""
    words = "docker --env=KEY={0} --url http://{0}@h HF_TOKEN={0} vllm --api-key {0} {0} --max-num-batched-tokens {1}"
    one, other = ({"command": words.format(*values)} for values in (("hush", 8), ("hash", 16)))

    assert compared(tmp_path, recording(facts=one), recording(facts=other))["differs"] == [
        {"what": "command --max-num-batched-tokens", "run": "8", "against": "16"}
    ]


def test_short_flags_and_negative_values_are_compared_too(tmp_path: Path) -> None:
    one, other = (
        {"command": f"bash -c 'nice -n 5 -- vllm serve m -q {kind} --max-logprobs -{most} --eager'"}
        for kind, most in (("fp8", 1), ("awq", 2))
    )

    assert compared(tmp_path, recording(facts=one), recording(facts=other))["differs"] == [
        {"what": "command -q", "run": "fp8", "against": "awq"},
        {"what": "command --max-logprobs", "run": "-1", "against": "-2"},
    ]


def test_longer_prompts_are_said_to_be_a_possible_reason(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(longer={"wire": 9}), recording(jitter=3, prompt_tokens=1_200))

    assert "What else differs and may be the reason: prompt tokens (mean 600.0 and 1,200.0)." in told(document)


def test_engines_and_ends_and_losses_are_said(tmp_path: Path) -> None:
    run = recording(60, facts={"recorder.state": "recording"})
    for number, request in enumerate(run.requests):
        request["decode_engine"] = f"d{number % 2}"
    for number in range(20):
        run.add(f"lost-{number}", (), start_ms=100 * number, verdict="aborted")
    path = run.write(tmp_path / "run.duckdb")
    with Store.open(path, "write") as store:
        store.append(
            "process", pa.Table.from_pylist([{"process": 1, "lost_records": 3}], store.arrow_schema("process"))
        )
    with Store.open(path) as one, Store.open(recording().write(tmp_path / "against.duckdb")) as other:
        document = comparison.compare(one, other)

    assert "engines (1 P with 2 D and 1 P with 1 D)" in told(document)
    assert "had no first token: 20 of 80 in run.duckdb and 0 of 66 in against.duckdb." in told(document)
    assert "aborted 25 % and 0 % of the requests" in told(document)
    assert "run.duckdb lost 3 records" in told(document)
    assert "run.duckdb is still being recorded." in told(document)


# From the command line ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of push.duckdb, pull.duckdb, quicker by a wait and of another vLLM, and engine.duckdb."""
    folder = tmp_path_factory.mktemp("stores")
    push = recording(longer={"stage.wait": 40}, facts={"vllm": "0.33.0"})
    push.add("kvt-away", (), verdict="aborted", start_ms=7)
    push.write(folder / "push.duckdb")
    recording(jitter=3, mode="pull").write(folder / "pull.duckdb")
    recording(scope="engine").write(folder / "engine.duckdb")
    return folder


@pytest.mark.parametrize("width", [60, 80])
def test_the_comparison_looks_like_the_golden(
    width: int, stores: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(stores)

    code, out, err = explain(capsys, "push.duckdb", "--against", "pull.duckdb")

    assert (code, err) == (0, "")
    check_golden(f"cli/against_{width}.txt", out)


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 240])
def test_the_comparison_fits_whatever_the_width_and_nothing_hurts_a_terminal(width: int, tmp_path: Path) -> None:
    run = recording(longer={"wire": 2_000}, facts={"model": HOSTILE}, mode=HOSTILE, verdict=HOSTILE)
    for segment in run.segments:
        if segment["cause"] == "wire":
            segment["cause"] = HOSTILE * 4
    document = compared(tmp_path, run, recording())
    console = plain_console(width)

    comparison_page.print_comparison(document, (f"a/{HOSTILE}{'y' * 300}.duckdb", "b/\n.duckdb"), console)

    text = text_of(console)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "\r" not in text
    assert "[red]x[/red]\\x1b[31m\\r" in text.replace("\n", "")


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    console = plain_console(80, "ascii")

    comparison_page.print_comparison(compared(tmp_path, recording(), recording()), ("a", "b"), console)

    assert "# compute.run" in text_of(console)
    assert text_of(console).isascii()


def test_the_json_has_the_promised_shape(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(capsys, stores / "push.duckdb", "--against", stores / "pull.duckdb", "--json")
    document = json.loads(out)
    found = document["comparison"]
    (group,) = found["groups"]

    assert (code, err) == (0, "")
    assert list(document) == ["schema", "run", "against", "comparison"]
    assert (document["run"]["vllm"], document["against"]["vllm"]) == ("0.33.0", "0.32.0")
    assert list(found) == [
        "sentence", "cautions", "load", "differs", "flags_known", "lost_records", "is_same", "is_recording", "groups",
        "not_compared",
    ]  # fmt: skip
    assert list(group) == [
        "sentence", "cautions", "run", "against", "no_intervals", "because_of", "ttft_ns", "tpot_ns", "prompt_tokens",
        "output_tokens", "classes", "causes", "verdicts",
    ]  # fmt: skip
    line = ["run", "against", "difference", "low", "high", "told_apart"]
    for name in ("ttft_ns", "tpot_ns", "prompt_tokens", "output_tokens"):
        assert list(group[name]) == ["mean", "p50", "p90", "p99"]
        assert all(list(one) == line for one in group[name].values())
    assert all(list(one) == ["cause", "class", *line] for one in group["causes"])
    assert all(list(one) == ["class", *line] for one in group["classes"])
    assert list(found["load"]["rates"]) == ["offered_rate_hz", "served_rate_hz"]
    assert sum(one["difference"] for one in group["causes"]) == group["ttft_ns"]["mean"]["difference"]


def test_stores_are_only_read(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [stores / "push.duckdb", stores / "pull.duckdb"]
    before = [path.read_bytes() for path in paths]

    assert explain(capsys, paths[0], "--against", paths[1])[0] == 0
    assert [path.read_bytes() for path in paths] == before
    assert sorted(path.name for path in stores.iterdir()) == ["engine.duckdb", "pull.duckdb", "push.duckdb"]


def test_a_store_against_itself_differs_in_nothing(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "push.duckdb").symlink_to(stores / "push.duckdb")
    for other in (stores / "push.duckdb", tmp_path / "push.duckdb"):
        code, out, err = explain(capsys, stores / "push.duckdb", "--against", other, "--json")
        found = json.loads(out)["comparison"]

        assert (code, err, found["is_same"]) == (0, "", True)
        assert {line["difference"] for line in found["groups"][0]["causes"]} == {0}
        assert found["sentence"].startswith("Nothing is told apart between ")


@pytest.mark.parametrize("extra", [["kvt-000"], ["--slowest", 3], ["--reconcile"]])
def test_what_is_about_single_requests_goes_with_no_comparison(
    extra: list[object], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(capsys, stores / "push.duckdb", *extra, "--against", stores / "pull.duckdb")

    assert (code, out) == (2, "")
    assert "it goes with no REQUEST, --slowest or --reconcile" in err


def test_an_error_names_the_store_that_it_is_about(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.duckdb").write_text("no database")
    long = "x" * 300
    for other, said in (
        ("none.duckdb", "does not exist"), ("text.duckdb", "is not a DuckDB file"), (long, "cannot be read: File name"),
    ):  # fmt: skip
        for paths in ((stores / "push.duckdb", tmp_path / other), (tmp_path / other, stores / "push.duckdb")):
            code, out, err = explain(capsys, paths[0], "--against", paths[1])

            assert (code, out) == (1, "")
            assert f"{tmp_path / other} {said}" in err


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_what_cannot_be_compared_says_so_and_is_no_success(
    extra: list[str], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = explain(capsys, stores / "push.duckdb", "--against", stores / "engine.duckdb", *extra)

    assert code == 1
    assert "No comparison: push.duckdb has requests of scope router" in out
    assert not extra or json.loads(out)["comparison"]["groups"] == []


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    assert contrasts.called(("a/run.duckdb", "b/run.duckdb")) == ("a/run.duckdb", "b/run.duckdb")
    assert contrasts.called(("a/push.duckdb", "b/pull.duckdb")) == ("push.duckdb", "pull.duckdb")
    assert contrasts.called(("/mnt/runs/push/run.duckdb", "/mnt/runs/pull/run.duckdb")) == (
        "push/run.duckdb", "pull/run.duckdb",
    )  # fmt: skip
    assert contrasts.called(("run.duckdb", "./run.duckdb")) == ("run.duckdb", "./run.duckdb")
    assert contrasts.called(("a/run.duckdb", "a/run.duckdb")) == ("run.duckdb", "run.duckdb")


def test_long_names_that_differ_in_their_middle_stay_apart(tmp_path: Path) -> None:
    """A model's name and a flag's value too, of which the page shows no pages."""
    names = [f"the-same-beginning-of-a-long-name-{which}-and-the-same-end-of-it.duckdb" for which in "AB"]
    flags = [{"command": "vllm serve m --block-size " + "x" * 5_000 + which + "y" * 5_000} for which in "AB"]
    document = compared(tmp_path, recording(facts=flags[0]), recording(facts=flags[1]))
    console = plain_console(80)

    comparison_page.print_comparison(document, names, console)

    told = " ".join(text_of(console).split())
    for which in "AB":
        assert f" is …ame-{which}-and-the-same-end-of-it.duckdb," in told
    assert "command --block-size (…xxxxA" in told
    assert len(told) < 4_000
    assert len(document["differs"][0]["run"]) == 10_001


def test_a_reader_that_has_enough_is_no_error(stores: Path) -> None:
    """The reader is gone before anything is written: what is printed fits into a pipe that nobody has emptied."""
    paths = (str(stores / "push.duckdb"), str(stores / "pull.duckdb"))
    command = [sys.executable, "-m", "kvtrace", "explain", paths[0], "--against", paths[1]]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)

    assert (done.returncode, done.stderr) == (1, b"")
