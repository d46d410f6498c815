"""The op for code that is per-device on purpose, and has a result that is right on every mesh."""

import jax

from shardlib import marks
from shardlib.op_checks import check_operand, checked_op, require_shard_map
from shardlib.parsing import ShardError, parse_shape, spec_text
from shardlib.values import is_opaque, on_mesh


def per_device(spec, fn, *args, reason: str):
    """fn(*args), whose code differs between devices on purpose; the results are taken to be as `spec` says.

    The check of the step does not look into `fn`: a ring, a halo, the slots of a mixture of experts, noise of its own
    on each device. Gradients of the arguments are taken to have the types of the arguments.

    Args:
        spec: the type of the result, `B/r/d L/t M`; of a tuple, the types with commas between.
        fn: a function of arrays and pytrees of arrays.
        *args: its arguments.
        reason: why the result is right on every mesh. Each use has its own.
    """
    with checked_op("per_device", spec):
        require_shard_map()
        shapes = [on_mesh(parse_shape(text)) for text in spec_text(spec).split(",")]
        if not reason or "|" in reason:
            raise ShardError(f"the reason is {reason!r}", "say in words why the result is right on every mesh")
    leaves, structure = jax.tree.flatten(args)
    entered = [marks.enter(x, f"{reason} [{i}]") for i, x in enumerate(leaves)]
    results = marks.region(lambda leaves: fn(*structure.unflatten(leaves)), entered)
    flat, structure = jax.tree.flatten(results, is_leaf=is_opaque)
    with checked_op("per_device", spec, *flat) as sizes:
        if len(flat) != len(shapes):
            raise ShardError(f"the spec has {len(shapes)} types, the function {len(flat)} results", "give one for each")
        for i, (shape, x) in enumerate(zip(shapes, flat, strict=True), 1):
            check_operand(i, shape, x, sizes)
    leave = lambda shape, x: jax.tree.map(lambda array: marks.leave(array, reason, str(shape)), x)
    return structure.unflatten(map(leave, shapes, flat))
