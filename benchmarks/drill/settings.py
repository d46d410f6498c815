"""Bad settings: each is answered in one message. benchmarks/bad_settings.py has the list, and judges the answers."""

import re
import subprocess
import sys

from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import ROOT, environment, shortened

PROGRAM = ROOT / "benchmarks" / "bad_settings.py"
FULL = 400


def play(field: Field, case: int) -> Finding:
    """Runs the whole list, or for fewer than FULL those of one tool."""
    command = [sys.executable, "-m", "benchmarks.bad_settings", *([] if field.count >= FULL else ["tools.report"])]
    done = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True)
    counts = re.search(r"^(\d+) mistakes, (\d+) answered badly$", done.stdout, re.MULTILINE)
    wrong = [": ".join(found) for found in re.findall(r"^(\S.*)\n  (\S.*)$", done.stdout, re.MULTILINE)]
    if not counts or int(counts[2]) != len(wrong) or bool(done.returncode) != bool(wrong):
        wrong.append(f"status {done.returncode}, and no count of the mistakes: {shortened(done.stdout + done.stderr)}")
    return Finding("the list of benchmarks/bad_settings.py", tuple(wrong), int(counts[1]) if counts else 0)


KIND = Kind(
    name="settings",
    short=40,
    full=FULL,
    checked="A bad setting of train or of a tool is answered with a message and a remedy, without a traceback, and "
    "nothing is left behind.",
    play=play,
    cases=lambda count: 1,
    missing=lambda: None if PROGRAM.exists() else "benchmarks/bad_settings.py is missing",
)
