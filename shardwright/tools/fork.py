"""Copies train.py into your project, from where `shardwright train` then runs it, or shows what you
changed in it.

    shardwright fork
    shardwright fork --diff

The diff is with the installed train.py.
"""

import argparse
import difflib
import sys
from pathlib import Path

from shardwright.program.files import write_whole
from shardwright.settings.output import told_in_a_line

RELEASED, FORK = Path(__file__).parents[1] / "train.py", Path("train.py")


def show_changes() -> None:
    """Prints the diff of the fork."""
    ours, theirs = FORK.read_text(encoding="utf-8"), RELEASED.read_text(encoding="utf-8")
    lines = (theirs.splitlines(keepends=True), ours.splitlines(keepends=True))
    sys.stdout.writelines(difflib.unified_diff(*lines, "released/train.py", "train.py"))


@told_in_a_line
def main() -> None:
    """Makes a fork, or shows its changes."""
    parser = argparse.ArgumentParser(
        prog="shardwright fork", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--diff", action="store_true", help="show what differs from the released train.py"
    )
    is_diff = parser.parse_args().diff
    if is_diff and not FORK.exists():
        sys.exit(
            "Error: there is no train.py here. Run `shardwright fork` first, in the directory of "
            "your project."
        )
    if is_diff:
        show_changes()
        return
    if FORK.exists():
        sys.exit(
            "Error: there is a train.py here already. `shardwright fork --diff` shows how it "
            "differs."
        )
    write_whole(FORK, RELEASED.read_text(encoding="utf-8"))
    print(
        "train.py: a copy of the released one, which `shardwright train` and the tools run when "
        "started here."
    )
    print("`shardwright fork --diff` shows what you changed.")


if __name__ == "__main__":
    main()
