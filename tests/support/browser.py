"""What a page shows in headless Chromium."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage --dump-dom "
    "--enable-logging=stderr --virtual-time-budget=30000"
)
ASK = """<script>addEventListener("load", () => setTimeout(async () => {
  const found = await (async () => {%s})();
  document.body.replaceChildren(JSON.stringify(found));
}, 500))</script>"""


def seen(page: Path, program: str, *, width: int = 1280) -> Any:
    """What a JavaScript function with this body, which may await, returns on a copy of an HTML
    file, half a second after it is drawn in a window of `width` pixels, at least 500.

    Raises:
        AssertionError: the page wrote to the console, or an exception was not caught.
    """
    copy = page.with_name(f"{page.stem}_asked.html")
    copy.write_text(page.read_text() + ASK % program)
    command = [CHROMIUM, *FLAGS.split(), f"--window-size={width},900", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(done.stdout.partition("<body>")[2].partition("</body>")[0])
