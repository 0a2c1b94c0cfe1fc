"""A page in a real browser: headless Chromium (Debian's package ``chromium``), or a skip.

It is driven over a pipe in the DevTools protocol: https://chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE, DESK = 390, 1280
KEY_CODES = {"Backspace": 8, "Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One browser with one tab, in a profile of its own."""

    def __init__(self, directory: Path) -> None:
        command = next((path for name in NAMES if (path := shutil.which(name))), None)
        if command is None:
            pytest.skip("no Chromium here (scripts/install-system-packages.sh installs it)")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect() -> None:
            # Chromium reads from descriptor 3, and writes to 4.
            ends = os.dup(to_browser), os.dup(from_browser)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [
                command, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--hide-scrollbars", "--no-first-run", "--disable-extensions",
                f"--user-data-dir={directory / 'profile'}", "--remote-debugging-pipe",
                "about:blank",
            ],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        answer = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        self.errors: list[str] = []
        """What the scripts and the policy of the page that is open complained of."""
        self.send("Runtime.enable")
        self.send("Log.enable")
        self.send("Page.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:2000])
            elif answer.get("method") == "Log.entryAdded":
                self.errors.append(answer["params"]["entry"]["text"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 20)
            assert data, f"Chromium has ended ({self._process.poll()})"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str, *, width: int = DESK, dark: bool = False) -> None:
        """Open a page, as wide as asked for (in CSS pixels); wait until it shows a title."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url="about:blank")
        self.errors.clear()
        self.send("Page.navigate", url=url)
        self.wait("document.querySelector('h1')")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys as a person does: ``Tab``, ``Enter``, ``ArrowDown``, `` ``, or a letter."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            code = KEY_CODES.get(key) or ord(key.upper())
            event = {"key": key, "windowsVirtualKeyCode": code, "text": text}
            self.send("Input.dispatchKeyEvent", type="keyDown", **event)
            self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def wait(self, expression: str, *, timeout_s: float = 60.0) -> float:
        """Wait until an expression is true; the seconds that it took."""
        begun = time.monotonic()
        while not self.evaluate(f"Boolean({expression})"):
            waited_s = time.monotonic() - begun
            assert waited_s < timeout_s, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.02)
        return time.monotonic() - begun

    def text(self) -> str:
        """All text of the page that is shown."""
        return str(self.evaluate("document.body.innerText"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
