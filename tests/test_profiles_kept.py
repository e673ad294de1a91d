"""Profiles without a server: kept by a receiver, chosen by time, request and class, merged; where they are found."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from kvtrace import cli, profiler
from kvtrace.errors import SourceError
from kvtrace.profiles import folder, links, pprof
from kvtrace.profiles.messages import Profile, PushRequest
from kvtrace.profiles.receiver import PATH, Receiver
from kvtrace.store import Store
from tests.sample_store import MS, START_NS, Sample
from tests.test_profiler import PROGRAM, is_near

SECOND_NS = 1_000_000_000
PROTO = {"Content-Type": "application/proto"}
HOSTILE = 'p"0{}\n<b>'


def push(
    samples: Iterable[tuple[tuple[str, ...], Mapping[str, str], int]], begin_ns: int = START_NS, **labels: str
) -> bytes:
    """Return a push as pyroscope-io makes it: stacks (innermost first), labels, ns; one second from `begin_ns` on."""
    profile = Profile(time_nanos=begin_ns, duration_nanos=SECOND_NS, period=10_000_000)
    strings = [""]

    def at(text: str) -> int:
        if text not in strings:
            strings.append(text)
        return strings.index(text)

    profile.sample_type.add(type=at("cpu"), unit=at("nanoseconds"))
    ids: dict[str, int] = {}
    for stack, own, value_ns in samples:
        for name in stack:
            ids.setdefault(name, len(ids) + 1)
        made = profile.sample.add(location_id=[ids[name] for name in stack], value=[value_ns])
        for name, value in own.items():
            made.label.add(key=at(name), str=at(value))
    for name, identity in ids.items():
        profile.function.add(id=identity, name=at(name), filename=at("x.py"))
        profile.location.add(id=identity).line.add(function_id=identity, line=identity)
    profile.string_table.extend(strings)
    pushed = PushRequest()
    series = pushed.series.add()
    for name, value in {"__name__": "process_cpu", "service_name": "kvtrace", **labels}.items():
        series.labels.add(name=name, value=value)
    series.samples.add(rawProfile=profile.SerializeToString())
    return gzip.compress(pushed.SerializeToString())


def stage(name: str) -> dict[str, str]:
    return {profiler.STAGE_LABEL: name}


def totals(data: bytes) -> Counter[tuple[str, str, str]]:
    """Return the ns of a profile's samples by role, stage and innermost function."""
    profile = pprof.parse(data)
    strings = profile.string_table
    functions = {each.id: strings[each.name] for each in profile.function}
    frames = {each.id: functions[each.line[0].function_id] for each in profile.location}
    found: Counter[tuple[str, str, str]] = Counter()
    for sample in profile.sample:
        labels = {strings[each.key]: strings[each.str] for each in sample.label}
        found[labels.get("role", ""), labels.get(profiler.STAGE_LABEL, ""), frames[sample.location_id[0]]] += (
            sample.value[0]
        )
    return found


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a folder of a push a second, four seconds: P posts, D polls, another P posts too, a router waits."""
    keeper = folder.Keeper(tmp_path / "profiles")
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


def exported(run: Path, *arguments: str) -> Counter[tuple[str, str, str]]:
    target = run.with_name("merged.pb.gz")
    assert cli.main(["export", str(run), "--format", "pprof", "-o", str(target), "--force", *arguments]) == 0
    return totals(target.read_bytes())


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
    run: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = next(one.path for one in folder.files(kept) if one.path.name.startswith("decode"))
    victim.write_bytes(victim.read_bytes()[:-9])

    assert exported(run)[POLL] == 15
    assert victim.name in capsys.readouterr().err


def test_a_run_without_profiles_says_how_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Sample().write(tmp_path / "run.duckdb")

    assert cli.main(["export", str(run), "--format", "pprof"]) != 0
    assert "--profile-dir" in capsys.readouterr().err


# The receiver ------------------------------------------------------------------------------------------------------


def test_a_hostile_push_gets_no_file_outside_and_keeps_its_labels(tmp_path: Path) -> None:
    labels = {"role": "../../x\0", "process": "/etc", "engine": HOSTILE, "rank": "0", "secret": "no"}
    with Receiver(tmp_path / "profiles") as receiver:
        answer = httpx.post(
            receiver.url + PATH, content=push([(("f" * 10_000,), {"a\n": '"'}, 1)], **labels), headers=PROTO
        )
    (path,) = tmp_path.rglob("*.pb.gz")
    (one,) = folder.files(tmp_path / "profiles")
    profile = pprof.parse(path.read_bytes())
    found = {profile.string_table[each.key]: profile.string_table[each.str] for each in profile.sample[0].label}

    assert answer.status_code == 200
    assert path == one.path
    assert (one.begin_ns, one.end_ns) == (START_NS, START_NS + SECOND_NS)
    assert found == {"a\n": '"', **{name: value for name, value in labels.items() if name != "secret"}}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (PATH, b"\x1f\x8bnothing", 400),
        (PATH, b"\xff\xff\xff", 400),
        (PATH, gzip.compress(PushRequest(series=[{"samples": [{"rawProfile": b"\xff"}]}]).SerializeToString()), 400),
        (PATH, gzip.compress(bytes(pprof.BYTES_MOST + 1)), 400),
        ("/elsewhere", b"", 404),
    ],
    ids=["no gzip", "no push", "no profile", "too large", "elsewhere"],
)
def test_what_is_no_push_is_refused_and_the_next_one_taken(tmp_path: Path, path: str, body: bytes, status: int) -> None:
    with Receiver(tmp_path) as receiver:
        refused = httpx.post(receiver.url + path, content=body, headers=PROTO)
        taken = httpx.post(receiver.url + PATH, content=push([(("f",), {}, 1)]), headers=PROTO)

        assert (refused.status_code, taken.status_code, receiver.kept) == (status, 200, 1)
        assert bool(receiver.failure) == (status == 400)


def test_a_page_in_a_browser_cannot_push(tmp_path: Path) -> None:
    with Receiver(tmp_path) as receiver:
        answer = httpx.post(
            receiver.url + PATH, content=push([(("f",), {}, 1)]), headers={"Content-Type": "text/plain"}
        )

    assert (answer.status_code, receiver.kept) == (415, 0)


def test_past_its_budget_a_folder_takes_no_more(tmp_path: Path) -> None:
    keeper = folder.Keeper(tmp_path, budget_bytes=400)
    keeper.keep(push([(("f",), {}, 1)]))
    keeper.keep(push([(("f",), {}, 1)]))
    with pytest.raises(OSError, match="limit"):
        keeper.keep(push([((f"f{number}",), {}, number) for number in range(200)]))

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 400
    assert keeper.kept == len(folder.files(tmp_path)) == 2


def test_a_full_disk_leaves_no_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), len(data))

    keeper = folder.Keeper(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            keeper.keep(push([(("f",), {}, 1)]))

    assert list(tmp_path.iterdir()) == []
    assert keeper.kept == 0


def test_a_profile_that_points_nowhere_is_an_error_of_its_own() -> None:
    profile = Profile(string_table=["", "nanoseconds"], sample_type=[{"unit": 1}], sample=[{"location_id": [9]}])

    with pytest.raises(SourceError, match="contradicts itself"):
        pprof.Merged("wall", "nanoseconds").add(profile)


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
    assert 'engine="p\\"0{}\\n<b>"' in parse_qs(prefill.query)["query"][0]


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


# Recording ---------------------------------------------------------------------------------------------------------


def test_a_recorded_command_is_profiled_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: the switch below the command, real pyroscope-io, the receiver, the store, the export."""
    pytest.importorskip("pyroscope")
    monkeypatch.setenv("ENGINE", "e0")
    monkeypatch.setenv(profiler.RATE_VARIABLE, "100")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv(profiler.VARIABLE, raising=False)
    run, place = tmp_path / "run.duckdb", tmp_path / "kept"

    command = [sys.executable, "-c", PROGRAM, "works"]
    assert cli.main(["record", "-o", str(run), "--profile-dir", str(place), "--", *command]) == 0
    said = capsys.readouterr().err
    with Store.open(run) as store:
        facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}
    found = exported(run, "--class", "transfer")

    assert facts["profiles.dir"] == str(place)
    assert f"profiles in {place}" in said
    assert profiler.VARIABLE not in os.environ
    assert {(role, name) for role, name, _ in found} == {("decode", "post")}
    assert is_near(sum(found.values()) / 1e9, 0.6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "http://x", "--profile-dir", "d"), "exclude each other"),
        (("--profile-grafana", "http://x"), "belongs to --profile URL"),
        (("--profile", "localhost:4040"), "http://HOST:PORT"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(
    tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["record", "-o", str(tmp_path / "run.duckdb"), *options, "--", "true"]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_said_and_the_store_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in profiler._PROXIES:
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run.duckdb"
    options = ["--profile", "http://127.0.0.1:1", "--profile-grafana", "http://grafana"]
    assert cli.main(["record", "-o", str(run), *options, "--", "true"]) == 0
    with Store.open(run) as store:
        facts = {row["name"]: row["value"] for row in store.rows("SELECT name, value FROM run")}
    names: Any = ("profiles.url", "profiles.application", "profiles.grafana")

    assert "profiles are lost until it does" in capsys.readouterr().err
    assert [facts[name] for name in names] == ["http://127.0.0.1:1", "kvtrace", "http://grafana"]
