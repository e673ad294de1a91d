"""Headless Chromium over its DevTools protocol: open a page, ask it things, take a picture."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

START_SECONDS = 30
ANSWER_SECONDS = 60
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-port=0",
)  # fmt: skip


@dataclass
class Tab:
    """One page."""

    socket: aiohttp.ClientWebSocketResponse
    _number: int = field(default=0)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one command of the protocol."""
        self._number += 1
        await self.socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_SECONDS):
            async for message in self.socket:
                reply = json.loads(message.data)
                if reply.get("id") == self._number:
                    if "error" in reply:
                        raise RuntimeError(f"{method}: {reply['error']['message']}")
                    return dict(reply["result"])
        raise RuntimeError(f"{method}: the browser went away")

    async def value(self, expression: str) -> Any:
        """Return what a JavaScript expression is in the page."""
        reply = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    async def until(self, expression: str, seconds: float) -> bool:
        """Return whether the expression came true in the page within the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if await self.value(expression):
                return True
            await asyncio.sleep(0.2)
        return False

    async def resize(self, width: int, height: int) -> None:
        """Give the page a size in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def picture(self, width: int, height: int) -> bytes:
        """Return the page's upper left part as a PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        reply = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(reply["data"])


@asynccontextmanager
async def tab(chromium: str, address: str, width: int, height: int) -> AsyncIterator[Tab]:
    """Open the address in a Chromium of its own, which ends with the block."""
    with tempfile.TemporaryDirectory() as profile:
        process = await asyncio.create_subprocess_exec(
            chromium, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            endpoint = await _endpoint(process)
            async with aiohttp.ClientSession() as session:
                async with session.put(f"{endpoint}/json/new?about:blank") as reply:
                    target = json.loads(await reply.text())
                limit = 128 << 20
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=limit) as socket:
                    page = Tab(socket)
                    await page.resize(width, height)
                    await page.call("Page.navigate", url=address)
                    yield page
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            # Its children let go of the profile a moment later.
            await asyncio.sleep(0.3)


async def _endpoint(process: asyncio.subprocess.Process) -> str:
    """Return the address of the browser's DevTools, which it says on stderr."""
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        async for line in process.stderr:
            if found := re.search(rb"DevTools listening on ws://([\d.:]+)/", line):
                _drain(process.stderr)
                return f"http://{found[1].decode()}"
    raise RuntimeError("Chromium said nothing of its DevTools and ended")


def _drain(stream: asyncio.StreamReader) -> None:
    """Keep reading, so that the browser never waits for somebody to read what it says."""

    async def read() -> None:
        while await stream.read(1 << 16):
            pass

    task = asyncio.get_running_loop().create_task(read())
    _READING.add(task)
    task.add_done_callback(_READING.discard)


_READING: set[asyncio.Task[None]] = set()
