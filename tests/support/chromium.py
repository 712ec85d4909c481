"""Headless Chromium over the DevTools protocol.

with Chromium() as browser:
    browser.open(path.as_uri())
    browser.evaluate("document.title")
"""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from websockets.sync.client import connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
TIMEOUT_S = 30.0
"""Longest time of any answer."""
KEPT = ("Runtime.exceptionThrown", "Page.javascriptDialogOpening", "Log.entryAdded")


class Chromium:
    """One browser with one page."""

    def __init__(self):
        if PROGRAM is None:
            raise FileNotFoundError("There is no chromium on the path.")
        self._profile = tempfile.mkdtemp(prefix="chromium")
        self._process = subprocess.Popen(
            [PROGRAM, *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port, path = self._address()
        self._socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=TIMEOUT_S)
        self._number = 0
        self._session = None
        self.events = []
        """Exceptions, dialogs and log entries of the page: what is blocked is among them."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _address(self):
        """Port and path, which Chromium writes when it listens."""
        file, end = Path(self._profile, "DevToolsActivePort"), time.monotonic() + TIMEOUT_S
        while not file.exists() or len(found := file.read_text().split()) < 2:
            if time.monotonic() > end:
                raise TimeoutError(f"Chromium did not listen within {TIMEOUT_S:.0f} s.")
            time.sleep(0.02)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method, **parameters):
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
        end = time.monotonic() + TIMEOUT_S
        while True:
            answer = json.loads(self._socket.recv(timeout=max(0.0, end - time.monotonic())))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            if answer.get("method") in KEPT:
                self.events.append(answer)

    def open(self, address, ready="document.documentElement?.dataset.ready === 'yes'"):
        """Load an address and wait until an expression is true."""
        self.call("Page.navigate", url=address)
        self.wait(ready)

    def wait(self, expression):
        """Wait until an expression is true.

        Raises:
            TimeoutError: it did not become so.
        """
        end = time.monotonic() + TIMEOUT_S
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {TIMEOUT_S:.0f} s: {expression}; the page reported {self.events}")
            time.sleep(0.02)

    def evaluate(self, expression):
        """The value of an expression on the page, promises awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def press(self, key):
        """Press one key, which writes the character ``key``."""
        for event in ({"type": "keyDown", "text": key}, {"type": "keyUp"}):
            self.call("Input.dispatchKeyEvent", key=key, **event)

    def hover(self, selector):
        """Move the mouse over the first element that a selector finds."""
        box = self.evaluate(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def look(self, width, height, dark=False):
        """Set the size of the window in CSS pixels, and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path):
        """Write what is in sight as PNG; the pictures of the documentation are made so."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path
