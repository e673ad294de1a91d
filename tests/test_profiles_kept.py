"""Profiles without a server: chosen by time, request and class, merged; where a run's profiles are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from kvtrace import cli, profiler
from kvtrace.errors import SourceError
from kvtrace.profiles import folder, links, pprof
from kvtrace.profiles.messages import Profile, PushRequest
from kvtrace.store import Store
from tests.profile_pushes import HOSTILE, SECOND_NS, exported, push, stage
from tests.sample_store import MS, START_NS, Sample


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a push a second, four seconds: P posts, D polls, another P posts too, a router waits."""
    keeper = folder.Keeper(tmp_path_factory.mktemp("kept") / "profiles")
    for number in range(4):
        begin_ns = START_NS + number * SECOND_NS
        posting = [(("transfer", "step"), stage("post"), 10), (("forward", "step"), stage("forward"), 100)]
        keeper.keep(push([*posting, (("idle",), {}, 1000)], begin_ns, role="prefill", engine="p0", process="worker"))
        keeper.keep(push(posting[:1], begin_ns, role="prefill", engine="p1", process="worker"))
        keeper.keep(push([(("check",), stage("poll"), 5)], begin_ns, role="decode", engine="d0", process="worker"))
        keeper.keep(push([(("select",), {}, 7)], begin_ns, role="router", process="router"))
    return keeper.folder


@pytest.fixture
def run(tmp_path: Path, kept: Path) -> Path:
    """Return a store of one request in the second second and one in the fourth, both of p0 and d0."""
    sample = Sample(facts={"profiles.dir": str(kept)})
    sample.add("kvt-1", start_ms=1200)
    sample.add("kvt-2", start_ms=3200)
    return sample.write(tmp_path / "run.duckdb")


POST, FORWARD = ("prefill", "post", "transfer"), ("prefill", "forward", "forward")
POLL, IDLE, ROUTER = ("decode", "poll", "check"), ("prefill", "", "idle"), ("router", "", "select")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {POST: 80, FORWARD: 400, POLL: 20, IDLE: 4000, ROUTER: 28}),
        (("--requests", "kvt-1"), {POST: 10, FORWARD: 100, POLL: 5, IDLE: 1000, ROUTER: 7}),
        (("--requests", "kvt-1", "--requests", "kvt-2", "--class", "transfer"), {POST: 20}),
        (("--class", "coordination"), {POLL: 20}),
        (("--class", "compute", "--from", "2023-11-14T22:13:21", "--to", "2023-11-14T22:13:23"), {FORWARD: 200}),
    ],
)
def test_profiles_are_merged_by_time_request_and_class(
    run: Path, arguments: tuple[str, ...], expected: dict[tuple[str, str, str], int]
) -> None:
    """A request's own engines and the router count; of another P nothing is merged. Files are whole: a second each."""
    assert exported(run, *arguments) == expected


def test_of_a_folder_of_several_runs_only_the_runs_own_time_is_merged(run: Path) -> None:
    with Store.open(run, "write") as store:
        store.remember(
            {"created_ns": f"{START_NS + SECOND_NS}", "recorder.published_ns": f"{START_NS + 2 * SECOND_NS}"}
        )

    assert exported(run)[POST] == 10 * 2


def test_a_merged_profile_keeps_stacks_lines_labels_and_its_time(kept: Path) -> None:
    total = pprof.Merged("wall", "nanoseconds")
    for one in folder.files(kept):
        total.add(pprof.parse(one.path.read_bytes()))
    profile = pprof.parse(pprof.packed(total.profile("all")))
    strings = profile.string_table
    (posting,) = (sample for sample in profile.sample if sample.value[0] == 40 and len(sample.location_id) == 2
                  and "p1" in {strings[label.str] for label in sample.label})  # fmt: skip
    lines = {each.id: each.line[0] for each in profile.location}
    names = {each.id: (strings[each.name], strings[each.filename]) for each in profile.function}

    assert [(names[lines[at].function_id], lines[at].line) for at in posting.location_id] == [
        (("transfer", "x.py"), 1),
        (("step", "x.py"), 2),
    ]
    assert {strings[each.key]: strings[each.str] for each in posting.label} == {
        profiler.STAGE_LABEL: "post", "role": "prefill", "engine": "p1", "process": "worker"
    }  # fmt: skip
    assert (profile.time_nanos, profile.duration_nanos, profile.period) == (START_NS, 4 * SECOND_NS, 10_000_000)
    assert [strings[each] for each in profile.comment] == ["all"]
    assert strings[profile.sample_type[0].type] == "wall"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--requests", "kvt-1", "--class", "wire"), "--class is compute, coordination, transfer"),
        (("--from", "2030-01-01"), "no profile in"),
        (("--profile-dir", "nowhere"), "nowhere does not exist"),
    ],
)
def test_what_cannot_be_merged_is_said(
    run: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(run), "--format", "pprof", *arguments]) != 0
    assert message in capsys.readouterr().err
    assert not run.with_suffix(".pb.gz").exists()


def test_a_file_that_is_cut_short_is_left_out_and_named(
    run: Path, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(shutil.copytree(kept, tmp_path / "own"))
    victim = next(one.path for one in folder.files(own) if one.path.name.startswith("decode"))
    victim.write_bytes(victim.read_bytes()[:-9])

    assert exported(run, "--profile-dir", str(own))[POLL] == 15
    assert victim.name in capsys.readouterr().err


def test_a_run_without_profiles_says_how_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Sample().write(tmp_path / "run.duckdb")

    assert cli.main(["export", str(run), "--format", "pprof"]) != 0
    assert "--profile-dir" in capsys.readouterr().err


def test_a_profile_that_points_nowhere_is_an_error_of_its_own() -> None:
    profile = Profile(string_table=["", "nanoseconds"], sample_type=[{"unit": 1}], sample=[{"location_id": [9]}])

    with pytest.raises(SourceError, match="contradicts itself"):
        pprof.Merged("wall", "nanoseconds").add(profile)


@pytest.mark.parametrize(
    ("begin_ns", "values"),
    [(-1, (1,)), (2**63 - 2, (1,)), (START_NS, (2**63 - 1, 1)), (START_NS, (2**63 - 5,)), (START_NS, (-(2**63), -8))],
)
def test_a_profile_of_impossible_numbers_is_left_out_whole(begin_ns: int, values: tuple[int, ...]) -> None:
    """Times and sums that no file can hold; what was added before and comes after is as without it."""
    total = pprof.Merged("wall", "nanoseconds")
    for start_ns, each in ((START_NS, (7,)), (begin_ns, values), (START_NS + 1, (3,))):
        sent = PushRequest.FromString(pprof.inflated(push([(("f",), {}, value) for value in each], start_ns)))
        profile = pprof.parse(sent.series[0].samples[0].rawProfile)
        if each is values:
            with pytest.raises(SourceError, match="contradicts itself"):
                total.add(profile)
        else:
            total.add(profile)

    made = pprof.parse(pprof.packed(total.profile("all")))
    assert [sample.value[0] for sample in made.sample] == [10]
    assert (made.time_nanos, made.duration_nanos) == (START_NS, SECOND_NS + 1)


def test_an_engine_whose_id_is_longer_than_a_label_is_found(tmp_path: Path) -> None:
    keeper = folder.Keeper(tmp_path / "profiles")
    engine = "e" * 200 + "\n"
    posting = [(("transfer",), stage("post"), 10)]
    keeper.keep(push(posting, role="prefill", engine=profiler.clean(engine), process="worker"))
    sample = Sample(facts={"profiles.dir": str(keeper.folder)})
    sample.add("kvt-1", prefill_engine=engine)
    run = sample.write(tmp_path / "run.duckdb")

    assert exported(run, "--requests", "kvt-1") == {("prefill", "post", "transfer"): 10}
    with Store.open(run) as store:
        (row,) = store.rows("SELECT * FROM request")
    assert links.windows(row)[0].labels == {"engine": "e" * 128}


# Where a run's profiles are ----------------------------------------------------------------------------------------


def explained(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["explain", str(run), "kvt-1", *arguments]) == 0
    return capsys.readouterr().out


def profiled(tmp_path: Path, **facts: str) -> Path:
    sample = Sample(facts={name.replace("_", "."): value for name, value in facts.items()})
    sample.add("kvt-1", prefill_engine=HOSTILE, start_ms=500)
    return sample.write(tmp_path / "run.duckdb")


def test_explain_gives_an_address_in_pyroscope(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From an upload before the request to its end, 300 ms after it began, in whole seconds."""
    run = profiled(tmp_path, profiles_url="http://pyro:4040/", profiles="on")

    lines = [line for line in explained(run, capsys).splitlines() if line.startswith("Profiles of ")]
    prefill, decode = (urlsplit(line.split(": ", 1)[1]) for line in lines)

    assert (decode.netloc, decode.path) == ("pyro:4040", "/")
    assert parse_qs(decode.query) == {
        "query": [f'{links.PROFILE_TYPE}{{service_name="kvtrace",engine="d0"}}'],
        "from": [str(START_NS // SECOND_NS - 10)],
        "until": [str(START_NS // SECOND_NS + 1)],
    }
    assert 'engine="p\\"0{}?<b>"' in parse_qs(prefill.query)["query"][0]


def test_explain_gives_an_address_in_grafana_where_one_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = profiled(tmp_path, profiles_url="http://pyro:4040", profiles_grafana="https://grafana.example/team/")

    (first, second) = json.loads(explained(run, capsys, "--json"))["requests"][0]["profiles"]
    address = urlsplit(second["url"])

    assert (first["side"], second["side"], second["folder"]) == ("prefill", "decode", None)
    assert address.path == "/team" + links.EXPLORE_PATH
    assert parse_qs(address.query) == {
        "explorationType": ["flame-graph"],
        "var-serviceName": ["kvtrace"],
        "var-profileMetricId": [links.PROFILE_TYPE],
        "from": [str(START_NS // MS + 500 - links.EARLIER_MS)],
        "to": [str(START_NS // MS + 500 + 301)],
        "var-filters": ["engine|=|d0"],
    }
    assert (second["from_ms"], second["to_ms"]) == (START_NS // MS - 9500, START_NS // MS + 801)


def test_explain_names_the_export_where_profiles_are_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"kvtrace export {run} --format pprof --requests kvt-1" in explained(run, capsys)


@pytest.mark.parametrize("facts", [{}, {"profiles": "joined", "profiles_url": "http://x"}, {"profiles": "off: x"}])
def test_a_run_whose_profiles_are_nowhere_known_says_nothing_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, str]
) -> None:
    run = profiled(tmp_path, **facts)

    assert "rofiles" not in explained(run, capsys)
    assert "profiles" not in json.loads(explained(run, capsys, "--json"))["requests"][0]
