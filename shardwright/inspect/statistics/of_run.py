"""Statistics of a run's step, every training.microscope_interval steps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from shardlib.placement import LayerPlacement
from shardlib.shardtypes import Array, make_shardings
from shardwright.cluster.watch import pause
from shardwright.data.loader import TokenBatch
from shardwright.inspect.statistics.collect import Statistics
from shardwright.run.config import check_divides
from shardwright.run.stages import folded_mesh, without_stages
from shardwright.run.step import Step


class StepWithoutStages:
    """The training step on the current mesh without its pipeline stages, traced, for computing statistics.

    Args:
        step: the run's step.
        placement: placement of its layers.

    Attributes:
        mesh: the mesh without stages.
        program: the traced step, a ClosedJaxpr.

    Raises:
        ValueError: with stages, if the devices without stages do not divide the batch.
    """

    def __init__(self, step: Step, placement: LayerPlacement):
        step = step.other(mesh=folded_mesh(step.config))
        self.mesh = step.mesh
        self._placement = placement
        check_divides(step.config, self.mesh.shape)
        self.program = step.jaxpr

    @contextlib.contextmanager
    def arguments(self, state: Any, batch: TokenBatch, step: object, *reference: object) -> Iterator[tuple[Any, ...]]:
        """Converts arguments of the step to the mesh without stages, which is the current mesh inside this context."""
        state = self.state(state)
        reference = tuple(map(self.state, reference))
        with jax.set_mesh(self.mesh):
            batch = jax.tree.map(jax.device_put, batch, make_shardings(Array["m", TokenBatch], like=batch))
            yield state, batch, step, *reference

    def state(self, state: object) -> Any:
        """Converts a state of the current mesh to the one without stages, with layers in order."""
        return without_stages(state, self._placement, self.mesh)


class RunStatistics:
    """Statistics of the steps of a run, which do not change. With pipeline stages, of the step without them.

    Args:
        step, placement: as in StepWithoutStages.
        options: compiler options.

    Raises:
        ValueError: as in StepWithoutStages.
    """

    def __init__(self, step: Step, placement: LayerPlacement, options: dict[str, Any]):
        self._step = StepWithoutStages(step, placement)
        self._statistics = Statistics(self._step.program, step.model.table)
        self._program = jax.jit(self._statistics, compiler_options=options)

    @pause("computing statistics of a step")
    def collect(self, *arguments: Any) -> dict[str, Any]:
        """Returns statistics of the step for these arguments, as in Statistics.described. Waits for the devices."""
        with self._step.arguments(*arguments) as arguments:
            return self._statistics.described(jax.device_get(self._program(*arguments)))
