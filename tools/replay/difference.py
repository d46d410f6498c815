"""How two runs differ: their settings, their source, and the first tensor of the first step."""

import dataclasses
import difflib
import zlib
from pathlib import Path

import jax
import numpy as np

from shardwright.microscope.look import Look
from shardwright.microscope.statistics import bits
from shardwright.run.checkpoint_arrays import named_leaves
from shardwright.run.files import read_config
from shardwright.run.resuming import with_defaults
from shardwright.settings.differences import flat
from tools.replay.documents import on_host
from tools.replay.session import Session, logged, metrics_of

OF_A_RUN = ("paths.", "hardware.", "distributed.")
"""Beginnings of the names of settings that change nothing that a step computes."""


def settings(a: str, b: str) -> list[str]:
    """A line on each setting that differs."""
    of = [flat(with_defaults(read_config(Path(run) / "config.yaml"))) for run in (a, b)]
    word = lambda values, name: repr(values[name]) if name in values else "not there"
    return [
        f"{name}: {word(of[0], name)}, and {word(of[1], name)}"
        for name in sorted(of[0].keys() | of[1].keys())
        if not name.startswith(OF_A_RUN) and word(of[0], name) != word(of[1], name)
    ]


def sources(a: str, b: str) -> list[str]:
    """A line on each file of source that both runs kept when they were started last, and that differs."""
    kept = [sorted((Path(run) / "source").glob("*")) for run in (a, b)]
    if not all(kept):
        return []
    files = [{path.name: path for path in starts[-1].glob("*.py") if not path.is_symlink()} for starts in kept]
    found = []
    for name in sorted(files[0].keys() & files[1].keys()):
        texts = [of[name].read_text(errors="replace").splitlines() for of in files]
        changes = [x for x in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes() if x[0] != "equal"]
        if changes:
            _, first, last, other, other_last = changes[0]
            lines = [
                " ".join(text[i:j]).strip()
                for text, i, j in zip(texts, (first, other), (last, other_last), strict=True)
            ]
            found.append(
                f"{name}, {len(changes)} changes, the first in line {first + 1}: {lines[0]!r}, and {lines[1]!r}"
            )
    return found


def first_step(a: str, b: str) -> tuple[int | None, int]:
    """The first step that both runs logged with another loss or grad_norm, None without; and the steps in common."""
    logs = [metrics_of(run) for run in (a, b)]
    common = sorted(logs[0].keys() & logs[1].keys())
    for step in common:
        pairs = ([logged(log[step], name) for log in logs] for name in ("loss", "grad_norm"))
        if any(x is not None and y is not None and x.tobytes() != y.tobytes() for x, y in pairs):
            return step, len(common)
    return None, len(common)


Value = tuple[str, str, np.ndarray]
"""Name and place of a value, and numbers that are equal if the value is."""


class Fingerprints:
    """What a session's steps compute, value after value."""

    def __init__(self, session: Session):
        self._session, self._step = session, session.without_stages()
        self._look = Look(self._step.program, session.model.table, bits)
        self._program = jax.jit(self._look, compiler_options=session.options)

    def of_state(self) -> list[Value]:
        """Of the state before the step. The weights come first."""
        state = self._step.state(self._session.state)
        with jax.set_mesh(self._step.mesh):
            found = jax.jit(lambda state: jax.tree.map(bits, state))(state)
        return [(f"the state, {name}", "", np.asarray(x)) for name, x in named_leaves(found).items()]

    def of_step(self) -> list[Value]:
        """Of the batch, what the step saves, the gradients and the updates."""
        session, batch = self._session, self._session.batch()
        host = on_host(batch)
        names = [field.name for field in dataclasses.fields(host) if getattr(host, field.name) is not None]
        rows = lambda x: np.array([zlib.crc32(row.tobytes()) for row in x], np.uint32)
        of_batch = [(f"the batch, {name}", "", rows(getattr(host, name))) for name in names]
        with self._step.arguments(session.state, batch) as arguments:
            found = self._look.fingerprints(self._program(*arguments, np.int32(session.step)))
        return of_batch + found


def recorded(session: Session, last: int) -> dict[int, list[Value]]:
    """The fingerprints of the steps from the session's to `last`, with those of the state before the first of them."""
    prints = Fingerprints(session)
    found = {session.step: prints.of_state()}
    while session.step <= last:
        found.setdefault(session.step, []).extend(prints.of_step())
        if session.step == last:
            break
        session.advance()
    return found


def compared(a: dict[int, list[Value]], b: dict[int, list[Value]]) -> tuple[int, str] | None:
    """The first step with a value that differs, and words on the value; None if all are equal.

    A point keeps its name where its line moved. One that only one run has is named if no other value differs.
    """
    for step in sorted(a.keys() & b.keys()):
        theirs = {name: (place, x) for name, place, x in b[step]}
        for name, place, x in a[step]:
            where = f"{name}, {place}" if place else name
            if name not in theirs:
                continue
            other, y = theirs[name]
            if x.shape != y.shape:
                return step, f"{where}: of another shape in the other run"
            if (x != y).any():
                return step, where + f" ({other} in the other run)" * (other != place) + _where(name, x != y)
        for which, some, others in (("first", a[step], b[step]), ("other", b[step], a[step])):
            if alone := [f"{name}, {place}" for name, place, _ in some if name not in {n for n, *_ in others}]:
                return step, f"{alone[0]}: only in the {which} run"
    return None


def _where(name: str, differs: np.ndarray) -> str:
    """The first sequence of a batch, or layer of a weight, in which a value differs."""
    if differs.ndim != 1 or len(differs) == 1 or " in layer " in name:
        return ""
    return f", {'sequence' if name.startswith('the batch') else 'layer'} {int(np.flatnonzero(differs)[0])}"
