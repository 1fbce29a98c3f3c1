"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_SETTLED_SECONDS = 10.0
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en-US"),
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """Return the command of the browser; None = it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. Its functions wait until what they need is there.

    Raises:
        TimeoutError: it did not come; the message has the text of the page.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._connection.recv(timeout=PATIENCE_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, *, width: int, height: int) -> None:
        """Open an address in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=url)

    def text(self) -> str:
        """Return the text that a person sees."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def await_text(self, *texts: str) -> None:
        """Wait until the page shows all of the texts."""
        for text in texts:
            self.await_true(f"document.body.innerText.includes({json.dumps(text)})")

    def await_true(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.evaluate(f"document.body !== null && {script}"):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {script}; the page shows:\n{self.text()}")
            time.sleep(_POLL_SECONDS)

    def click(self, text: str) -> None:
        """Click the innermost element with exactly this text."""
        self.await_text(text)
        self.evaluate(
            "[...document.querySelectorAll('*')]"
            f".filter(one => one.innerText === {json.dumps(text)}).pop().click()"
        )

    def settle(self) -> None:
        """Wait until nothing loads, and the text stays as it is for a second."""
        self.await_true("!document.body.innerText.includes('Loading')")
        shown, since = self.text(), time.monotonic()
        until = since + _SETTLED_SECONDS
        while time.monotonic() < min(since + 1, until):
            time.sleep(_POLL_SECONDS)
            before, shown = shown, self.text()
            since = since if shown == before else time.monotonic()

    def picture(self, path: Path, area: tuple[int, int, int, int], *, scale: float = 1.0) -> None:
        """Take a picture of an area: its left, top, right and bottom in the window."""
        left, top, right, bottom = area
        size = {"width": right - left, "height": bottom - top}
        clip = {"x": left, "y": top, **size, "scale": scale}
        found = self.call("Page.captureScreenshot", format="png", clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium() -> Iterator[Page]:
    """A page of a new browser, which ends with the block."""
    command = find_chromium()
    assert command is not None
    with tempfile.TemporaryDirectory(prefix="arroyo-browser-", ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [command, *_OPTIONS, f"--user-data-dir={home}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_page_address(Path(home), process), max_size=None) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            process.wait(20)


def _page_address(home: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of the protocol of the page with which the browser begins."""
    written = home / "DevToolsActivePort"
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if written.exists() and "\n" in written.read_text():
            port = written.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                for found in json.load(answer):
                    if found["type"] == "page":
                        return str(found["webSocketDebuggerUrl"])
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"Chromium did not start; its exit code is {process.poll()}")
