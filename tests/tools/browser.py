"""Headless Chromium, driven over its own protocol (DevTools) with nothing but a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
"""The rule of names: whatever is not on this machine cannot be found, so a page that asks for it fails its test."""
PATIENCE = 20.0


def chromium() -> str | None:
    """The program, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. errors: what its console and its scripts complained of. Sizes are in CSS pixels."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._note(message["method"], message["params"])

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, /, patience: float = PATIENCE, **parameters: Any) -> dict[str, Any]:
        """Raises RuntimeError with what the browser says, TimeoutError if it says nothing."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters, **session}))
        message = await asyncio.wait_for(answer, patience)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def resize(self, width: int, height: int, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def prefer(self, scheme: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def read(self, expression: str, patience: float = PATIENCE) -> Any:
        """The value of a JavaScript expression, awaited. Raises RuntimeError if it throws."""
        result = await self.call(
            "Runtime.evaluate", patience, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, expression: str, patience: float = PATIENCE) -> None:
        """Raises TimeoutError if it does not become true."""
        script = (
            f"new Promise(resolve => {{ const look = () => ({expression}) ? resolve(true) : setTimeout(look, 20); "
            f"setTimeout(() => resolve(false), {round(patience * 1000)}); look(); }})"
        )
        if not await self.read(script, patience + PATIENCE):
            raise TimeoutError(f"never true: {expression}; errors: {self.errors}")

    async def click(self, selector: str) -> None:
        """With a real mouse, in the middle of the element."""
        x, y = await self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def hover(self, selector: str) -> None:
        x, y = await self.middle(selector)
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def middle(self, selector: str) -> tuple[float, float]:
        place = await self.read(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getClientRects()[0]; "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return place[0], place[1]

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def screenshot(self, whole: bool = False) -> bytes:
        """PNG; whole: beyond the window too."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """A tab of a browser of its own, which ends with it. Raises RuntimeError if there is no Chromium."""
    program = chromium()
    if program is None:
        raise RuntimeError("no Chromium on PATH")
    folder = Path(tempfile.mkdtemp(prefix="outrider-browser-"))
    process = await asyncio.create_subprocess_exec(
        program,
        *FLAGS,
        f"--user-data-dir={folder}",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            address = await _address(process)
        async with connect(address, max_size=None, proxy=None, compression=None) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            try:
                await page.open()
                yield page
                page._session = ""
                await page.call("Browser.close")
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        await _end(process)
        shutil.rmtree(folder, ignore_errors=True)


async def _address(process: asyncio.subprocess.Process) -> str:
    lines = []
    while process.stderr is not None and (line := await process.stderr.readline()):
        if line.startswith(b"DevTools listening on "):
            return line.split()[-1].decode()
        lines.append(line.decode(errors="replace"))
    raise RuntimeError("Chromium did not start: " + "".join(lines[-5:]))


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # else the garbage collector does it, with a warning
