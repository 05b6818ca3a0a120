"""A headless Chromium, driven through chromedriver by the few words of WebDriver that the tests need."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # continuous integration runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
KEYS = {"Tab": "\ue004", "ArrowRight": "\ue014", "ArrowLeft": "\ue012", "End": "\ue010", "Escape": "\ue00c"}
_PATIENCE = 60.0  # seconds, for a machine that does something else as well


def missing() -> str | None:
    """Why there is no browser here; None if there is one."""
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"{name} is not installed; Debian has it as chromium and chromium-driver"
    return None


class Browser:
    """One page in one window."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def _call(self, method: str, path: str, **body: Any) -> Any:
        return call(method, f"{self._base}/{path}", body if method == "POST" else None)

    def open(self, path: Path) -> None:
        self._call("POST", "url", url=path.as_uri())

    def run(self, script: str) -> Any:
        """The value of a script's ``return``."""
        return self._call("POST", "execute/sync", script=script, args=[])

    def settle(self) -> None:
        """Until the page has done what follows from the last call, such as telling that it was scrolled."""
        script = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        self._call("POST", "execute/async", script=script, args=[])

    def devtools(self, command: str, **params: Any) -> Any:
        return self._call("POST", "goog/cdp/execute", cmd=command, params=params)

    def resize(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, theme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        source = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._call("POST", "actions", actions=[source])

    def press(self, key: str) -> None:
        strokes = [{"type": kind, "value": KEYS[key]} for kind in ("keyDown", "keyUp")]
        self._call("POST", "actions", actions=[{"type": "key", "id": "keys", "actions": strokes}])

    def console(self) -> list[str]:
        """What the page complained about since the last call."""
        return [entry["message"] for entry in self._call("POST", "se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        """The whole page, however long."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self._call("POST", "print"))


def call(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # never through a proxy: it is this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_PATIENCE) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in this folder; it ends with the block."""
    command = [str(shutil.which("chromedriver")), "--port=0"]  # it takes a free one, and says which
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            address = f"http://127.0.0.1:{_port(process)}"
            session = call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": _wanted(profile)}})
            found = Browser(address, session["sessionId"])
            try:
                yield found
            finally:
                call("DELETE", f"{address}/session/{session['sessionId']}")
        finally:
            process.terminate()


def _wanted(profile: Path) -> dict[str, Any]:
    options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
    return {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise RuntimeError("chromedriver did not start")
