"""Replays a step of a run: its batch and documents, its statistics; what makes a spike; how two runs differ.

    python -m tools.replay run=runs/<name> step=123
    python -m tools.replay run=runs/<name> step=123 mesh.d=4 mesh.t=2
    python -m tools.replay run=runs/<name> step=123 bisect=loss
    python -m tools.replay run=runs/<name> against=runs/<other>

The run goes on from its last checkpoint at or before the step, with the same batches, without writing anything. On the
run's own mesh the step is equal to the bit. docs/replay.md has examples.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import MISSING
from rich.console import Console

import train
from configuration.checks import at_least_1, check_choice, within
from configuration.program import run_program
from tools.replay import show
from tools.replay.documents import codec_of, documents_of, on_host, token_losses, with_losses
from tools.replay.session import Done, Session, logged, metrics_of, opened
from training_io.microscope import Microscope
from training_io.opening import StagesChoice


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


def to_step(session: Session, step: int, logs: dict[int, dict], screen: show.Screen) -> None:
    """Does the steps before `step`. Says at which the replay first differs from the run's log, if it does."""
    if session.step < step:
        screen.line(f"replaying   steps {session.step} to {step - 1}")
    told = not session.is_own_mesh  # there it does
    while session.step < step:
        number, done = session.step, session.advance()
        if not told and (differs := compare(done, logs.get(number), "")):
            told = True
            screen.line(f"step {number}  {differs}")


def compare(done: Done, record: dict[str, Any] | None, where: str) -> str | None:
    """How a replayed step differs from the log, `where` it was done; "" if it is equal to the bit; None: not logged."""
    if record is None:
        return None
    pairs = {name: (getattr(done, name), logged(record, name)) for name in ("loss", "grad_norm")}
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
    logs = metrics_of(config.run)
    if config.step is not None and logs and config.step > max(logs):
        raise ValueError(
            f"step is {config.step}; {config.run} has done the steps 0 to {max(logs)}. Choose one of them."
        )
    with opened(config.run, config.step, config.mesh, config.trust, config.other_source, screen.line) as session:
        screen.line(f"checkpoint  of step {session.step} of {config.run}")
        to_step(session, config.step, logs, screen)
        return step_of(session, config, logs, screen)


def step_of(session: Session, config: Config, logs: dict[int, dict], screen: show.Screen) -> dict[str, Any]:
    """Shows the documents of the step, and what it computes."""
    batch = session.batch()
    host = on_host(batch)
    documents = with_losses(documents_of(session, host), token_losses(session, batch), host.loss_mask)
    screen.documents(session, documents, codec_of(session), config.documents, config.characters)
    found = {}
    if config.microscope:
        microscope = Microscope(session.c, session.model, session.placement, train.programs, session.options)
        found = microscope.look(session.state, batch, np.int32(session.step))()
        screen.statistics(found)
    _, done = session.try_step(batch)
    differs = compare(done, logs.get(config.step), "" if session.is_own_mesh else " on this other mesh")
    screen.verdict(config.step, done, differs)
    return {
        "step": config.step,
        "loss": float(done.loss),
        "grad_norm": float(done.grad_norm),
        "skipped": done.skipped,
        "is_equal": None if differs is None else not differs,
        "documents": [show.described(document) for document in documents],
        "microscope": found,
    }


def run(config: Config) -> None:
    """Replays, and writes the result to `out`."""
    if config.bisect is not None:
        check_choice("bisect", config.bisect, ("loss", "grad_norm"))
    result = replay(config)
    if config.out is not None:
        Path(config.out).write_text(json.dumps(result, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_program("replay", Config, run)
