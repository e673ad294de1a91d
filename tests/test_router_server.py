"""The program `kvtrace router`: its port, its signals, its spool, its errors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvtrace.segments import SegmentFile
from kvtrace.stages import BY_CODE
from tests.router_client import raw, send
from tests.router_doubles import TOKENS, EngineDouble, serving, until
from tests.waiting import LONG_S

PROGRAM = (sys.executable, "-m", "kvtrace", "router")
BODY = {"prompt": [1, 2], "stream": True}


@asynccontextmanager
async def program(
    folder: Path, prefill: EngineDouble, decode: EngineDouble, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run the router between two engines; yields its process and its address."""
    port_file = folder / "port"
    async with serving(prefill) as p_url, serving(decode) as d_url:
        process = await asyncio.create_subprocess_exec(
            *(*PROGRAM, "--mode", "pull", "--prefill", p_url, "--decode", d_url),
            *("--port", "0", "--port-file", str(port_file), *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"KVTRACE_SPOOL": str(folder / "spool")},
        )
        try:
            async with asyncio.timeout(LONG_S):
                while not port_file.exists():
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
            yield process, f"http://127.0.0.1:{port_file.read_text().strip()}"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_requests_in_flight_finish(tmp_path: Path, number: signal.Signals) -> None:
    decode = EngineDouble("d0", pauses_before=1)

    async with program(tmp_path, EngineDouble("p0"), decode, "--grace", "120") as (process, url):
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=BODY) as reply:
            await until(lambda: decode.paused)
            process.send_signal(number)
            await asyncio.sleep(0.3)
            running = process.returncode is None
            decode.gate.set()
            answer = await reply.read()
        stdout, stderr = await process.communicate()

    assert running
    assert answer == b"".join(TOKENS)
    assert (process.returncode, stdout) == (0, b"")
    assert stderr.decode() == f"kvtrace router: pull at {url}\n"


async def test_the_grace_ends_and_the_request_is_recorded_as_failed(tmp_path: Path) -> None:
    decode = EngineDouble("d0", pauses_before=1)

    async with program(tmp_path, EngineDouble("p0"), decode, "--grace", "1") as (process, url):
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=BODY) as reply:
            await until(lambda: decode.paused)
            process.terminate()
            with pytest.raises(aiohttp.ClientError):
                await reply.read()
        async with asyncio.timeout(LONG_S):
            await process.wait()

    assert process.returncode == 0
    assert spooled(tmp_path / "spool")[-1] == "router.failed"


async def test_a_client_that_is_still_sending_at_the_end_is_told_and_nothing_is_a_fault(tmp_path: Path) -> None:
    async with program(tmp_path, EngineDouble("p0"), EngineDouble("d0"), "--grace", "1") as (process, url):
        half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        reader, writer = await raw(url, half)
        await send(url, b"{}")  # which is over once the first one has been begun
        process.terminate()
        async with asyncio.timeout(LONG_S):
            reply = await reader.read()
            _, errors = await process.communicate()
        writer.close()

    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"the router stops" in reply
    assert b"Traceback" not in errors
    assert process.returncode == 0
    assert spooled(tmp_path / "spool")[-1] == "router.failed"


async def test_a_spool_holds_the_requests_points_in_order(tmp_path: Path) -> None:
    async with program(tmp_path, EngineDouble("p0"), EngineDouble("d0")) as (process, url):
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=BODY) as reply:
            await reply.read()
        await send(url, b"", "/nowhere", "GET")  # answered behind the end of the first, which its client may see first
        process.kill()
        await process.wait()

    assert [stage for stage in spooled(tmp_path / "spool") if stage != "router.candidate"] == [
        f"router.{stage}"
        for stage in (
            "received",
            "traced",
            "decided",
            "prefill_sent",
            "prefill_returned",
            "decode_sent",
            "first_token",
            "done",
        )
    ]


def spooled(folder: Path) -> list[str]:
    """Return the names of the router's stages in the spool, in the order of their times."""
    records = []
    for path in sorted(folder.glob("*.kvt")):
        batch = SegmentFile.open(path).poll()
        assert batch.facts["kind"] == "router"
        records += [(int(record["t_ns"]), BY_CODE[int(record["code"])].name) for record in batch.records]
    return [name for _, name in sorted(records) if name.startswith("router.")]


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        engines = ("--mode", "push", "--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9")
        result = subprocess.run(
            (*PROGRAM, *engines, "--port", port), check=False, capture_output=True, text=True, timeout=120
        )

    assert result.returncode == 1
    assert result.stderr.startswith(f"kvtrace: error: cannot listen on 127.0.0.1:{port}: ")
    assert result.stderr.count("\n") == 1


def test_a_wrong_address_is_a_usage_error() -> None:
    command = (*PROGRAM, "--mode", "push", "--prefill", "http://p,engine_id=e", "--decode", "http://d")
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    assert result.returncode == 2
    assert "missing: host, port" in result.stderr
