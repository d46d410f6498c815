"""Finds the origin of a NaN or infinity in a step: line, tensor, layer and microbatch."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shardwright.data.loader import TokenBatch
from shardwright.inspect.statistics.origin import Finder, Origin
from shardwright.modeling.weights import stacks_of
from shardwright.program.checkpoint import named_leaves
from shardwright.tools.replay.session import Session

METRICS = 2
"""Number of the metrics to check, the first of train.Metrics: loss and gradient norm."""


def in_state(state: Any) -> Iterator[str]:
    """Describes each array of a state (without stages) that is not finite: its name, layer and
    entry.
    """
    for name, x in named_leaves(state).items():
        bad = ~np.isfinite(np.asarray(x))
        if not bad.any():
            continue
        first = np.argwhere(bad)[0].tolist()
        kind = "NaN" if np.isnan(np.asarray(x)[tuple(first)]) else "an infinity"
        parts = name.split("/")
        of_layer = (
            f", layer {first.pop(0)}" if {*parts[:-1]} & {*stacks_of(type(state.weights))} else ""
        )
        yield (
            f"{name}{of_layer}, entry {first}: {kind} ({int(bad.sum()):,} of {bad.size:,} "
            "entries are not finite)"
        )


class Explainer:
    """Explains why steps of a session are not finite.

    With pipeline stages, it runs on the mesh without them.
    """

    def __init__(self, session: Session):
        self._session = session
        self._step = session.without_stages()
        with jax.set_mesh(self._step.mesh):
            state = jax.tree.leaves(session.traced.state)
            self._finder = Finder(self._step.program, session.model.table, len(state) + METRICS)

    def explain(self, state: Any, batch: TokenBatch) -> list[str]:
        """Returns lines on why the step from this state, or its new state, is not finite; none if
        both are finite.
        """
        step = np.int32(self._session.step)
        if found := list(in_state(self._step.state(state))):
            return [f"before the step, {line}" for line in found]
        with self._step.arguments(state, batch, step, *self._session.arguments) as arguments:
            origin, after = self._finder.find(*arguments)
            lines = [] if origin is None else [_describe(origin)]
            after = jax.tree.unflatten(jax.tree.structure(state), after[:-METRICS])
            return [*lines, *(f"after the step, {line}" for line in in_state(after))]


def _describe(origin: Origin) -> str:
    layers = "" if origin.layers is None else f", layer {origin.layers[0]}"
    if origin.layers is not None and origin.layers[0] != origin.layers[1]:
        layers = f", one of the layers {origin.layers[0]} to {origin.layers[1]}"
    microbatch = "" if origin.microbatch is None else f", microbatch {origin.microbatch}"
    backward = ", in the backward pass" if origin.is_backward else ""
    where = f"{origin.place}, {origin.name}{layers}{microbatch}{backward} ({origin.operation})"
    return f"{origin.kind} is first computed at {where}"
