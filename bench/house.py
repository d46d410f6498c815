"""Lines of Python in each room of the house, beside those of the last release.

    make house

The last release is the commit that gave the newest dated heading of CHANGELOG.md; ARGS=<commit>
names another one.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[1]
DIVIDED = ("shardwright", "tests")
"""Folders whose rooms have a row each."""


def git(*arguments: str) -> str:
    """Output of a git command in the checkout. Exits with git's message if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"make house: git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def last_release() -> str:
    """The commit of the newest release in CHANGELOG.md."""
    heading = re.search(r"^## \d.*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None:
        sys.exit("make house: CHANGELOG.md has no release; give a commit: make house ARGS=<commit>")
    commits = git("log", "--format=%h", f"-S{heading[0]}", "--", "CHANGELOG.md").split()
    if not commits:
        sys.exit("make house: this clone lacks the commit of the last release; fetch its history")
    return commits[-1]


def room_of(file: str) -> str:
    """The room of a file: its folder, or for those of DIVIDED the folder inside."""
    parts = PurePath(file).parts
    return "/".join(parts[: 2 if parts[0] in DIVIDED and len(parts) > 2 else 1])


def lines_by_room(commit: str) -> collections.Counter[str]:
    """Lines of the Python files of `commit`, by room."""
    counts = git("grep", "-c", "", commit, "--", "*.py").splitlines()  # commit:file:lines
    rooms = collections.Counter[str]()
    for count in counts:
        _, file, lines = count.split(":")
        rooms[room_of(file)] += int(lines)
    return rooms


def main() -> None:
    """Prints the table."""
    release = sys.argv[1] if len(sys.argv) > 1 else last_release()
    before, now = lines_by_room(release), lines_by_room("HEAD")
    print(f"{'room':<28}{release:>10}{'HEAD':>10}{'change':>10}")
    for room in sorted({*before, *now}):
        print(f"{room:<28}{before[room]:>10,}{now[room]:>10,}{now[room] - before[room]:>+10,}")
    total, total_now = before.total(), now.total()
    print(f"{'all':<28}{total:>10,}{total_now:>10,}{total_now - total:>+10,}")


if __name__ == "__main__":
    main()
