"""Profiles of one process: real pyroscope-io in processes of its own, pushing to a stand-in for the server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from instrumented_connectors import middleware, traced
from kvtrace import profile_server, profiler
from kvtrace.errors import UsageError
from tests.pyroscope_stand_in import Sample, StandIn, black_hole, stand_in
from tests.waiting import LONG_S

HOSTILE = 'e"0\n{x="\ud800\x1b[31m</b>' + "e" * 500
CLEAN = 'e"0?{x="??[31m</b>'
PROGRAM = """
import hashlib, logging, multiprocessing, os, sys, threading, time
from kvtrace import profiler

logging.basicConfig(level=logging.WARNING)
class Facts:
    def fact(self, name, value):
        print("fact", name, value, flush=True)

what, engine = sys.argv[1], os.environ["ENGINE"].encode().decode("unicode_escape", "surrogatepass")

def work(stages, seconds):
    for stage in stages:
        before = found.enter(stage)
        time.sleep(seconds)
        found.leave(before)

def digest(seconds):
    end, data = time.monotonic() + seconds, bytes(8 << 20)
    while time.monotonic() < end:
        hashlib.sha256(data).digest()

def started(role):
    return profiler.start({"role": role, "engine": engine, "rank": ""}, Facts())

def in_child():
    global found
    assert profiler._state.profiler is None
    found = started("child")
    assert found is not None
    work(["poll"], 0.4)

if what == "joins":
    import pyroscope
    pyroscope.configure(application_name="theirs", server_address=os.environ["KVTRACE_PROFILE"], upload_interval=1,
                        oncpu=False, gil_only=False, tags={"team": "own"})
found = started("decode")
assert started("again") is found
if what in ("works", "joins"):
    # By turns, since for a while the sampler may get no processor.
    writer = threading.Thread(target=work, args=(["push", "post"] * 6, 0.1), name="nixl-push-writer")
    writer.start()
    found.forward_began()
    for _ in range(4):
        digest(0.1)
        before = found.enter("start_load", "forward")
        work(["prepare"], 0.075)
        found.leave(before)
    found.forward_ended()
    writer.join()
    if what == "joins":
        pyroscope.shutdown()
if what == "forks":
    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join()
    assert child.exitcode == 0
if what == "dead":
    work(["post"], 1.3)
if what == "broken":
    assert found is None
    logging.getLogger("kvtrace").warning("serving")
print("end", flush=True)
"""


@dataclass
class Ended:
    """A process that has ended: what it printed, and what the server got of it."""

    code: int
    out: str
    err: str
    samples: list[Sample]

    def seconds(self, **labels: str) -> float:
        """Return the time of the samples with these labels, `_` standing for a dot."""
        wanted = {name.replace("_", "."): value for name, value in labels.items()}
        found = (one for one in self.samples if wanted.items() <= (one.series | one.labels).items())
        return sum(one.seconds for one in found)


def begin(what: str, url: str, engine: str = "e0", **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, profiler.VARIABLE: url, profiler.UPLOAD_VARIABLE: "1", "ENGINE": engine}
    environment |= {profiler.RATE_VARIABLE: "100", **more}
    command = [sys.executable, "-c", PROGRAM, what]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Ended]]:
    """Run all processes side by side."""
    pytest.importorskip("pyroscope")
    without = tmp_path_factory.mktemp("without")
    (without / "pyroscope.py").write_text("raise ModuleNotFoundError('No module named pyroscope')")
    hostile = HOSTILE.encode("unicode_escape", "surrogatepass").decode()
    with ExitStack() as stack:
        servers: dict[str, StandIn] = defaultdict(lambda: stack.enter_context(stand_in()))
        running = {
            "works": begin("works", servers["works"].url, hostile),
            "joins": begin("joins", servers["joins"].url),
            "forks": begin("forks", servers["forks"].url),
            "refused": begin("dead", "http://127.0.0.1:1"),
            "silent": begin("dead", stack.enter_context(black_hole())),
            "nowhere": begin("broken", "not an address"),
            "absent": begin("broken", "http://127.0.0.1:1", PYTHONPATH=str(without)),
        }
        found = {}
        for name, process in running.items():
            out, err = process.communicate(timeout=LONG_S)
            found[name] = Ended(process.returncode, out, err, servers[name].samples() if name in servers else [])
        yield found


def is_near(seconds: float, expected_s: float) -> bool:
    """Return whether samples amount to a time: a busy machine takes fewer of them, and sleepers wake late."""
    return expected_s / 10 < seconds < expected_s * 8


def test_waiting_threads_are_sampled_under_their_stages(ended: Mapping[str, Ended]) -> None:
    """Every stage is seen for about as long as it took, whether its thread slept, waited or had let go of the GIL."""
    works = ended["works"]
    post_s, push_s = (works.seconds(kvtrace_stage=name, kvtrace_thread="writer") for name in ("post", "push"))

    assert (works.code, works.err) == (0, "")
    assert is_near(post_s, 0.6)
    assert is_near(push_s, 0.6)
    assert post_s / 3 < push_s < 3 * post_s
    assert is_near(works.seconds(kvtrace_stage="prepare", kvtrace_thread="forward"), 0.3)
    assert is_near(works.seconds(kvtrace_stage="forward", kvtrace_thread="forward"), 0.4)
    assert works.seconds(kvtrace_stage="post", kvtrace_thread="forward") == 0
    assert any("digest" in one.stack for one in works.samples if one.labels.get("kvtrace.stage") == "forward")
    assert "fact profiles on" in works.out


def test_labels_are_few_printable_and_of_the_process(ended: Mapping[str, Ended]) -> None:
    seen = {tuple(sorted(one.series.items())) for one in ended["works"].samples}
    (series,) = (dict(one) for one in seen)

    assert series["service_name"] == profiler.APPLICATION
    assert series["role"] == "decode"
    assert "rank" not in series
    assert series["engine"].startswith(CLEAN)
    assert len(series["engine"]) == 128
    own = {name for one in ended["works"].samples for name in one.labels}
    assert own == {profiler.STAGE_LABEL, profiler.THREAD_LABEL}


def test_an_agent_of_the_users_own_is_joined(ended: Mapping[str, Ended]) -> None:
    """Its name and its labels stay; kvtrace's labels come to the samples of the threads that have stages."""
    joins = ended["joins"]

    assert (joins.code, joins.err) == (0, "")
    assert {one.series["service_name"] for one in joins.samples} == {"theirs"}
    assert is_near(joins.seconds(team="own", role="decode", engine="e0", kvtrace_stage="post"), 0.6)
    assert "fact profiles joined" in joins.out
    assert "profiles.url" not in joins.out


def test_a_forked_child_is_profiled_as_itself_up_to_its_end(ended: Mapping[str, Ended]) -> None:
    forks = ended["forks"]

    assert (forks.code, forks.err) == (0, "")
    assert is_near(forks.seconds(role="child", kvtrace_stage="poll"), 0.4)
    assert forks.seconds(role="decode", kvtrace_stage="poll") == 0


@pytest.mark.parametrize("name", ["refused", "silent"])
def test_a_server_that_does_not_answer_delays_nothing(ended: Mapping[str, Ended], name: str) -> None:
    assert ended[name].code == 0
    assert ended[name].out.endswith("end\n")
    assert ("are lost until" in ended[name].err) == (name == "refused")


@pytest.mark.parametrize(("name", "reason"), [("nowhere", "UsageError"), ("absent", "kvtrace[profiles]")])
def test_what_fails_is_said_once_and_the_process_goes_on(ended: Mapping[str, Ended], name: str, reason: str) -> None:
    first, second = ended[name].err.splitlines()

    assert ended[name].code == 0
    assert "no profiles of process" in first
    assert reason in first
    assert second.endswith("serving")
    assert ended[name].out.startswith("fact profiles off: ")


# Without pyroscope-io ----------------------------------------------------------------------------------------------


class Labels:
    """What an agent is told, as the set of labels that the thread has at last."""

    def __init__(self) -> None:
        self.present: list[tuple[str, str]] = []
        self.seen: list[str] = []

    def add(self, name: str, value: str) -> None:
        self.present.append((name, value))
        if name == profiler.STAGE_LABEL:
            self.seen.append(value)

    def remove(self, name: str, value: str) -> None:
        self.present.remove((name, value))

    @property
    def stages(self) -> list[str]:
        return [value for name, value in self.present if name == profiler.STAGE_LABEL]


def test_a_thread_has_one_stage_at_a_time_and_gets_the_outer_one_back() -> None:
    labels = Labels()
    found = profiler.Profiler(labels.add, labels.remove, {})

    found.forward_began()
    outer = found.enter("start_load")
    inner = found.enter("post")
    assert labels.stages == ["post"]
    found.leave(inner)
    assert labels.stages == ["start_load"]
    found.leave(outer)
    assert labels.stages == ["forward"]
    outer = found.enter("get_finished")
    found.forward_ended()
    assert labels.stages == ["get_finished"]
    found.leave(outer)
    assert labels.stages == []
    assert labels.present == [(profiler.THREAD_LABEL, "forward")]


def test_an_agent_that_breaks_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class PanicException(BaseException):
        pass

    calls = []

    def add(name: str, _value: str) -> None:
        calls.append(name)
        raise PanicException("poisoned")

    found = profiler.Profiler(add, add, {})
    for _ in range(3):
        found.leave(found.enter("post"))

    assert len(calls) == 1
    assert [record.message for record in caplog.records if "poisoned" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("url", ["", "localhost:4040", "ftp://x", "http://", "http://h:99999", "http://h/\n"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        profile_server.check_url(url)


def test_an_address_with_a_password_is_refused() -> None:
    with pytest.raises(UsageError, match="PYROSCOPE_BASIC_AUTH_PASSWORD"):
        profile_server.check_url("http://user:secret@host:4040")


def test_switched_off_nothing_is_imported() -> None:
    """The instrumented modules spell the variable themselves, since they import nothing where it is not set."""
    script = (
        "import sys; from kvtrace import profiler; assert profiler.start({}, None) is None;"
        "print([name for name in sys.modules if 'pyroscope' in name or 'multiprocessing' in name])"
    )
    environment = {name: value for name, value in os.environ.items() if name != profiler.VARIABLE}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)

    assert ended.stdout == "[]\n"
    assert traced._PROFILE_VARIABLE == middleware._PROFILE_VARIABLE == profiler.VARIABLE
