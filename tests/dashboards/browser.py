"""Headless Chromium over its DevTools protocol: open a page, ask it things, take a picture."""

from __future__ import annotations

import asyncio
import base64
import json
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.waiting import LONG_S

START_SECONDS = ANSWER_SECONDS = LONG_S
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

    async def settled(self, expression: str, seconds: float) -> Any:
        """Return what the expression is in the page once it stays so for a second, or after the time."""
        end = time.monotonic() + seconds
        before, found = None, await self.value(expression)
        while found != before and time.monotonic() < end:
            await asyncio.sleep(1)
            before, found = found, await self.value(expression)
        return found

    async def resize(self, width: int, height: int) -> None:
        """Give the page a size in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def picture(self, width: int, height: int) -> bytes:
        """Return the page's upper left part as a PNG; beyond its size there is nothing.

        To look beyond would give the page another size, and leave tables empty until they have noticed.
        """
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        reply = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=False)
        return base64.b64decode(reply["data"])


@contextmanager
def running(chromium: str) -> Iterator[str]:
    """Start a Chromium and return the address of its DevTools; it ends with the block."""
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield _endpoint(process)
        finally:
            process.terminate()
            process.wait(START_SECONDS)
            # Its children let go of the profile a moment later.
            time.sleep(0.3)


def _endpoint(process: subprocess.Popen[str]) -> str:
    """Return the address that the browser says on stderr, and keep reading, so that it never waits for a reader."""
    said: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stderr or ():
            if found := re.search(r"DevTools listening on ws://([\d.:]+)/", line):
                said.put(f"http://{found[1]}")

    threading.Thread(target=read, daemon=True).start()
    try:
        return said.get(timeout=START_SECONDS)
    except queue.Empty:
        raise RuntimeError("Chromium said nothing of its DevTools") from None


@asynccontextmanager
async def tab(endpoint: str, address: str, width: int, height: int) -> AsyncIterator[Tab]:
    """Open the address in a tab of its own, which is closed with the block."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{endpoint}/json/new?about:blank") as reply:
            target = json.loads(await reply.text())
        limit = 128 << 20
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=limit) as socket:
            page = Tab(socket)
            await page.resize(width, height)
            await page.call("Page.navigate", url=address)
            yield page
        async with session.get(f"{endpoint}/json/close/{target['id']}"):
            pass
