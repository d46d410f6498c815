"""A session of an agent that edits the model: what tools.check says of each edit, and after how long.

    python -m tests.support.agent_edits        makes the edits of the session and records docs/agents.md again

The edits are made in a copy of the checkout, a repository of its own.
"""

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.edits import EDITS, Edit
from tests.support.recipes import ROOT

SESSION = sorted((edit for edit in EDITS.values() if edit.session), key=lambda edit: edit.session)
PAGE = ROOT / "docs/agents.md"
CALL = re.compile(r"[\w.]+[(\[][^`]*?'[^']*'[^`]*?[)\]]+")
"""Code in a message that is not marked as code: `matmul('B M, M F -> B F')`, `f32['B M']`."""
LONGEST = 70
"""Characters of a line of code that the page shows."""
COMMAND = ["-m", "tools.check", "--config-name=local_test_synthetic", "check.output=json"]
TRACKED = ("train.py", "shardlib", "shardwright", "configs", "tools", "docs")


def checkout(directory: Path) -> Path:
    """A repository in `directory` with the sources of this checkout, in one commit."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "site", "pictures")
    for name in TRACKED:
        source, target = ROOT / name, directory / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target, follow_symlinks=False)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], cwd=directory, check=True)
    return directory


@contextlib.contextmanager
def edited(directory: Path, edit: Edit, with_fix: bool = False) -> Iterator[str]:
    """Context in which a checkout has an edit, or also the change that follows its remedy; yields the file's text."""
    ((file, text),) = edit.files.items()
    if with_fix:
        text = edit.fix.apply(text)
    path = directory / file
    before = path.read_text()
    path.write_text(text)
    try:
        yield text
    finally:
        path.write_text(before)


def check(directory: Path, *words: str, **environment: str) -> tuple[int, dict]:
    """Exit status of tools.check in a checkout, and what it says."""
    environment = os.environ | {"PYTHONPATH": str(directory)} | environment
    command = [sys.executable, *COMMAND, *words]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout.strip().rpartition("\n")[2])


def verdict(found: dict, text: str) -> str:
    """What the page says of a result on an edited file: with the text of lines, because their numbers change."""
    lines = text.splitlines()

    def code(place: str) -> str:
        number = int(re.search(r":(\d+)", place)[1])
        first = next(line.strip() for line in lines[number - 1 :] if not line.strip().startswith("@"))
        return f"`{first if len(first) <= LONGEST else first[:LONGEST] + '…'}`"

    if found["verdict"] == "rejected":
        remedy = f" *Remedy:* {found['remedy']}" if found["remedy"] else ""
        said = CALL.sub(r"`\g<0>`", f"{found['problem']}.{remedy}")
        return f"**rejected** by `{found['checks'][-1]['name']}` at {code(found['place'])}: {said}"
    than, parts = found["difference"], []
    if than["same_program"]:
        return "accepted, no change to the program"
    if than["lines"]:
        parts.append(f"changed: {', '.join(map(code, than['lines']))}")
    of = than["bytes"]
    if of["now"] != of["before"]:
        parts.append(f"memory {of['now'] / of['before'] - 1:+.1%}")
    parts += [f"{than['parameters']:+,} parameters"] if than["parameters"] else []
    return "accepted; " + "; ".join(parts or ["changed"])


def record(directory: Path) -> list[str]:
    """The recorded parts of the page, in order: what check says of the edit with a remedy, and after it; the table."""
    environment = {"JAX_COMPILATION_CACHE_DIR": str(directory / ".cache")}  # without earlier proofs
    check(directory, **environment)
    rows, loads, shown = [], [], []
    sessions = [(str(edit.session), edit.id, edit, False) for edit in SESSION]
    (fixed,) = (edit for edit in SESSION if edit.fix)
    sessions.append(("", f"{fixed.session}, with its remedy", fixed, True))
    for number, name, edit, with_fix in sessions:
        with edited(directory, edit, with_fix) as text:
            begin, computed = time.perf_counter(), cpu_seconds()
            _, found = check(directory, **environment)
            took = f"{time.perf_counter() - begin:.1f} | {cpu_seconds() - computed:.1f}"
        loads.append(os.getloadavg()[0])
        shown += [as_json(found)] * (edit is fixed)
        rows.append(f"| {number} | {name} | {verdict(found, text).replace('|', chr(92) + '|')} | {took} |\n")
        print(rows[-1], end="", flush=True)
    about = f"{os.cpu_count()} cores that other programs used too, with a load of {min(loads):.0f} to {max(loads):.0f}"
    head = "| | edit | what `check` says | seconds | of CPU |\n|---|---|---|---|---|\n"
    return [*shown, f"Recorded on {about}:\n\n{head}{''.join(rows)}"]


def cpu_seconds() -> float:
    """CPU time of the programs that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def as_json(found: dict) -> str:
    """The verdict as a block of JSON, without the text of each check and the costs by line."""
    names = ("verdict", "certain", "place", "problem", "remedy", "difference")
    kept = {name: found[name] for name in names if name in found}
    return f"```json\n{json.dumps(kept, indent=1, ensure_ascii=False)}\n```"


RECORDED = re.compile(r"```json\n.*?```|^Recorded on .*?\n(?=\n[^|\n])", re.DOTALL | re.MULTILINE)
"""The parts of the page that the script writes: two blocks of JSON, and the table with the line before it."""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        parts = iter(record(checkout(Path(scratch))))
    PAGE.write_text(RECORDED.sub(lambda match: next(parts), PAGE.read_text()))
