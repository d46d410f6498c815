"""Makes a project of your own: a model, its configurations, and a test that checks it.

    shardwright init my_project

docs/check.md shows what to do with it.
"""

import argparse
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from shardwright.settings.output import told_in_a_line

TEMPLATE = Path(__file__).parent / "template"


@told_in_a_line
def main() -> None:
    """Copies the template into a new directory."""
    parser = argparse.ArgumentParser(
        prog="shardwright init", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "directory", type=Path, help="a directory that is empty, but for .git, or does not exist"
    )
    directory = parser.parse_args().directory
    if not str(directory).isprintable():
        sys.exit(
            f"Error: {str(directory)!r} has characters that cannot be printed. Choose another name."
        )
    if directory.exists() and {path.name for path in directory.iterdir()} - {".git"}:
        sys.exit(
            f"Error: {directory} is not empty. Give a directory that is empty, but for .git, or "
            "does not exist."
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as unfinished:  # removed if the disk is full
        project = Path(unfinished, "project")
        try:
            shutil.copytree(TEMPLATE, project, ignore=shutil.ignore_patterns("__pycache__"))
        except shutil.Error as error:
            raise OSError(error.args[0][0][2]) from error
        # so named, wheels would leave it out
        (project / "gitignore").rename(project / ".gitignore")
        for path in project.iterdir():
            path.rename(directory / path.name)
    print(f"{directory}: a project. Its README.md has the next commands:")
    print(f"  cd {shlex.quote(f'./{directory}' if str(directory)[0] in '-~' else str(directory))}")
    print("  shardwright train --config-name=my_run")


if __name__ == "__main__":
    main()
