"""Checks an edit before any run: is the step still right, does it fit, what does it cost, and what
did the edit change?

    python -m tools.check --config-name=c4_h100x64_7b
    python -m tools.check --config-name=local_test_synthetic check.against=main check.output=json

Takes the configuration of a run, and uses no devices. Types, the check of the mesh and causality
are those of `train`, the costs those of `tools.plan`. Exit status 0: accepted; 1: rejected; 2: it
could not be checked.
"""

import collections
import contextlib
import difflib
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from shardlib.equations import frames_of
from shardlib.interpret import digest_of, equations_in
from shardlib.parsing import MAY_BE_RIGHT
from shardlib.places import is_installed, is_users, shown_path, users_call
from shardlib.places import place as place_at
from shardwright.axes import AXES
from shardwright.cluster.chips import chip_of
from shardwright.cluster.config import DistributedConfig
from shardwright.cluster.devices import device_like, known_options, make_mesh, start_devices
from shardwright.cluster.topologies import WITHOUT_DEVICE, devices_of
from shardwright.data.checks import a_path, at_least_1, one_of
from shardwright.inspect import as_written
from shardwright.inspect.causality import describe_causality
from shardwright.inspect.planning import NOT_MEASURED, mesh_sizes, planned_change
from shardwright.inspect.soundness import check_steps
from shardwright.inspect.tables import in_bytes, in_seconds
from shardwright.program.best_effort import in_a_line
from shardwright.program.config import Config
from shardwright.program.flops import parameters_of
from shardwright.program.step import NAMES, Step, open_steps, trace_step
from shardwright.run.launch import start_with_section
from shardwright.settings.output import listed, say

UNCHECKED = 2
"""Exit status if nothing was found out."""
MOST = 4
"""Number of changed lines that the screen names."""


@dataclass
class CheckConfig:
    """The section `check`."""

    against: str | None = a_path("HEAD")
    """What to compare with: a commit of the repository where the program starts, or a directory
    (./name if a commit has its name too). Null: nothing."""
    output: str = one_of(("text", "json"), default="text")
    """text, or json, for tools and agents: verdict, place, problem, remedy, costs, and the
    difference of each."""
    compile: bool = False
    """Compiles the step for hardware.chip, and checks that it communicates as written. Needs the
    chip's compiler."""
    devices: int | None = at_least_1(None)
    """Number of devices, where the mesh has a -1. Null: that of the mesh."""


def checks(
    steps: Sequence[Step], settings: CheckConfig
) -> Iterator[tuple[str, Callable[[], dict | None]]]:
    """The checks in order: a name, and a function that raises for a rejected step, or returns its
    verdict; None: it is right.

    `steps` are those of each phase of the run, as its training.changes make them.
    """
    programs = [step.other(name=name) for step in steps for name in NAMES]
    yield "types", lambda: None if [program.traced for program in programs] else {}
    yield "mesh", lambda: as_on_one_device(steps)
    yield "causality", lambda: causality(steps)
    unknown = {"ok": None, "text": "not compiled (check.compile=true)"}
    yield "compiled", lambda: compiled(steps[0]) if settings.compile else unknown


def as_on_one_device(steps: Sequence[Step]) -> dict[str, Any]:
    """Says how the steps were compared with one device. Raises if they compute something else."""
    done = [*map(check_steps, steps)]
    how = dict.fromkeys(line for checked in done for line in checked.how.split("; "))
    return {
        "ok": True,
        "text": "computes what one device computes",
        "lines": [*how],
        "results": {**done[0].results},
    }


def causality(steps: Sequence[Step]) -> dict[str, Any]:
    """Says what positions do not see. Raises if they see more."""
    texts = [*map(describe_causality, steps)]
    unknown = [text for text in texts if text.startswith("not known")]
    return {"ok": None if unknown else True, "text": [*unknown, *texts][0]}


def compiled(step: Step) -> dict[str, Any]:
    """Compiles a step for its chip, and compares its collectives with those written.

    Raises under hardware.strict.
    """
    chip = chip_of(step.config.hardware.chip or NOT_MEASURED)
    count = step.mesh.size
    hardware = step.config.hardware
    try:
        devices = (
            jax.devices("cpu")[:count] if chip.platform == "cpu" else devices_of(chip.name, count)
        )
        mesh = make_mesh(devices, **step.mesh.shape)
        with jax.set_mesh(mesh):
            options = hardware.options | WITHOUT_DEVICE.get(chip.platform, {})
            options = known_options(options, lambda line: print(line, file=sys.stderr))
            program = trace_step(step.config, step.model, mesh).lowered.compile(
                compiler_options=options
            )
    except (KeyError, ValueError, RuntimeError) as error:
        return {"ok": None, "text": f"not for {chip.name} here: {in_a_line(error)}"}
    summary, lines = as_written.compared(
        step.jaxpr, step.mesh, program.as_text() or "", hardware.strict
    )
    return {"ok": None if lines else True, "text": summary, "lines": lines}


def rejection(error: Exception) -> dict[str, Any]:
    """The verdict on a step whose trace or check raised an error, with the line of the user's code
    that it is about.
    """
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    place = getattr(error, "place", "") or (re.match(r"\S+\.py:\d+", text) or [""])[0]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        place = place_at(error.filename, error.lineno)
        text = f"{type(error).__name__}: {error.msg}"
    if not place and (call := users_call(error)):
        place = place_at(call.tb_frame.f_code.co_filename, call.tb_lineno)
    remedy = getattr(error, "remedy", "") or text.partition("remedy: ")[2].partition("\n")[0]
    problem = text.partition("\n")[0].removeprefix(f"{place}: ")
    text = text if text.startswith(place) else f"{place}: {text}"
    said = {"place": place, "problem": problem, "remedy": remedy, "text": text}
    return {"verdict": "rejected", "certain": MAY_BE_RIGHT not in text, **said}


def verdict_of(steps: Sequence[Step], settings: CheckConfig) -> dict[str, Any]:
    """The checks of a step, until one rejects it: their words and seconds; and for a rejection its
    place and remedy.
    """
    found: dict[str, Any] = {"verdict": "accepted", "checks": []}
    for name, check in checks(steps, settings):
        begin = time.perf_counter()
        try:
            ended = check()
            ended = {"ok": True, "text": ""} if ended is None else ended
        except Exception as error:  # an edit may make any error of Python
            found |= rejection(error)
            ended = {"ok": False, "text": found.pop("text")}
        found["results"] = found.get("results", {}) | ended.pop("results", {})
        found["checks"].append(
            {"name": name, **ended, "seconds": round(time.perf_counter() - begin, 2)}
        )
        if ended["ok"] is False:
            break
    return found


def program_of(step: Step) -> dict[str, Any]:
    """A hash of the traced programs, which comments and names of values do not change, and the
    user's lines in them.
    """
    programs = [step.other(name=name) for name in NAMES]
    equations = (eqn for program in programs for eqn in equations_in(program.jaxpr))
    calls = {call for eqn in equations for call in frames_of(eqn) if is_users(call[0])}
    lines = sorted(
        (shown_path(file), line, linecache.getline(file, line).strip()) for file, line in calls
    )
    return {"hash": " ".join(digest_of(program.jaxpr) for program in programs), "lines": lines}


def costs_of(c: Config, sizes: dict[str, int]) -> dict[str, Any]:
    """What the plan says: seconds of a step and bytes at the peak; in `by_line` the same of each
    line.
    """
    plan = planned_change(c, sizes, chip_of(c.hardware.chip or NOT_MEASURED), {})
    found: dict[str, Any] = {
        "bytes": plan.step.peak,
        "memory_bytes": plan.chip.memory_bytes,
        "fits": plan.fits,
    }
    if plan.chip.name != NOT_MEASURED:
        found["seconds"] = plan.seconds
    by_line: dict[str, Any] = {name: collections.Counter() for name in ("seconds", "bytes")}
    for op in plan.rows:
        by_line["seconds"][op.line] += op.exposed
    for held in plan.step.held:
        by_line["bytes"][held.line or held.kind] += held.bytes
    return {**found, "by_line": by_line}


def checked(c: Config, settings: CheckConfig) -> dict[str, Any]:
    """All that is found of a configuration on its own."""
    is_open = any(getattr(c.mesh, axis) == -1 for axis in AXES)
    devices = settings.devices or (c.hardware.simulated_devices if is_open else None)
    if is_open and devices is None:
        raise ValueError(
            "the mesh has a -1, for the remaining devices: give check.devices=<number of devices>."
        )
    sizes = mesh_sizes(c, devices)
    chip = chip_of(c.hardware.chip or NOT_MEASURED)
    steps = open_steps(c, sizes, device_like(chip))
    found = verdict_of(steps, settings)
    if found["verdict"] == "rejected":
        return found
    count = parameters_of(steps[0].model)
    return found | {
        "program": program_of(steps[0]),
        "costs": costs_of(c, sizes),
        "parameters": count,
    }


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], capture_output=True, check=True).stdout


@contextlib.contextmanager
def source_at(against: str) -> Iterator[tuple[str, Path, tuple[str, str]]]:
    """Context with a directory like the working directory, of a commit or as given; and its name.

    And the root of what is compared: here, and there.

    Raises:
        ValueError: it is neither a directory nor a commit.
    """
    with tempfile.TemporaryDirectory() as made:
        directory = os.path.realpath(made)
        try:
            name = f"{against}^{{commit}}"
            commit = _git("rev-parse", "--verify", "--short", name).decode().strip()
            places = _git("rev-parse", "--show-prefix", "--show-toplevel")
            within, root, _ = places.decode().split("\n")
            subprocess.run(
                ["tar", "-x", "-C", directory],
                input=_git("-C", root, "archive", commit),
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            if Path(against).is_dir():
                yield against, Path(against), (os.getcwd(), os.path.realpath(against))
                return
            why = getattr(error, "stderr", None) or str(error).encode()
            reason = why.decode().strip().partition("\n")[0]
            raise ValueError(
                f"check.against is {against!r}, neither a directory nor a commit ({reason}); null "
                f"compares with nothing."
            ) from None
        yield f"{against} ({commit})", Path(directory) / within, (root, directory)


COMPARED = "SHARDWRIGHT_COMPARED"
"""Environment variable of a process that checks other source, with both roots of `source_at`."""


def check_origin() -> None:
    """Raises ValueError if this process checks other source, but imported a file of it from
    here.
    """
    here, _, there = os.environ.get(COMPARED, "").partition(os.pathsep)
    for module in [*sys.modules.values()] if here else ():
        file = getattr(module, "__file__", None) or ""
        if file.startswith(f"{here}/") and Path(there, os.path.relpath(file, here)).exists():
            raise ValueError(f"Python imports {file} in place of the same file of that source")


def started(
    words: Sequence[str], directory: Path, roots: tuple[str, str], without: Sequence[str] = ()
) -> subprocess.Popen:
    """Starts this program with the settings of this run and those of `words`, on the source of a
    directory.

    `without` are the words of this run's settings that it does not have.
    """
    own = [word for word in sys.argv[1:] if not word.startswith("check.") and word not in without]
    here, there = roots
    moved = [
        there + path.removeprefix(here) for path in sys.path if f"{path}/".startswith(f"{here}/")
    ]
    paths = [str(directory), *filter(os.path.isdir, moved), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {COMPARED: os.pathsep.join(roots)}
    options: dict[str, Any] = {"cwd": directory, "env": environment, "text": True}
    command = [sys.executable, "-m", "shardwright.tools.check", *own, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def compared(
    now: dict[str, Any],
    process: subprocess.Popen,
    roots: tuple[str, str],
    restart: Callable[[Sequence[str]], subprocess.Popen],
) -> dict[str, Any]:
    """The `difference` of a result from that of a process on other source, or why it is
    `unknown`.

    If that source lacks settings of this run's command line, `restart` starts it without them.
    """
    out, err = process.communicate()
    new: list[str] = []
    while named := re.search(r"there is no setting ([\w.]+)\.", out + err):
        words = [x for x in sys.argv[1:] if x.lstrip("+").partition("=")[0] == named[1]]
        if not words or words[0] in new:
            break
        new += words
        out, err = restart(new).communicate()
    here, there = (json.dumps(f"{root}/")[1:-1] for root in roots)
    try:
        before = json.loads(out.strip().rpartition("\n")[2].replace(there, here))
    except ValueError:
        last = [line for line in (out + err).splitlines() if line.strip()] or ["it printed nothing"]
        return {"unknown": f"it cannot be checked: {last[-1]}"}
    if before["verdict"] == "rejected":
        return {
            "unknown": f"it cannot be checked: it is rejected there: {before['place']} "
            f"{before['problem']}"
        }
    return {"difference": difference(now, before) | {"new_settings": new}}


def functions_compared(now: Mapping[str, str], before: Mapping[str, str]) -> dict[str, Any]:
    """Compares the results of two steps in exact arithmetic, and names those that differ.

    `same_function` is None if their inputs at small sizes differ, or were not evaluated.
    """
    inputs = [
        {name: x for name, x in of.items() if name.endswith(": inputs")} for of in (now, before)
    ]
    if not inputs[0] or inputs[0] != inputs[1]:
        return {"same_function": None, "results": []}
    differing = [name for name in now if now[name] != before.get(name)]
    return {"same_function": not differing, "results": differing[:MOST]}


def difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Whether the program is the same, the lines that changed, and for each cost the line that
    changed it most.
    """
    there, here = (sorted(map(tuple, of["program"]["lines"])) for of in (before, now))
    texts = ([(file, text) for file, _, text in lines] for lines in (there, here))
    same = {}
    lines = []
    for kind, a, a_end, b, b_end in difflib.SequenceMatcher(
        None, *texts, autojunk=False
    ).get_opcodes():
        pairs = zip(there[a:a_end], here[b:b_end], strict=False)
        same |= {f"{x[0]}:{x[1]}": f"{y[0]}:{y[1]}" for x, y in pairs}
        lines += [f"{file}:{line}" for file, line, _ in here[b:b_end] if kind != "equal"]
    left = {f"{file}:{line}" for file, line, _ in there} - same.keys()

    def of_now(line: str) -> str:
        """The place of a line before the edit, which may go on with a weight, as it is now."""
        place, gap, more = line.partition(" ")
        return same.get(place, f"{place} (before)" if place in left else place) + gap + more

    same_program = now["program"]["hash"] == before["program"]["hash"]
    found: dict[str, Any] = {"same_program": same_program, "lines": lines}
    found |= (
        {"same_function": True}
        if same_program
        else functions_compared(now["results"], before.get("results", {}))
    )

    for name in ("seconds", "bytes"):
        if name not in now["costs"] or name not in before["costs"]:
            continue
        old, new = before["costs"][name], now["costs"][name]
        sign = 1 if new >= old else -1
        grown = collections.Counter[str](now["costs"]["by_line"][name])
        for line, amount in before["costs"]["by_line"][name].items():
            grown[of_now(line)] -= amount
        line = max(grown, key=lambda line: sign * grown[line], default="")
        changed = sign * grown[line] > 0
        found[name] = {
            "before": old,
            "now": new,
            "line": line if changed else "",
            "of_line": changed * grown[line],
        }
    return found | {"parameters": now["parameters"] - before["parameters"]}


def as_text(found: dict[str, Any]) -> str:
    """The result for a terminal of 80 columns."""
    lines = [found["text"]] if not found["checks"] else []
    for check in found["checks"]:
        word = {True: "ok", None: "–", False: "rejected"}[check["ok"]]
        first, *more = check["text"].split("\n")
        lines += [f"{check['name']:11}{word:9}{first}  ({check['seconds']:.1f} s)", *more]
        lines += [f"  {line}" for line in check.get("lines", ())]
    if "costs" not in found:
        return "\n".join(lines)
    costs = found["costs"]
    time_of = f"{in_seconds(costs['seconds'])} a step, " if "seconds" in costs else ""
    need, has = in_bytes(costs["bytes"]), in_bytes(costs["memory_bytes"])
    fits = "ok" if costs["fits"] else "too much"
    lines.append(f"{'plan':11}{fits:9}{time_of}{need} of {has}, {found['parameters']:,} parameters")
    if "against" not in found:
        return "\n".join(lines)
    lines.append(f"against {found['against']}")
    if "unknown" in found:
        return "\n".join([*lines, f"  {'–':9}{found['unknown']}"])
    than = found["difference"]
    if than["new_settings"]:
        lines.append(f"  {'settings':9}without {' '.join(than['new_settings'])}, unknown there")
    if than["same_program"]:
        return "\n".join([*lines, f"  {'program':9}no change"])
    lines.append(
        f"  {'program':9}changed: {listed(than['lines'], MOST) or 'lines that left, or settings'}"
    )
    functions = {True: "the same, in exact arithmetic", None: "not compared: the inputs differ"}
    function = functions.get(
        than["same_function"],
        f"differs: {', '.join(than['results'][:2])}{', …' * (len(than['results']) > 2)}",
    )
    lines.append(f"  {'function':9}{function}")
    for name, title, shown in (("seconds", "time", in_seconds), ("bytes", "memory", in_bytes)):
        if (of := than.get(name)) is not None:
            change = of["now"] / of["before"] - 1
            sign = "+" if of["of_line"] > 0 else "−"
            is_shown = of["line"] and abs(change) >= 5e-4
            where = f"   {of['line']} {sign}{shown(abs(of['of_line']))}" if is_shown else ""
            lines.append(
                f"  {title:9}{shown(of['before'])} → {shown(of['now'])}   {change:+.1%}{where}"
            )
    if than["parameters"]:
        lines.append(f"  {'params':9}{than['parameters']:+,}")
    return "\n".join(lines)


class Rejected(SystemExit):
    """Ends the program with the status of a rejected step."""


def job(c: Config, settings: CheckConfig) -> None:
    """Checks `c`, prints the result, and ends with its status."""
    if settings.compile:
        jax.config.update("jax_platforms", "cpu")  # the compilers of other chips need no device
    start_devices(DistributedConfig(), c.hardware)
    with contextlib.ExitStack() as stack:
        other, roots = None, ("", "")
        against = {}
        try:
            if settings.against:
                name, directory, roots = stack.enter_context(source_at(settings.against))
                same = [word for word in sys.argv[1:] if word.startswith("check.devices=")]
                words = [*same, "check.against=null", "check.output=json"]

                def start(new: Sequence[str] = ()) -> subprocess.Popen:
                    process = stack.enter_context(started(words, directory, roots, new))
                    stack.callback(process.kill)
                    return process

                other = start()  # while this process checks its own source
                against = {"against": name}
        except ValueError:
            if settings.against != CheckConfig.against:
                raise
            unknown = (
                "no commit to compare with yet: `git commit` makes one, or set "
                "check.against=<directory>"
            )
            against = {"against": settings.against, "unknown": unknown}
        try:
            found = checked(c, settings)
            check_origin()
        except ValueError:  # a wrong setting
            raise
        except Exception as error:  # of a model that cannot be made
            found = {"checks": [], **rejection(error)}
        if found["verdict"] == "accepted":
            found |= against | (compared(found, other, roots, start) if other else {})
    if settings.against and "costs" in found:  # pages of lines, which only the comparison needs
        del found["program"]["lines"], found["costs"]["by_line"], found["results"]
    say(json.dumps(found) if settings.output == "json" else as_text(found))
    if found["verdict"] == "rejected":
        raise Rejected(1)


@dataclass
class CheckedConfig(Config):
    """All settings of a run, and the section `check`."""

    check: CheckConfig = field(default_factory=CheckConfig)


if __name__ == "__main__":
    # The source that is compared has no links, so that a module below a link is found there too,
    # and by the same path.
    sys.path[:] = [
        path if is_installed(f"{path}/") else os.path.realpath(path) for path in sys.path
    ]
    try:
        start_with_section("check", CheckedConfig, job, __doc__ or "")
    except Rejected:
        raise
    except Exception as error:  # of a module that cannot be imported, before the settings are known
        broken = {"checks": [], **rejection(error)}
        say(json.dumps(broken) if "check.output=json" in sys.argv else as_text(broken))
        sys.exit(1)
    except SystemExit as end:  # a wrong setting
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        sys.exit(UNCHECKED if end.code else 0)
