"""Replays a step of a run: shows its documents, and what caused a spike or a NaN.

    python -m tools.replay run=runs/<name> step=123
    python -m tools.replay run=runs/<name> step=123 mesh.d=4 mesh.t=2

Starts from the last checkpoint at or before the step, reads the same batches, and writes nothing to
the run. On the run's own mesh the step is bit-identical. docs/replay.md has examples.
"""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from omegaconf import MISSING
from rich.console import Console

from shardwright.data.checks import a_path
from shardwright.program.files import write_whole
from shardwright.program.mesh_choice import StagesChoice
from shardwright.program.skipping import are_finite
from shardwright.settings.program import run_program
from shardwright.tools.replay import show
from shardwright.tools.replay.documents import (
    documents_of,
    on_host,
    token_losses,
    tokenizer_of,
    with_losses,
)
from shardwright.tools.replay.nonfinite import Explainer
from shardwright.tools.replay.session import Done, Session, logged, metrics_of, opened
from shardwright.tools.report.screen import print_line


@dataclass
class Settings:
    """Settings of the program."""

    run: str = a_path(MISSING)
    """Directory of a run."""
    step: int = MISSING
    """Number of the step, from 1, as in metrics.jsonl and in what the run prints."""
    mesh: StagesChoice = field(default_factory=StagesChoice)
    """Devices along p, r, d, e, c and t; -1 for one of them except p: all remaining. Null: the
    run's mesh."""
    other_source: bool = False
    """Allows source that computes something else than the checkpoint's source did."""
    trust: bool = False
    """Allows what the run names: imports its own modules, fetches data from other hosts, and reads
    weights of other runs. If the run is not yours, read its config.yaml first."""
    out: str | None = a_path(None)
    """File for the result, a JSON object."""


def compare_with_log(done: Done, record: dict[str, Any] | None) -> str | None:
    """Describes how a replayed step differs from the log; "" if it is bit-identical; None if it was
    not logged.
    """
    found = []
    is_logged = False
    for name, x in (("loss", done.loss), ("grad_norm", done.grad_norm)):
        y = logged(record or {}, name)
        is_logged |= y is not None
        if y is not None and x != y and not (np.isnan(x) and np.isnan(y)):
            found.append(f"{name} {abs(x / y - 1):.1g} from the {y:.7g} that the run logged")
    return ("differs: " * bool(found) + ", ".join(found)) if is_logged else None


def replay(config: Settings, console: Console | None = None) -> dict[str, Any]:
    """Replays, prints and returns the result.

    Raises:
        ValueError: as tools.replay.session.opened; or there is no such step.
    """
    console = console or Console()
    write = functools.partial(print_line, console)
    number = config.step
    logs = metrics_of(config.run)
    last = max(logs, default=2**31)
    if not 1 <= number <= last:
        raise ValueError(
            f"step is {number}; {config.run} has steps 1 to {last}. Choose one of these."
        )
    with opened(
        config.run, number - 1, config.mesh, config.trust, config.other_source, write
    ) as session:
        origin = f"its checkpoint of step {session.step}" if session.step else "its beginning"
        print_line(console, f"run         {config.run}, from {origin}")
        while session.step < number - 1:
            session.advance()
        return step_of(session, logs, console)


def step_of(session: Session, logs: dict[int, dict], console: Console) -> dict[str, Any]:
    """Shows the documents of the step, and the origin of a NaN or infinity, if there is one."""
    step = session.step + 1
    batch = session.batch()
    host, tokenizer = on_host(batch), tokenizer_of(session)
    every = documents_of(session, host)
    documents = with_losses(every, token_losses(session, batch), host.loss_mask)
    instead = f", batch {session.number}" * (session.number != session.step)
    show.documents(
        console, f"Documents of step {step}{instead}, highest loss first", documents, tokenizer
    )
    after, done = session.try_step(batch)
    differs = compare_with_log(done, logs.get(step))
    what = "not in metrics.jsonl" if differs is None else differs or "bit-identical"
    skipped = ", skipped" * done.skipped
    print_line(
        console,
        f"step {step}  loss {done.loss:.7g}  grad_norm {done.grad_norm:.7g}{skipped}  {what}",
    )
    why = []
    if not (
        np.isfinite(done.loss + done.grad_norm)
        and all(map(bool, jax.tree.leaves(are_finite(after))))
    ):
        why = Explainer(session).explain(session.state, batch)
        for line in why or ["no single operation that the replay sees produced it"]:
            print_line(console, f"not finite  {line}")
    return {
        "step": step,
        **plain(done),
        "is_equal": None if differs is None else not differs,
        "not_finite": why,
        "documents": [show.described(document) for document in documents],
    }


def plain(done: Done) -> dict[str, Any]:
    """Returns what a step computed, for JSON; numbers that are not finite become strings."""
    return {
        "loss": show.for_json(done.loss),
        "grad_norm": show.for_json(done.grad_norm),
        "skipped": done.skipped,
    }


def run(config: Settings) -> None:
    """Replays a step, and writes the result to `out`."""
    found = replay(config)
    if config.out:
        write_whole(Path(config.out), json.dumps(found, default=str, allow_nan=False) + "\n")


if __name__ == "__main__":
    run_program("replay", Settings, run)
