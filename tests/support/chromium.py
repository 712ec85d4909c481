"""Headless Chromium over the DevTools protocol.

with Chromium() as browser:
    browser.open(path.as_uri())
    browser.evaluate("document.title")
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, PROGRAMS)), None)
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


class Chromium:
    """One browser with one page.

    Args:
        timeout: seconds that any answer may take.
    """

    def __init__(self, timeout: float = 30.0) -> None:
        if PROGRAM is None:
            raise FileNotFoundError("There is no chromium on the path.")
        self._timeout = timeout
        self._profile = tempfile.mkdtemp(prefix="chromium")
        self._process = subprocess.Popen(
            [PROGRAM, *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port, path = self._address()
        self._socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=timeout)
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the page reported: console messages, exceptions, dialogs, log entries."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _address(self) -> list[str]:
        """Port and path, which Chromium writes when it listens."""
        file, end = Path(self._profile, "DevToolsActivePort"), time.monotonic() + self._timeout
        while not file.exists() or len(found := file.read_text().split()) < 2:
            if time.monotonic() > end:
                raise TimeoutError(f"Chromium did not listen within {self._timeout:.0f} s.")
            time.sleep(0.02)
        return found

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; events that come meanwhile are kept.

        Raises:
            RuntimeError: the browser refused.
            TimeoutError: it did not answer in time.
            websockets.ConnectionClosed: it has ended.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        end = time.monotonic() + self._timeout
        while True:
            answer = json.loads(self._socket.recv(timeout=max(0.0, end - time.monotonic())))
            if answer.get("id") != self._number:
                self._keep(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def open(self, address: str, ready: str = "document.documentElement?.dataset.ready === 'yes'") -> None:
        """Load an address and wait until an expression is true."""
        self.call("Page.navigate", url=address)
        self.wait(ready)

    def wait(self, expression: str) -> None:
        """Wait until an expression is true.

        Raises:
            TimeoutError: it did not become so.
        """
        end = time.monotonic() + self._timeout
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"not true after {self._timeout:.0f} s: {expression}; the page reported {self.events}"
                )
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page, promises awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press one key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def hover(self, selector: str) -> None:
        """Move the mouse over the first element that a selector finds."""
        box = self.evaluate(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> Path:
        """Write what is in sight as PNG; the pictures of the documentation are made so."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def _keep(self, message: dict[str, Any]) -> None:
        kept = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Page.javascriptDialogOpening", "Log.entryAdded")
        if message.get("method") in kept:
            self.events.append(message)
