"""Copies train.py into your project, from where `shardwright train` then runs it, or shows what you changed in it.

    shardwright fork
    shardwright fork --diff

The diff is with the installed train.py. It ends with the definitions that are as released, and whether the files of the
installed package are those that its wheel brought.
"""

import argparse
import ast
import base64
import difflib
import hashlib
import importlib.metadata
import sys
from pathlib import Path

from shardwright.run.files import write_whole
from shardwright.settings.words import listed, told_in_a_line

RELEASED, FORK = Path(__file__).parents[1] / "train.py", Path("train.py")


def definitions(source: str) -> dict[str, str]:
    """Code of each function and method of a module, without comments, by name; of other statements, by themselves."""
    found = {}
    for node in ast.parse(source).body:
        is_named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            within = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            code = ast.unparse(part)
            name = getattr(part, "name", code.partition("\n")[0]) if is_named else code
            found[within + name] = code
    return found


def edited_files() -> list[str] | None:
    """Files of the installed package that differ from those of its wheel; None for a checkout, which has no list."""
    files = importlib.metadata.files("shardwright") or ()
    hashed = [file for file in files if file.hash and file.parts[0] in ("shardwright", "shardlib")]
    edited = [str(file) for file in hashed if file.hash and file.hash.value != _digest(Path(str(file.locate())))]
    return sorted(edited) if hashed else None


def _digest(path: Path) -> str | None:
    """The hash of a file, as in the list of a wheel; None if it is missing."""
    if not path.is_file():
        return None
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def show_changes() -> None:
    """Prints the diff of the fork, and what is as released."""
    ours, theirs = FORK.read_text(encoding="utf-8"), RELEASED.read_text(encoding="utf-8")
    lines = (theirs.splitlines(keepends=True), ours.splitlines(keepends=True))
    sys.stdout.writelines(difflib.unified_diff(*lines, "released/train.py", "train.py"))
    mine, released = definitions(ours), definitions(theirs)
    same = [name for name in released if mine.get(name) == released[name]]
    changed = [name for name in mine if name in released and name not in same]
    for what, names in {
        "changed": changed,
        "added": [*mine.keys() - released.keys()],
        "removed": [*released.keys() - mine.keys()],
    }.items():
        print(f"{what:9}{listed(sorted(names), 20) or 'none'}")
    print(f"{'the same':9}{len(same)} of {len(released)} definitions and statements")
    edited = edited_files()
    about = "a checkout, which has no list of files" if edited is None else listed(edited, 20) or "none is edited"
    print(f"{'package':9}shardwright {importlib.metadata.version('shardwright')}: {about}")


@told_in_a_line
def main() -> None:
    """Makes a fork, or shows its changes."""
    parser = argparse.ArgumentParser(prog="shardwright fork", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--diff", action="store_true", help="show what differs from the released train.py")
    is_diff = parser.parse_args().diff
    if is_diff and not FORK.exists():
        sys.exit("Error: there is no train.py here. Run `shardwright fork` first, in the directory of your project.")
    if is_diff:
        show_changes()
        return
    if FORK.exists():
        sys.exit("Error: there is a train.py here already. `shardwright fork --diff` shows how it differs.")
    write_whole(FORK, RELEASED.read_text(encoding="utf-8"))
    print("train.py: a copy of the released one, which `shardwright train` and the tools run when started here.")
    print("`shardwright fork --diff` shows what you changed.")


if __name__ == "__main__":
    main()
