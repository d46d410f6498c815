"""What a page shows in headless Chromium."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ASK = """<script>addEventListener("load", () => setTimeout(async () => {
  const found = await (async () => {%s})();
  document.body.replaceChildren(JSON.stringify(found));
}, 500))</script>"""


def seen(page: Path, program: str, *, width: int = 1280, scheme: str = "light") -> Any:
    """What a JavaScript function with this body returns on a copy of the page, half a second after
    it is drawn.

    Args:
        page: an HTML file.
        program: the body, which may await.
        width: of the window, in pixels, at least 500.
        scheme: prefers-color-scheme, light or dark.

    Raises:
        AssertionError: the page wrote to the console, or an exception was not caught.
    """
    copy = page.with_name(f"{page.stem}_asked.html")
    copy.write_text(page.read_text() + ASK % program)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
    ]
    flags += [
        "--enable-logging=stderr",
        "--virtual-time-budget=30000",
        "--dump-dom",
        f"--window-size={width},900",
    ]
    flags += [f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"]
    done = subprocess.run(
        [CHROMIUM, *flags, copy.as_uri()], capture_output=True, text=True, timeout=300
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(done.stdout.partition("<body>")[2].partition("</body>")[0])
