"""Debian's Chromium without a window, driven over its debugging protocol: what a page looks like to who opens it."""

from __future__ import annotations

import asyncio
import base64
import shutil
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHROMIUM = shutil.which("chromium")


class Tab:
    """One page.

    Attributes:
        complaints: what the browser wrote to its console: errors, and what a policy refused.
        fetched: the URLs that were asked for.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        self._socket = socket
        self._ids = count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and take in what happened meanwhile."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(HANG_S):
            while (message := await self._socket.receive_json()).get("id") != number:
                self._note(message)
        assert "error" not in message, message
        found: dict[str, Any] = message["result"]
        return found

    def _note(self, event: dict[str, Any]) -> None:
        match event["method"], event["params"]:
            case "Log.entryAdded", {"entry": entry}:
                self.complaints.append(entry["text"])
            case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                self.complaints.append(str(details))
            case "Network.requestWillBeSent", {"request": request}:
                self.fetched.append(request["url"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Log", "Runtime", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Return what a piece of JavaScript comes to."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until a piece of JavaScript is true."""
        async with asyncio.timeout(HANG_S):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def look_like(self, width: int, height: int, scheme: str, *, mobile: bool = False) -> None:
        """Be a window of some width, for somebody who likes it ``dark`` or ``light``."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> bytes:
        """Take a picture of the whole page."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        raw = base64.b64decode(found["data"])
        path.write_bytes(raw)
        return raw


@asynccontextmanager
async def tab(folder: Path) -> AsyncIterator[Tab]:
    """Start a browser with an empty profile, and end it."""
    assert CHROMIUM is not None
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
    ]
    words += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    program = await asyncio.create_subprocess_exec(CHROMIUM, *words, stdout=quiet, stderr=quiet)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(await _address(session, folder / "DevToolsActivePort"), max_msg_size=0) as socket,
        ):
            yield Tab(socket)
    finally:
        program.terminate()
        await program.wait()


async def _address(session: aiohttp.ClientSession, announced: Path) -> str:
    async with asyncio.timeout(HANG_S):
        while not (announced.exists() and announced.read_text().count("\n")):
            await asyncio.sleep(0.05)
        port = announced.read_text().split("\n")[0]
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                for target in await answer.json():
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
