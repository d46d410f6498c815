"""Replays a step of a run: its batch and documents, its statistics; what makes a spike; how two runs differ.

    python -m tools.replay run=runs/<name> step=123
    python -m tools.replay run=runs/<name> step=123 mesh.d=4 mesh.t=2
    python -m tools.replay run=runs/<name> step=123 bisect=loss
    python -m tools.replay run=runs/<name> against=runs/<other>

The run goes on from its last checkpoint at or before the step, with the same batches, without writing anything. On the
run's own mesh the step is equal to the bit. docs/replay.md has examples.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from omegaconf import MISSING
from rich.console import Console

import train
from shardwright.run.microscope import Microscope
from shardwright.run.opening import StagesChoice
from shardwright.run.provenance import ROOT
from shardwright.settings.program import run_program
from shardwright_data.checks import at_least_1, check_choice, within
from tools.replay import bisect, difference, show
from tools.replay.documents import Document, codec_of, documents_of, on_host, token_losses, with_losses
from tools.replay.nonfinite import Explainer, is_finite
from tools.replay.session import Done, Session, common_checkpoint, logged, metrics_of, opened
from tools.replay.sources import rebuilt


@dataclass
class Config:
    """Settings of the program."""

    run: str = MISSING
    """Directory of a run."""
    step: int | None = within(0, 2**31, None)
    """The step, counted from 0, as in metrics.jsonl and as the run tells it."""
    bisect: str | None = None
    """Finds the documents that make the step's `loss`, or its `grad_norm`, jump."""
    against: str | None = None
    """Directory of another run: shows the first step and the first tensor in which both differ."""
    mesh: StagesChoice = field(default_factory=StagesChoice)
    """Devices along p, r, d and t; -1 for d, r or t: all that are left. Null: the mesh of the run."""
    documents: int = at_least_1(10)
    """Number of documents to show, at least 1."""
    characters: int = at_least_1(160)
    """Most characters of a document to show, at least 1."""
    microscope: bool = True
    """Whether to show statistics of the step."""
    other_source: bool = False
    """Allows source that computes something else than the source that made the checkpoint."""
    trust: bool = False
    """Imports the modules that the run names beside those shipped here, and fetches the data and weights that it names
    on servers. For a run that is not yours, read its config.yaml first."""
    out: str | None = None
    """A file for the result: a JSON object."""
    since: int | None = within(0, 2**31, None)
    """Writes fingerprints of what the steps from here to `step` compute to `out`, which against= compares."""


def to_step(session: Session, step: int, logs: dict[int, dict], screen: show.Screen) -> None:
    """Does the steps before `step`, but stops before one that makes the state not finite, and says so.

    Says at which step the replay first differs from the run's log, if it does.
    """
    if session.step < step:
        screen.line(f"replaying   steps {session.step} to {step - 1}")
    told = not session.is_own_mesh  # there it does
    while session.step < step:
        number, before, done = session.step, session.state, session.advance()
        if not told and (differs := compare(done, logs.get(number), "")):
            told = True
            screen.line(f"step {number}  {differs}")
        if not is_finite(session.state):
            screen.line(f"step {number} makes the state not finite: this is the step that is shown")
            session.step, session.state = number, before
            return


def compare(done: Done, record: dict[str, Any] | None, where: str) -> str | None:
    """How a replayed step differs from the log, `where` it was done; "" if it is equal to the bit; None: not logged."""
    pairs = {name: (getattr(done, name), logged(record or {}, name)) for name in ("loss", "grad_norm")}
    if all(y is None for _, y in pairs.values()):
        return None
    differing = [
        f"{name} {abs(x / y - 1):.1g} from the {y:.7g} that the run logged"
        for name, (x, y) in pairs.items()
        if y is not None and x != y and not (np.isnan(x) and np.isnan(y))
    ]
    return f"differs{where}: {', '.join(differing)}" if differing else ""


def replay(config: Config, console: Console | None = None) -> dict[str, Any]:
    """Replays, prints and returns the result.

    Raises:
        ValueError: as tools.replay.session.opened; or there is no such step; or settings that do not go together.
    """
    screen = show.Screen(console or Console())
    if config.step is None and config.against is None:
        raise ValueError("give step=<step>, of which metrics.jsonl has the loss; or against=<another run>.")
    if config.since is not None:
        return record(config, screen)
    if config.against is not None:
        return compare_runs(config, screen)
    logs = metrics_of(config.run)
    if logs and config.step > max(logs):
        raise ValueError(
            f"step is {config.step}; {config.run} has done the steps 0 to {max(logs)}. Choose one of them."
        )
    with opened(config.run, config.step, config.mesh, config.trust, config.other_source, screen.line) as session:
        origin = f"its checkpoint of step {session.step}" if session.step else "its beginning"
        screen.line(f"run         {config.run}, from {origin}")
        to_step(session, config.step, logs, screen)
        return step_of(session, config, logs, screen)


def step_of(session: Session, config: Config, logs: dict[int, dict], screen: show.Screen) -> dict[str, Any]:
    """Shows the documents of the step, what it computes, and why it is not finite, if it is not."""
    step, batch = session.step, session.batch()
    host, codec = on_host(batch), codec_of(session)
    every = documents_of(session, host)
    documents = with_losses(every, token_losses(session, batch), host.loss_mask)
    show_documents = lambda title, found: screen.documents(title, found, codec, config.documents, config.characters)
    if config.bisect is not None:
        usual = bisect.usual(logs, step, config.bisect)
        return bisected(session, config.bisect, usual, documents, screen, show_documents)
    instead = f", batch {session.number}" * (session.number != step)
    show_documents(f"Documents of step {step}{instead}, the worst first", documents)
    found = {}
    if config.microscope:
        microscope = Microscope(session.c, session.model, session.placement, train.programs, session.options)
        found = microscope.look(session.state, batch, np.int32(step))
        screen.statistics(found)
    after, done = session.try_step(batch)
    differs = compare(done, logs.get(step), "" if session.is_own_mesh else " on this other mesh")
    screen.verdict(step, done, differs)
    why = []
    if not (np.isfinite(done.loss + done.grad_norm) and is_finite(after)):
        why = Explainer(session).explain(session.state, batch, every)
        for line in why or ["what is not finite there is in no single operation that a replay sees"]:
            screen.line(f"not finite  {line}")
    return {
        "step": step,
        **plain(done),
        "is_equal": None if differs is None else not differs,
        "not_finite": why,
        "documents": [show.described(document) for document in documents],
        "microscope": found,
    }


def plain(done: Done) -> dict[str, Any]:
    """What a step computed, for JSON, in which what is not finite is a string."""
    numbers = {"loss": show.for_json(done.loss), "grad_norm": show.for_json(done.grad_norm)}
    return numbers | {"skipped": bool(done.skipped)}


def bisected(
    session: Session,
    metric: str,
    usual: float,
    documents: list[Document],
    screen: show.Screen,
    show_documents: Callable,
) -> dict[str, Any]:
    """Shows the documents that make the metric of the step jump from its usual value."""
    screen.line(f"usually     {metric} {usual:.5g}, the median of the {bisect.BEFORE} steps before step {session.step}")
    found = bisect.find(session, session.batch(), documents, metric, usual, screen.line)
    numbers = lambda done: f"loss {done.loss:.5g}, grad_norm {done.grad_norm:.5g}"
    if found.after is None:
        value = getattr(found.before, metric)
        jumped = f"no half of its documents makes that, from a usual {metric} of {usual:.5g}"
        why = f"{metric} did not jump" if value <= usual else jumped
        screen.line(f"step {session.step}  {numbers(found.before)}: {why}")
    else:
        count = len(found.documents)
        which = "document makes" if count == 1 else "documents together make"
        show_documents(f"{count} {which} the {metric} of step {session.step} jump", found.documents)
        screen.line(f"step {session.step}  {numbers(found.before)}; without: {numbers(found.after)}")
    both = {"before": plain(found.before), "after": found.after and plain(found.after)}
    return {"step": session.step, **both, "documents": [show.described(document) for document in found.documents]}


def compare_runs(config: Config, screen: show.Screen) -> dict[str, Any]:
    """Shows the settings in which two runs differ, and the first step and tensor.

    Each is replayed by its own source, in a process of its own, both on one mesh.
    """
    runs = config.run, config.against
    of_a_step = [name for name in ("bisect", "documents", "characters", "microscope") if given(config, name)]
    if of_a_step:
        raise ValueError(f"against= compares two runs, and {of_a_step[0]}= is for one step of one; give one of them.")
    settings, sources = difference.settings(*runs), difference.sources(*runs)
    for line in settings or ["none differs"]:
        screen.line(f"settings    {line}")
    for line in sources:
        screen.line(f"source      {line}")
    step, common = difference.first_step(*runs)
    if config.step is not None and config.step >= common:
        raise ValueError(f"step is {config.step}; both runs have done the steps 0 to {common - 1}. Choose one of them.")
    if step is None and config.step is None:
        screen.line(f"metrics     equal to the bit in all {common} steps that both runs logged")
        return {"settings": settings, "sources": sources, "step": None, "first": None}
    if config.step is None:
        screen.line(f"metrics     differ first in step {step}")
    last, mesh = step if config.step is None else config.step, config.mesh
    # Before the step at which the metrics differ: the update of an earlier one may have made the difference.
    start = common_checkpoint(*runs, max(last - 1, 0))
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for i, run in enumerate(runs):
            root = rebuilt(run, last, Path(directory) / f"source of {i}", config.trust)
            by = ", by the source that it kept" * (root != ROOT)
            screen.line(f"replaying   {run} from step {start} to {last}{by}")
            steps, mesh = recorded_by(root, run, start, last, mesh, config, Path(directory) / f"{i}.json")
            found.append(steps)
    first = difference.compared(*found)
    if first is None:
        why = "" if step is None or step > last else ": the mesh made the difference, or packages, or hardware"
        screen.line(f"tensors     equal to the bit to step {last}, each by its own source, on one mesh{why}")
    else:
        screen.line(f"tensors     in step {first[0]} the first that differs is {first[1]}")
    return {"settings": settings, "sources": sources, "step": step, "first": first}


def recorded_by(
    root: Path, run: str, start: int, last: int, mesh: StagesChoice, config: Config, out: Path
) -> tuple[dict[int, list[difference.Value]], StagesChoice]:
    """The fingerprints of the steps from `start` to `last`, and the mesh, by another process with the source in `root`.

    Raises:
        ValueError: that process failed, with its last line.
    """
    settings = {"run": str(Path(run).absolute()), "step": last, "since": start, "out": str(out)}
    settings |= {"trust": config.trust, "other_source": config.other_source}
    settings |= {f"mesh.{axis}": size for axis, size in dataclasses.asdict(mesh).items() if size is not None}
    # -P: not what is in the working directory, from which the paths of the run's data are meant.
    command = [sys.executable, "-P", "-m", "tools.replay", *(f"{name}={json.dumps(x)}" for name, x in settings.items())]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ValueError(f"{run} cannot be replayed by its source: {why}")
    recorded = json.loads(out.read_text())
    line = lambda place: place.removeprefix(f"{root}/")
    values = lambda of: [(name, line(place), np.array(numbers, np.uint32)) for name, place, numbers in of]
    return {int(step): values(of) for step, of in recorded["steps"].items()}, StagesChoice(**recorded["mesh"])


def record(config: Config, screen: show.Screen) -> dict[str, Any]:
    """The fingerprints of the steps from config.since to config.step, as JSON."""
    with opened(config.run, config.since, config.mesh, config.trust, config.other_source, screen.line) as session:
        if session.step != config.since:
            raise ValueError(f"there is no checkpoint of step {config.since}, only of {session.step}.")
        steps = difference.recorded(session, config.step)
        sizes = jax.sharding.get_mesh().shape
    plain = lambda of: [(name, place, x.reshape(-1).tolist()) for name, place, x in of]
    mesh = {"p": sizes.get("p", 1), "r": sizes["r"], "d": sizes["d"], "t": sizes["t"]}
    return {"mesh": mesh, "steps": {step: plain(of) for step, of in steps.items()}}


def given(config: Config, name: str) -> bool:
    """Whether a setting differs from its default."""
    return getattr(config, name) != getattr(Config(), name)


def run(config: Config) -> None:
    """Replays, and writes the result to `out`."""
    if config.bisect is not None:
        check_choice("bisect", config.bisect, ("loss", "grad_norm"))
    if config.out is None:
        replay(config)
        return
    out = Path(config.out)
    temporary = out.with_name(f"{out.name}.tmp")
    try:
        temporary.touch()  # before the work
    except OSError as error:
        raise ValueError(f"out is {out}, which cannot be written: {error.strerror}. Choose another file.") from error
    try:
        text = json.dumps(replay(config), default=str, allow_nan=False) + "\n"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    run_program("replay", Config, run)
