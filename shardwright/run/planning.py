"""The plan of a run, of its configuration alone."""

import math
from collections.abc import Callable, Mapping

import jax

from shardlib.parsing import PIPELINE_AXIS
from shardwright.modeling.model import LanguageModel, inputs_of
from shardwright.modeling.planned_attention import planned
from shardwright.plan.chips import Chip
from shardwright.plan.step import Facts, Step, mesh_for, step_of
from shardwright.run.config import Config, check_divides
from shardwright.run.flops import flops_of_model
from shardwright.run.stages import training_table
from shardwright_data.loader import batch_shapes


def mesh_sizes(c: Config, devices: int | None) -> dict[str, int]:
    """Devices along p, r, d and t of the configuration's mesh. None: as many as the mesh states.

    Raises ValueError if the mesh does not have that many, or says -1 where no number of devices is given.
    """
    sizes = {axis: getattr(c.mesh, axis) for axis in ("p", "r", "d", "t")}
    left = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if left and devices is None:
        raise ValueError(f"mesh.{left[0]} is -1, for the devices that are left: give plan.devices=<number of devices>.")
    if len(left) > 1 or (devices is not None and (devices % known if left else devices != known)):
        shown = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"plan.devices is {devices}, and the mesh is {shown}. Give mesh.r, mesh.d or mesh.t to match.")
    return sizes | dict.fromkeys(left, (devices or known) // known)


def planned_step(c: Config, model: LanguageModel, sizes: Mapping[str, int], chip: Chip, programs: Callable) -> Step:
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
    return step_of(traced, sizes, chip.platform, facts, table)
