"""A browser that a test drives: Chromium without a screen, by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.browser import CHROMIUM, FLAGS

WAIT_SECONDS = 60


class DrivenBrowser:
    """One page of a browser of its own."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        there, self._send = os.pipe()
        self._receive, back = os.pipe()
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        line = f"exec {shlex.join(words)} 3<&{there} 4>&{back}"  # Chromium reads from 3 and writes to 4
        self._process = subprocess.Popen(
            ["bash", "-c", line], pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        self._number = 0
        self._rest = b""
        pages = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def _call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._receive, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, address: str, width: int = 1280, height: int = 1000) -> None:
        """Open an address in a window of this size."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", self._session, **sizes)
        self._call("Page.navigate", self._session, url=address)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, which may be a promise."""
        facts = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._call("Runtime.evaluate", self._session, **facts)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.1)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, as a user does."""
        self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()")
        self._call("Input.insertText", self._session, text=text)

    def press(self, key: str) -> None:
        """Press and release Enter or Tab."""
        number, text = {"Enter": (13, "\r"), "Tab": (9, "\t")}[key]
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": number, "text": text}
        self._call("Input.dispatchKeyEvent", self._session, type="keyDown", **facts)
        self._call("Input.dispatchKeyEvent", self._session, type="keyUp", **facts)

    def click(self, selector: str, text: str = "") -> None:
        """Click the first visible element of a selector with exactly this text, if given; waits until it is there."""
        find = (
            f"[...document.querySelectorAll({json.dumps(selector)})].find("
            f"e => [e.textContent.trim(), ''].includes({json.dumps(text)}) && e.offsetParent !== null && !e.disabled)"
        )
        self.wait(find)
        self.run(f"{find}.click()")

    def text(self) -> str:
        """Return the text of the page as it is seen."""
        return str(self.run("document.body.innerText"))

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a picture of the page."""
        answer = self._call("Page.captureScreenshot", self._session, captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._send)
        os.close(self._receive)
