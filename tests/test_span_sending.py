"""Spans on their way to a receiver: it may refuse, redirect, be away or come back, and whoever offers never waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from kvtrace import cli
from kvtrace.errors import ExportError
from kvtrace.exporters import otlp, source, traces
from kvtrace.exporters.otlp import Sender, _size_bytes
from kvtrace.exporters.sdk import Translation
from kvtrace.exporters.spans import RunFacts, Span
from kvtrace.store import Store
from tests import exported
from tests.otlp_receiver import RECEIVERS
from tests.pyroscope_stand_in import black_hole
from tests.router_doubles import refused_url
from tests.trace import pull, push
from tests.waiting import until

DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize("transport", RECEIVERS)
def test_rejected_spans_are_not_counted_as_sent(tmp_path: Path, transport: str) -> None:
    """A receiver may take a message and reject some of its spans; the exporters do not look."""
    path = exported.write(tmp_path / "run.duckdb", push(name="kvt-a"))
    with RECEIVERS[transport](rejects=3) as received:
        code = cli.main(["export", str(path), "--format", "otlp", "--endpoint", received.endpoint])
        sender = Sender(received.endpoint, {})
        sender.offer(spans_of(path))
        sender.close()
    made = len(spans_of(path))

    assert code == 1
    assert len(received.spans()) == 2 * made
    assert (sender.health.exported, sender.health.dropped) == (made - 3, 3)
    assert sender.health.failure == "the receiver rejected 3 spans of a batch: not <b>today</b>"


def test_a_redirection_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exporter does not follow one, so nothing arrives: the user learns where to."""
    path = exported.write(tmp_path / "run.duckdb", push(name="kvt-a"))
    with RECEIVERS["http"](status=301) as received:
        assert cli.main(["export", str(path), "--format", "otlp", "--endpoint", received.endpoint]) == 1

    said = capsys.readouterr().err
    assert "sent 0 spans of 1 request" in said
    assert "points to https://elsewhere.example/v1/traces: name that address instead" in said


def spans_of(path: Path) -> list[Span]:
    with Store.open(path) as store:
        (told,) = next(source.batches(store, source.Choice()))
        return traces.spans(told, RunFacts.of(store))


def test_offering_never_waits(tmp_path: Path) -> None:
    """A full queue drops at once."""
    path = exported.write(tmp_path / "run.duckdb", push(name="kvt-a"))
    spans = spans_of(path)
    sender = Sender(DEAD, {})
    took_s = []
    for _ in range(3000):
        begin_s = time.monotonic()
        sender.offer(spans)
        took_s.append(time.monotonic() - begin_s)
    sender.close(0.1)

    assert sorted(took_s)[2900] < 0.05  # of the rest the machine may take some, and the sender's thread the interpreter
    assert sender.health.dropped == 3000 * len(spans)
    assert sender.health.crowded_out >= 500 * len(spans)


def test_a_message_is_about_as_large_as_it_is_taken_to_be(tmp_path: Path) -> None:
    """A receiver refuses what is larger than 4 MiB, and a path may have thousands of stretches."""
    (span, *_) = spans_of(exported.write(tmp_path / "run.duckdb", push(name="kvt-a")))
    for name, value in list(span.attributes.items()):
        if isinstance(value, list):
            span.attributes[name] = value * 2000
    made = Translation().of([span], {})

    encoded_bytes = encode_spans(made).ByteSize()
    assert encoded_bytes > 500_000
    assert 0.9 < _size_bytes(span) / encoded_bytes < 1.5


def test_what_is_in_hand_when_sending_ends_is_counted(tmp_path: Path) -> None:
    """On a busy machine making a message takes long, and whoever asks for the counts asks once: after the end."""
    spans = spans_of(exported.write(tmp_path / "run.duckdb", push(name="kvt-a")))
    sender = Sender(DEAD, {})
    making = sender._translation.of

    def slowly(batch: list[Span], resource: Any) -> Any:
        time.sleep(1.5)
        return making(batch, resource)

    sender._translation.of = slowly  # type: ignore[method-assign]
    for _ in range(500):
        sender.offer(spans)
    sender.close(0.1)

    assert sender.health.dropped == 500 * len(spans)


def test_one_that_waits_gives_up_on_a_dead_receiver(tmp_path: Path) -> None:
    sender = Sender(DEAD, {}, waits=True, timeout_s=0.2)
    with pytest.raises(ExportError, match=DEAD):  # noqa: PT012 -- whichever offer it is
        for _ in range(100_000):
            sender.offer([])
            sender._failures += 1
    sender.close(0.1)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_an_export_to_nobody_ends_at_the_first_refused_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """The exporters would try again for as long as an answer may take, which is given a minute here."""
    monkeypatch.setattr(otlp.Sender.__init__, "__kwdefaults__", {"waits": False, "timeout_s": 60.0})
    path = exported.write(tmp_path / "run.duckdb", push(name="kvt-a"), pull("kvt-b"))
    endpoint = refused_url().replace("http", scheme)
    begin_s = time.monotonic()

    assert cli.main(["export", str(path), "--format", "otlp", "--endpoint", endpoint]) == 1
    assert time.monotonic() - begin_s < 20
    assert capsys.readouterr().err.splitlines() == [
        f"kvtrace: error: {endpoint} takes no spans: it refuses connections; start the receiver, or name another "
        "endpoint"
    ]


def test_why_a_receiver_takes_nothing_is_told_and_not_only_that_it_was_given_up(tmp_path: Path) -> None:
    """The exporter over HTTP ends with a sentence that tells no cause; what it said before does."""
    spans = spans_of(exported.write(tmp_path / "run.duckdb", push(name="kvt-a")))
    with Sender("http://no-such-host.invalid:4318", {}, waits=True, timeout_s=2.0) as sender:
        sender.offer(spans)

    assert sender.health.dropped == len(spans)
    assert "no-such-host.invalid" in sender.health.failure


def test_an_export_that_is_interrupted_waits_for_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C and SIGTERM end it in seconds, whatever a receiver that says nothing may still be given."""
    monkeypatch.setattr(otlp, "FINISH_S", 0.1)
    monkeypatch.setattr(otlp, "_LET_GO_S", 0.1)
    spans = spans_of(exported.write(tmp_path / "run.duckdb", push(name="kvt-a")))
    begin_s = time.monotonic()

    def interrupted(address: str) -> None:
        with Sender(address, {}, waits=True, timeout_s=60.0) as sender:
            sender.offer(spans)
            raise KeyboardInterrupt

    with black_hole() as address, pytest.raises(KeyboardInterrupt):
        interrupted(address)

    assert time.monotonic() - begin_s < 20


def test_a_receiver_that_has_taken_spans_may_come_back(tmp_path: Path) -> None:
    """One that starts anew refuses connections meanwhile: those spans are tried again and then counted, as ever."""
    spans = spans_of(exported.write(tmp_path / "run.duckdb", push(name="kvt-a")))
    with RECEIVERS["http"]() as received:
        sender = Sender(received.endpoint, {}, waits=True, timeout_s=1.0)
        sender.offer(spans)
        until(lambda: sender.health.exported == len(spans))
    sender.offer(spans)
    until(lambda: sender.health.failed == len(spans))
    sender.offer(spans)
    until(lambda: sender.health.failed == 2 * len(spans))
    sender._failures += 1
    with pytest.raises(ExportError, match=f"takes no more spans after {len(spans)} spans: "):
        sender.offer(spans)
    sender.close()

    assert sender.health.dropped == 2 * len(spans)
