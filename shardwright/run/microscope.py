"""The microscope of a run: statistics of its step, every training.microscope_interval steps."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from shardlib.placement import LayerPlacement
from shardlib.shardtypes import Array, make_shardings
from shardwright.cluster.watch import pause
from shardwright.microscope.look import Look
from shardwright.modeling.model import inputs_of
from shardwright.run.config import Config, check_divides
from shardwright.run.stages import folded_mesh, without_stages
from shardwright_data.loader import TokenBatch, batch_shapes


class StepWithoutStages:
    """The training step on the current mesh without its pipeline stages, traced, to be looked at.

    Its microbatches come one after the other, also those that are side by side in the step.

    Args:
        c: configuration of the run.
        model: the model.
        placement: of its layers.
        programs: train.programs.

    Attributes:
        mesh: without stages.
        program: the traced step, a ClosedJaxpr.

    Raises:
        ValueError: with stages, a batch that the devices without them do not divide.
    """

    def __init__(self, c: Config, model: Any, placement: LayerPlacement, programs: Callable):
        t = dataclasses.replace(c.training, side_by_side=1)
        c, self.mesh, self._placement = dataclasses.replace(c, training=t), folded_mesh(c), placement
        check_divides(c, self.mesh.shape)
        with jax.set_mesh(self.mesh):
            batch = batch_shapes(t.batch_size, t.seq_len, t.microbatches, len(inputs_of(model)))
            self.program = programs(c, model, batch)["training"].jaxpr

    @contextlib.contextmanager
    def arguments(self, state: Any, batch: TokenBatch, step: Any, reference: Any = None) -> Iterator[tuple[Any, ...]]:
        """Arguments of the step on the current mesh, on that without stages, which is the current one meanwhile."""
        state, reference = self.state(state), None if reference is None else self.state(reference)
        with jax.set_mesh(self.mesh):
            batch = jax.tree.map(jax.device_put, batch, make_shardings(Array["m", TokenBatch], like=batch))
            yield state, batch, step, reference

    def state(self, state: Any) -> Any:
        """A state of the current mesh on that without stages, with layers in their order."""
        return without_stages(state, self._placement, self.mesh)


class Microscope:
    """Looks at the steps of a run, and leaves them as they are. With pipeline stages it looks at the step without them.

    Args:
        c, model, placement, programs: as of StepWithoutStages.
        options: compiler options.

    Raises:
        ValueError: as StepWithoutStages.
    """

    def __init__(self, c: Config, model: Any, placement: LayerPlacement, programs: Callable, options: dict[str, Any]):
        self._step = StepWithoutStages(c, model, placement, programs)
        self._look = Look(self._step.program, model.table)
        self._program = jax.jit(self._look, compiler_options=options)

    @pause("looking at a step with the microscope")
    def look(self, *arguments: Any) -> dict[str, Any]:
        """Statistics of the step with these arguments, as Look.described says. Waits for the devices."""
        with self._step.arguments(*arguments) as arguments:
            return self._look.described(jax.device_get(self._program(*arguments)))
