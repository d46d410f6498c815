"""The plan of a run, of its configuration alone."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardlib.parsing import PIPELINE_AXIS
from shardwright.modeling.attention import planned
from shardwright.modeling.model import LanguageModel, inputs_of
from shardwright.plan.step import Facts, Step, mesh_for, step_of
from shardwright.run.config import Config, check_divides
from shardwright.run.flops import flops_of_model
from shardwright.run.stages import training_table
from shardwright_data.loader import batch_shapes


def planned_step(c: Config, model: LanguageModel, sizes: Mapping[str, int], chip: Any, programs: Callable) -> Step:
    """The training step of a configuration on a mesh of chips, traced. No devices are used.

    Args:
        c: the configuration. Its section mesh is not read.
        model: the model that c.model describes.
        sizes: number of devices along p, r, d and t, in that order.
        chip: the kind of the devices.
        programs: train.programs.

    Raises:
        ValueError: the mesh does not divide the sizes of the model or of the batch, or the step is refused.
    """
    t = c.training
    check_divides(c, sizes)
    with jax.sharding.use_abstract_mesh(mesh_for(sizes, chip.platform, chip.kinds[0])), planned():
        table = training_table(c, model) if sizes[PIPELINE_AXIS] > 1 else None
        batch = batch_shapes(t.batch_size, t.seq_len, t.microbatches, len(inputs_of(model)))
        traced = programs(c, model, batch, which="training")["training"]
    flops = flops_of_model(model.table, c.model, t.seq_len)
    facts = Facts(t.batch_size * t.seq_len, flops, t.compute_dtype, c.model.layers, t.microbatches)
    return step_of(traced, sizes, facts, table)
