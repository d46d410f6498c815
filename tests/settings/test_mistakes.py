"""What programs answer to mistakes on the command line: mistakes.txt has commands, and below each
its message.

python tests/settings/test_mistakes.py    # writes the messages of today into mistakes.txt
"""

import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mistakes.txt")


def commands() -> list[str]:
    """The commands of the table, in order."""
    return [line for line in TABLE.read_text().splitlines() if line and line[0] not in "# "]


def answered(command: str) -> str:
    """What a command prints, run in a forked process: a fresh start takes seconds.

    Its directory is {here}.
    """
    with tempfile.TemporaryDirectory() as parent:
        here, said = Path(parent, "here"), Path(parent, "said")
        here.mkdir()
        child = os.fork()
        if child == 0:
            _become(
                shlex.split(command.replace("{here}", str(here)).replace("{root}", str(ROOT))),
                here,
                said,
            )
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = said.read_text().replace(str(here), "{here}").replace(str(ROOT), "{root}")
        left = [str(path.relative_to(here)) for path in here.rglob("*") if path.name != "runs"]
        return (
            text
            if status in (1, 2) and not left
            else f"{text}exit status {status}; left behind: {left}\n"
        )


def _become(arguments: list[str], here: Path, said: Path) -> None:
    """Runs a program in this process, which ends."""
    code = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        os.chdir(here)
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        print(end.code if isinstance(end.code, str) else "", end="", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def table() -> str:
    """The table with the messages of today."""
    head = [line for line in TABLE.read_text().splitlines() if line.startswith("#")]

    def said(command):
        return "".join(f"    {line}\n" for line in answered(command).splitlines())

    return (
        "\n".join(head)
        + "\n\n"
        + "\n".join(f"{command}\n{said(command)}" for command in commands())
    )


@pytest.mark.long
def test_messages_are_those_of_the_table():
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "HYDRA_FULL_ERROR")
    }
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--print"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == TABLE.read_text(), done.stderr


def test_each_message_says_what_is_wrong():
    text = TABLE.read_text()
    assert len(commands()) >= 60
    assert text.count("\n    Error: ") == len(commands())
    assert "Traceback" not in text
    assert "exit status" not in text


if __name__ == "__main__":
    import train  # noqa: F401  the forked processes have it

    found = table()
    print(found, end="") if "--print" in sys.argv else TABLE.write_text(found)
