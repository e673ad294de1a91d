"""Two recordings compared: when nothing is said of them and why, and what else differs and may be the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from kvtrace.report import comparison, comparison_page
from kvtrace.report.samples import Group
from kvtrace.store import Store
from tests.comparisons import HOSTILE, compared, recording, told
from tests.printed import plain_console, text_of
from tests.sample_store import MS, Sample

# When nothing is said, and why -------------------------------------------------------------------------------


def test_of_few_requests_no_interval_is_told(tmp_path: Path) -> None:
    document = compared(tmp_path, recording(19, longer={"wire": 50}), recording())
    (group,) = document["groups"]

    assert group["no_intervals"] == "few requests"
    assert {line["told_apart"] for line in [*group["causes"], *group["prompt_tokens"].values()]} == {None}
    assert told(document).startswith("No verdict: 19 and 66 requests are too few, each side needs 20. Mean TTFT is 152")
    assert "Whether run.duckdb kept up is not known" in told(document)


def test_of_a_recording_against_itself_everything_is_said_once(tmp_path: Path) -> None:
    path = recording(19).write(tmp_path / "run.duckdb")
    with Store.open(path) as store:
        document = comparison.compare(store, store)

    assert told(document).count("Whether run.duckdb kept up is not known") == 1
    assert "against.duckdb" not in told(document).partition("\n")[2]


@pytest.mark.parametrize(("count", "explained"), [(19, False), (66, True)])
def test_intervals_are_explained_where_a_table_has_one(tmp_path: Path, count: int, explained: bool) -> None:
    console = plain_console()
    document = compared(tmp_path, recording(count), recording(count, jitter=2))
    comparison_page.print_comparison(document, ("run.duckdb", "against.duckdb"), console)

    assert ("Intervals are of 95 %" in text_of(console)) == explained


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
    assert "against.duckdb was saturated: offered 100 requests/s, served 50.0" in told(document)


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
