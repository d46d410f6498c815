"""Headless Chromium, driven through the DevTools protocol over a pipe: what a page fetches, draws and complains of."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 120.0


class Browser:
    """One page of a browser. `events` are all that the browser told of it, in order."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers, self._numbers, self._rest = commands, answers, itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command. What else the browser tells until then is added to `events`."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 2**20)
            assert part, "the browser ended"
            self._rest += part
        answer, _, self._rest = self._rest.partition(b"\0")
        return json.loads(answer)

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Opens a file in a window of this width, with prefers-color-scheme `scheme`, and waits until it is drawn."""
        mobile = width < 600
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.send("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + PATIENCE_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < deadline, "the page does not load"
            self.evaluate("0")
            time.sleep(0.05)
        # Two frames: after them the plots have their sizes.
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page; of a promise, what it gives."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as a PNG."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def fetched(self) -> list[str]:
        """Addresses that the page requested, itself included, but for data: and blob:, which are in it."""
        requests = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in requests if not url.startswith(("data:", "blob:"))]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions that no one caught."""
        of = lambda method: [event["params"] for event in self.events if event["method"] == method]
        said = [str(e["args"]) for e in of("Runtime.consoleAPICalled") if e["type"] in ("error", "warning", "assert")]
        logged = [e["entry"]["text"] for e in of("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")]
        return said + logged + [str(e["exceptionDetails"]) for e in of("Runtime.exceptionThrown")]


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that keeps its files in the directory `profile`."""
    # It reads commands at 3 and writes answers at 4.
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-dev-shm-usage"
    flags += f" --remote-debugging-pipe --disable-background-networking --user-data-dir={profile}"
    shell = ["/bin/bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
    with open(profile.with_suffix(".log"), "wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        command = [*shell, CHROMIUM, *flags.split(), "about:blank"]
        process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **streams)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
