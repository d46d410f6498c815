"""Mistakes in settings: what `train` and each tool print for more than 1,000 of them.

    python -m benchmarks.bad_settings              # all: minutes on one core
    python -m benchmarks.bad_settings generate     # those with this in their command, or of this kind
    python -m benchmarks.bad_settings --seconds=60 # on a busy machine: the longest time of a command

A mistake is answered well with exit status 1 or 2, nothing on standard output, a message on standard error that begins
with "Error: ", names what is wrong and says what to do, no traceback, and no file left behind. The program prints each
answer that is not so, and a table. Exit status 1: there is one.

Each command runs in a process that is forked after the imports, which take most of the time of a start. A test of
`python -m train` itself is in tests/configuration.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.mistakes import OF_TOOLS, SIZES, SYNTAX, UNKNOWN, VALUES, VERIFY
from training_io.config import Config

ROOT = Path(__file__).parents[1]
RUN = ("--config-name=local_test_synthetic", f"data.filespec={ROOT}/synthetic_dataset.zarr")
"""Arguments of a run that would start."""
TOOLS = {
    "tools.generate": ("run={tmp}/none", "prompt=a"),
    "tools.evaluate": ("run={tmp}/none",),
    "tools.checkpoint": ("run={tmp}/none",),
    "tools.checkpoint_to_huggingface": ("run={tmp}/none", "output={tmp}/out"),
    "tools.huggingface_to_checkpoint": ("model={tmp}/none", "output={tmp}/out"),
    "tools.huggingface_to_flat_tokens": (
        "out={tmp}/x.zarr",
        f"train.files=[{ROOT}/tests/data/austen_validation.jsonl.xz]",
        "validation=null",
    ),
    "tools.inspect_data": (f"filespec={ROOT}/synthetic_dataset.zarr",),
    "tools.merge_flat_tokens": ("out={tmp}/x.zarr",),
    "tools.write_synthetic_dataset": ("out={tmp}/x.zarr",),
    "tools.report": ("run={tmp}/none",),
    "tools.schedule": ("schedule=gpipe", "p=2", "m=4"),
}
"""Each tool with its own settings, and arguments that it needs."""
SECONDS = 20
"""Longest time of a command. One that takes longer hangs."""
MEMORY = 24 * 2**30
"""Largest address space of a command, in bytes, so that none takes the memory of the machine."""
REMEDY = re.compile(
    r"must|[Cc]hoose|[Cc]heck|[Gg]ive|[Dd]id you mean|"
    r"\b[Ss]et |[Ww]rite|[Ll]eave|\b[Uu]se |\b[Pp]ut |install|lists|[Cc]orrect|"
    r"[Tt]here (are|is)|[Ss]tart|[Mm]ove|name a run|[Rr]emove|[Mm]ake|[Rr]ead|[Ll]et|fit"
)
"""Words of which a message that says what to do has one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A command with a mistake.

    Attributes:
        program: module that Python runs.
        arguments: its arguments; {tmp} is the directory in which it runs, an empty one.
        names: what the message must contain: the setting, the file or the value that is wrong.
        kind: kind of the mistake.
    """

    program: str
    arguments: tuple[str, ...]
    names: str
    kind: str

    def __str__(self) -> str:
        return f"python -m {self.program} {' '.join(self.arguments)}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command did. `status` is None where it took longer than SECONDS, and negative after a signal."""

    case: Case
    status: int | None
    stdout: str
    stderr: str
    left: list[str]
    seconds: float

    def problems(self) -> list[str]:
        """What is wrong with the answer."""
        error = self.stderr
        found = {
            "accepted": self.status == 0,
            "hangs": self.status is None,
            f"ends with {self.status}": self.status not in (0, 1, 2, None),
            "traceback": "Traceback (most recent call last)" in error or '  File "' in error,
            "no message": not error.startswith("Error: "),
            "does not name it": self.case.names not in error,
            "no remedy": not REMEDY.search(error),
            "Hydra's words": "HYDRA_FULL_ERROR" in error or "full_key" in error or "object_type" in error,
            "on standard output": bool(self.stdout),
            f"leaves {', '.join(self.left)}": bool(self.left),
        }
        return [problem for problem, is_so in found.items() if is_so]


# ---- the mistakes -------------------------------------------------------------------------------------------------


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Name, type and field of each setting in a dataclass of settings and in those that it holds."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        inner = [kind, *typing.get_args(kind)]
        (section,) = [x for x in inner if dataclasses.is_dataclass(x)][:1] or [None]
        if section is not None and typing.get_origin(kind) not in (list, dict):
            yield from leaves(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind, field


def of_types(schema: type, skip: Callable[[str], bool]) -> Iterator[tuple[str, str, str]]:
    """Overrides with a value of a wrong type or out of range, for each setting; and what they are about."""
    for name, kind, field in leaves(schema):
        if skip(name):
            continue
        kinds = {kind, *typing.get_args(kind)}
        origin = typing.get_origin(kind)
        if kinds & {int, float}:
            yield f"{name}=abc", name, "wrong type"
            if origin is not list:
                yield f"{name}=[1]", name, "list for a scalar"
        if int in kinds and float not in kinds and origin is not list:
            yield f"{name}=1.5", name, "wrong type"
        if kind is bool:
            yield f"{name}=2", name, "wrong type"
            yield f"{name}=maybe", name, "wrong type"
        if origin in (list, dict):
            yield f"{name}=3", name, "scalar for a list"
        if str in kinds and origin is not list and name != "prompt":  # which is a text, whatever its signs
            yield f"{name}={{a:1}}", name, "list for a scalar"
        if kind in (int, float, bool, str) or origin in (list, dict):
            yield f"{name}=null", name, "null"
        if "range" in field.metadata:
            low, end = field.metadata["range"]
            yield f"{name}={'nan' if float in kinds else low - 1}", name, "out of range"
            yield f"{name}=-3", name, "out of range"
            if end < math.inf:
                yield f"{name}={10**24}", name, "out of range"


def sections(schema: type, prefix: str = "") -> Iterator[str]:
    """Prefixes of the sections of a dataclass of settings, the empty one among them."""
    yield prefix
    for name in dict.fromkeys(name.rpartition(".")[0] for name, _, _ in leaves(schema)):
        if name:
            yield f"{name}."


def cases() -> list[Case]:
    """All mistakes."""
    found: list[Case] = []

    def add(program: str, base: Sequence[str], text: str, names: str, kind: str, split: bool = True) -> None:
        own = re.split(r" (?=\+?[\w.]+=|--)", text) if split else [text]
        given = {argument.partition("=")[0] for argument in own}
        kept = [argument for argument in base if argument.partition("=")[0] not in given]
        flags = [argument for argument in own if argument.startswith("--")]
        kept = [*kept, *flags] if split else kept
        rest = [argument for argument in own if not (split and argument in flags)]
        found.append(Case(program, (*kept, *rest), names, kind))

    listed = (("unknown name", UNKNOWN), ("value", VALUES), ("size", SIZES))
    for kind, table in listed:
        for text, names in table:
            add("train", RUN, text, names, kind)
    for text, names in SYNTAX:
        add("train", RUN, text, names, "syntax", split=False)
    found.append(Case("train", (), "--config-name", "value"))
    found.append(Case("train", ("training.steps=3",), "--config-name", "value"))
    # Model settings have types only in their own module; Any takes everything.
    for text, names, kind in of_types(Config, lambda name: name == "model"):
        add("train", RUN, text, names, kind)
    model = import_module("train").ModelConfig
    for text, names, kind in of_types(model, lambda name: name == "module" or name.startswith("rope_scaling")):
        add("train", RUN, f"model.{text}", f"model.{names}", kind)
    for section in sections(Config):
        add("train", RUN, f"{section}bogus_name=1", "bogus_name", "unknown name")
    for text, names in VERIFY:
        add("tools.verify", RUN, text, names, "tool")
    for program, base in TOOLS.items():
        for text, names in OF_TOOLS[program]:
            add(program, base, text, names, "tool")
        for text, names in SYNTAX[:3]:
            setting = base[0].partition("=")[0]
            add(program, base, text.replace("model.layers", setting), names.split("=")[-1], "syntax", split=False)
        module = "config" if program.endswith("huggingface_to_flat_tokens") else "__main__"
        folder = (ROOT / program.replace(".", "/")).is_dir()
        schema = import_module(f"{program}.{module}" if folder else program).Config
        for text, names, kind in of_types(schema, lambda name: False):
            add(program, base, text, names, kind)
        add(program, base, "bogus_name=1", "bogus_name", "unknown name")
        required = base[0].partition("=")[0]
        alone = "output" if program == "tools.checkpoint_to_huggingface" else required  # which has run=null to publish
        found.append(Case(program, (), alone, "missing"))
        add(program, base, f"{required}=", required, "missing")
        add(program, base, f"{required}={'x' * 300}", "x" * 300, "value")
        if program != "tools.huggingface_to_flat_tokens":
            add(program, base, f"--multirun {required}=a,b", "--multirun", "value")
    return list(dict.fromkeys(found))


# ---- running them -------------------------------------------------------------------------------------------------


def run(chosen: Sequence[Case], seconds: float = SECONDS) -> Iterator[Outcome]:
    """Runs the commands one after the other, each in a forked process."""
    for program in {case.program: None for case in chosen}:
        with contextlib.suppress(ModuleNotFoundError):
            import_module(program if not (ROOT / program.replace(".", "/")).is_dir() else f"{program}.__main__")
    for case in chosen:
        with tempfile.TemporaryDirectory(prefix="bad_settings_") as parent:
            yield _run(case, Path(parent), seconds)


def _run(case: Case, parent: Path, seconds: float) -> Outcome:
    directory = parent / "here"
    directory.mkdir()
    arguments = [argument.replace("{tmp}", str(directory)) for argument in case.arguments]
    case = dataclasses.replace(case, names=case.names.replace("{tmp}", str(directory)))
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork before JAX has started its devices is safe
        child = os.fork()
    if child == 0:
        _become(case.program, arguments, parent, directory)
    status = None
    while time.monotonic() < begin + seconds:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    texts = [(parent / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    left = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))[:5]
    shutil.rmtree(directory, ignore_errors=True)
    return Outcome(case, status, *texts, left, time.monotonic() - begin)


def _become(program: str, arguments: list[str], parent: Path, directory: Path) -> typing.NoReturn:
    """Runs the program in this process, which ends."""
    code = 1
    try:
        os.setsid()
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(parent / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(directory)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(parent / "cache")
        sys.argv = [program, *arguments]
        warnings.filterwarnings("ignore", module="runpy")
        try:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: Sequence[str]) -> int:
    """Runs the cases of which `arguments` have the kind or a part of the command, or all. Returns the exit status."""
    every = cases()
    kinds = ", ".join(repr(kind) for kind in dict.fromkeys(case.kind for case in every))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bad_settings",
        description=__doc__,
        epilog=f"{len(every)} mistakes, of the kinds {kinds}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"longest time of a command, in seconds (default {SECONDS})"
    )
    parser.add_argument("wanted", nargs="*", help="a kind, or a part of a command; none: all mistakes")
    given = parser.parse_args(arguments)
    wanted = given.wanted
    chosen = [case for case in every if not wanted or any(text in str(case) or text == case.kind for text in wanted)]
    if not chosen:
        parser.error(f"no mistake is of the kind {' or '.join(wanted)}, or has it in its command; the kinds: {kinds}")
    counts: dict[str, list[int]] = {}
    bad = 0
    for outcome in run(chosen, given.seconds):
        problems = outcome.problems()
        count = counts.setdefault(outcome.case.kind, [0, 0])
        count[0] += 1
        if problems:
            bad += 1
            count[1] += 1
            print(f"{outcome.case}\n  {'; '.join(problems)} ({outcome.seconds:.1f} s)")
            for line in outcome.stderr.splitlines()[:4] + outcome.stderr.splitlines()[4:][-3:]:
                print(f"    {line[:300]}")
            sys.stdout.flush()
    for kind, (number, wrong) in counts.items():
        print(f"{kind:20} {number:4} mistakes, {number - wrong:4} answered in one message")
    print(f"{len(chosen)} mistakes, {bad} answered badly")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
