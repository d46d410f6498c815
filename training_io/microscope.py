"""The microscope of a run: statistics of its step, every training.microscope_interval steps."""

from collections.abc import Callable
from typing import Any

import jax

from cluster.watch import pause
from input_loader import TokenBatch, batch_shapes
from microscope.look import Look, worst
from modeling.model import inputs_of
from shardlib.placement import Placement
from shardlib.shardtypes import Array, make_shardings
from training_io.config import Config, check_divides
from training_io.stages import folded_mesh, without_stages

MATTERS = 0.1
"""Share of the non-zero entries of a value that its format rounds to zero, from which the terminal tells it."""


class Microscope:
    """Looks at the steps of a run, and leaves them as they are. With pipeline stages it looks at the step without them.

    Args:
        c: configuration of the run.
        model: the model.
        placement: of its layers.
        programs: train.programs.
        options: compiler options.

    Raises:
        ValueError: with stages, a batch that the devices without them do not divide.
    """

    def __init__(self, c: Config, model: Any, placement: Placement, programs: Callable, options: dict[str, Any]):
        self._c, self._placement, self._mesh = c, placement, folded_mesh(c)
        try:
            check_divides(c, self._mesh.shape)
        except ValueError as error:
            raise ValueError(f"the microscope looks at a step without stages, whose devices d takes: {error}") from None
        t = c.training
        with jax.set_mesh(self._mesh):
            batch = batch_shapes(t.batch_size, t.seq_len, t.microbatches, len(inputs_of(model)))
            program = programs(c, model, batch)["training"].jaxpr
        self._look = Look(program, model.table)
        self._program = jax.jit(self._look, compiler_options=options)
        self._known = False

    def look(
        self, state: Any, batch: TokenBatch, step: Any, tell: Callable[[str], Any] = lambda line: None
    ) -> Callable[[], dict[str, Any]]:
        """Looks at the step that begins with `state`. Returns a function that waits for the statistics and gives them.

        They are as Look.described says. The function tells a line of the worst of them, if it matters.
        """
        state = without_stages(state, self._placement, self._mesh)
        with jax.set_mesh(self._mesh):
            batch = jax.tree.map(jax.device_put, batch, make_shardings(Array["m", TokenBatch], like=batch))
            if self._known:
                found = self._program(state, batch, step)
            else:
                with pause("compiling the microscope"):
                    found = self._program(state, batch, step)
                self._known = True
        jax.tree.map(lambda x: x.copy_to_host_async(), found)

        def described() -> dict[str, Any]:
            statistics = self._look.described(found)
            if told := self.told(statistics):
                tell(f"microscope step {step}: {told}")
            return statistics

        return described

    def told(self, described: dict[str, Any]) -> str | None:
        """A sentence on the value of which most is rounded to zero, if it is much. None: nothing to tell."""
        t = self._c.training
        which, name = ("fp8", "FP8") if t.fp8 else ("bf16", "bf16")
        share, what = worst(described, which)
        return f"{name} rounds {share:.0%} of {what}, to zero" if share >= MATTERS else None
