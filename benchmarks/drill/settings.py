"""Bad settings: each is answered in one line. benchmarks/bad_settings.py has the list, and judges the answers."""

import re
import subprocess
import sys

from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import ROOT, environment, shortened

PROGRAM = ROOT / "benchmarks" / "bad_settings.py"


def play(field: Field, case: int) -> Finding:
    """Runs the list, which is one case. Its program exits with status 0 if all is answered as promised."""
    command = [sys.executable, "-m", "benchmarks.bad_settings", "--count", str(field.count), "--seed", str(field.seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True)
    found = re.search(r"([\d,]+) bad settings", done.stdout)
    count = int(found[1].replace(",", "")) if found else 0
    wrong = [] if count else ["the program did not say how many bad settings it tried"]
    if done.returncode:
        wrong.append(f"status {done.returncode}: {shortened(done.stdout[-1500:] + done.stderr[-1500:], 1000)}")
    return Finding("the list of benchmarks/bad_settings.py", tuple(wrong), count)


KIND = Kind(
    name="settings",
    short=40,
    full=400,
    checked="A bad setting of train or of a tool is answered with a message and a remedy, without a traceback, and "
    "nothing is left behind.",
    play=play,
    cases=lambda count: 1,
    missing=lambda: None if PROGRAM.exists() else "benchmarks/bad_settings.py is missing",
)
