"""A headless Chromium, driven through its own protocol over two pipes: no driver, port or package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page of a browser, which runs until the end of the `with`."""

    def __init__(self, profile: Path) -> None:
        """Keep what it writes below `profile`."""
        self.profile = profile
        self._number = 0
        self._session = ""
        self.errors: list[str] = []
        """What the page's scripts have thrown and logged as errors."""

    def __enter__(self) -> Self:
        """Start it with an empty page."""
        assert CHROMIUM is not None
        orders, self._write = os.pipe()
        answers, write_end = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4, so neither pipe may lie there before.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (orders, write_end)]
        redirect = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        command = ["bash", "-c", redirect, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=ends, stderr=subprocess.DEVNULL)
        for end in (orders, write_end, *ends):
            os.close(end)
        self._answers = os.fdopen(answers, "rb")
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        with suppress(OSError, EOFError):
            self._session = ""
            self._call("Browser.close")
        self._process.wait(10)
        self._answers.close()
        os.close(self._write)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        chunk = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise EOFError("the browser has gone")
            chunk += byte
        answer: dict[str, Any] = json.loads(chunk)
        if answer.get("method") == "Runtime.exceptionThrown":
            self.errors.append(answer["params"]["exceptionDetails"].get("exception", {}).get("description", "error"))
        if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
            self.errors.append(answer["params"]["entry"]["text"])
        return answer

    def open(self, path: Path, *, width: int = 1280, theme: str = "light") -> None:
        """Load a file from the disk in a window of so many pixels."""
        self.open_address(path.resolve().as_uri(), width=width, theme=theme)

    def open_address(self, address: str, *, width: int = 1280, theme: str = "light") -> None:
        """Load what stands there in a window of so many pixels."""
        self.resize(width)
        self.theme(theme)
        self.errors.clear()
        self._call("Page.navigate", url=address)
        deadline, scheme = time.monotonic() + 20, address.partition(":")[0]
        while self.run("document.readyState") != "complete" or self.run("location.protocol") != f"{scheme}:":
            assert time.monotonic() < deadline, f"{address} did not load"

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def theme(self, name: str) -> None:
        """Ask for `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """Return what an expression gives, waited for if it is a promise."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Press and release a key: a name of `KEYS`, or one character."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        for _ in range(times):
            self._call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Bring an element into view and the pointer over it, to a place from 0 to 1 on both axes."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.box(selector)
        place = (left + across * width, top + down * height)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def drag(self, selector: str, start: float, end: float) -> None:
        """Press the pointer on an element, move it across, from one place to another, and let it go."""
        self.hover(selector, across=start)
        left, top, width, height = self.box(selector)
        for kind, place in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            x, y = left + place * width, top + height / 2
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of an element, in the window."""
        found = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })()"
        )
        return (found[0], found[1], found[2], found[3])

    def picture(self, first: str = "html", last: str = "") -> bytes:
        """Return a PNG of an element, or of all from one element to another, over the whole width."""
        self.run("scrollTo(0, 0)")
        _, top, _, height = self.box(first)
        if last:
            _, last_top, _, last_height = self.box(last)
            height = last_top + last_height - top
        clip = {"x": 0, "y": top, "width": self.box("html")[2], "height": height, "scale": 1}
        found = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])


SHOTS = {
    "choice-light-1280": ("light", 1280, "header", "#time"),
    "pipeline-light-1280": ("light", 1280, "#timeline", "#memory"),
    "machines-light-1280": ("light", 1280, "#links", "#placement"),
    "choice-dark-800": ("dark", 800, "header", "#choice"),
    "pipeline-dark-800": ("dark", 800, "#timeline", ""),
    "choice-dark-400": ("dark", 400, "header", "#choice"),
}
"""Name of each picture of the documents: theme, width, first and last element."""


def take_shots(page: Path, folder: Path) -> None:
    """Write the pictures of the documents from a report."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        for name, (theme, width, first, last) in SHOTS.items():
            browser.open(page, width=width, theme=theme)
            (folder / f"report-{name}.png").write_bytes(browser.picture(first, last))


if __name__ == "__main__":
    # python tests/browser.py report.html docs/pictures; then pngquant --force --ext .png 128 docs/pictures/report-*.png
    take_shots(Path(sys.argv[1]), Path(sys.argv[2]))
