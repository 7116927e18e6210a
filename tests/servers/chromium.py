"""A headless Chromium with one page open, driven over its DevTools protocol."""

import asyncio
import base64
import shutil
import subprocess
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
TIMEOUT_S = 60.0
_PAINTED = "(performance.getEntriesByName('first-contentful-paint')[0]||{}).startTime||0"


class Chromium:
    """One page, from the beginning to ``close``. Needs PROGRAM."""

    def __init__(self, directory: Path, width: int = 1280, height: int = 1000) -> None:
        assert PROGRAM is not None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        flags = [*FLAGS, f"--user-data-dir={directory}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [PROGRAM, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._number = 0
        self._run(self._connect(_port(directory / "DevToolsActivePort")))

    def close(self) -> None:
        """End it."""
        self._run(self._session.close())
        self._process.terminate()
        self._process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, url: str) -> float:
        """Open ``url``; milliseconds until its first paint."""
        self.call("Page.navigate", url=url)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (painted_ms := float(self.evaluate(f"location.href=={url!r}&&({_PAINTED})||0"))):
            assert time.monotonic() < deadline_s, f"{url} was not painted"
            time.sleep(0.05)
        return painted_ms

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def screenshot(self, path: Path, scheme: str) -> None:
        """A PNG in ``light`` or ``dark`` colours."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools method."""
        result: dict[str, Any] = self._run(self._called(method, parameters))
        return result

    async def _connect(self, port: str) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    async def _called(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=TIMEOUT_S)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                found: dict[str, Any] = message["result"]
                return found

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * TIMEOUT_S)


def _port(file: Path) -> str:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not file.exists() or not file.read_text().strip():
        assert time.monotonic() < deadline_s, "Chromium does not start"
        time.sleep(0.1)
    return file.read_text().split()[0]
