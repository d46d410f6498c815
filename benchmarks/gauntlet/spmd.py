"""The bugs of the Gauntlet as programs of torch under spmd_types, a type system for such programs.

    python -m benchmarks.gauntlet.spmd       runs them, and prints which are refused

It needs the packages spmd_types and torch, and no GPU.

A program is a function of `wrong`, which says whether it has the bug. It runs under `typecheck`, on a mesh of axes r, d
and t of two devices each, without devices. The type of a value says for each axis whether its devices hold the same
value (R: its gradient is a partial sum; I: its gradient is complete), blocks of a dim (S) or a partial sum (P). Inputs
have the types that a user of spmd_types would declare, and results are asserted to be what they should be. The checker
runs in its strict global mode, in which it follows which dim is sharded.
"""

import contextlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterator

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import I, P, R, S
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import init_device_mesh

AXES = ("r", "d", "t")
MESH: dict[str, object] = {}
"""The process group of each axis, while `mesh` is entered."""


@contextlib.contextmanager
def mesh() -> Iterator[None]:
    """Enters a mesh of eight devices that do not exist."""
    dist.init_process_group(backend="fake", rank=0, world_size=8)
    try:
        devices = init_device_mesh("cpu", (2,) * len(AXES), mesh_dim_names=AXES)
        MESH.update({axis: devices.get_group(axis) for axis in AXES})
        with spmd.set_current_mesh(devices), typecheck(strict_mode="strict", local=False):
            yield
    finally:
        dist.destroy_process_group()


def value(*shape: int, kind: object = R, **axes: object) -> torch.Tensor:
    """A tensor with blocks of this shape. `axes` has its type along an axis; along others it is `kind`."""
    x = torch.randn(shape, requires_grad=True)
    spmd.assert_type(x, dict.fromkeys(AXES, kind) | axes)
    return x


def total(x: torch.Tensor, *axes: str, to: object = R) -> torch.Tensor:
    """The sum of a partial sum over the devices of these axes."""
    for axis in axes:
        x = spmd.all_reduce(x, MESH[axis], dst=to)
    return x


def gathered(x: torch.Tensor, axis: str, dim: int, to: object = R) -> torch.Tensor:
    """All blocks of a dim."""
    return spmd.all_gather(x, MESH[axis], src=S(dim), dst=to)


def used(x: torch.Tensor, axis: str) -> torch.Tensor:
    """A value with a complete gradient, for use on each device with other values: the backward pass adds up."""
    return spmd.convert(x, MESH[axis], src=I, dst=R)


def check(x: torch.Tensor, **axes: object) -> None:
    """Asserts the type of a result."""
    spmd.assert_type(x, axes)


# ---- losses and counts --------------------------------------------------------------------------------------------


def local_mean(wrong: bool) -> None:
    """A mean over the tokens of a device, averaged over devices."""
    loss, mask = value(4, 6, d=S(0)), value(4, 6, d=S(0))
    part, count = (loss * mask).sum(), mask.sum()
    check(total(part / count / 2, "d") if wrong else total(part, "d") / total(count, "d"), d=R)


def local_mean_of_positions(wrong: bool) -> None:
    """The same over shards of positions."""
    loss, mask = value(4, 6, t=S(1)), value(4, 6, t=S(1))
    part, count = (loss * mask).sum(), mask.sum()
    check(total(part / count / 2, "t") if wrong else total(part, "t") / total(count, "t"), t=R)


def constant_factor(wrong: bool) -> None:
    """A factor of the number of devices, or of microbatches, too much."""
    part = value(4, d=S(0)).sum()
    check(total(part, "d") * (2 if wrong else 1), d=R)


def averaged_again(wrong: bool) -> None:
    """A sum that is divided by the count of all devices, and averaged."""
    part, count = value(4, d=S(0)).sum(), value(4, d=S(0)).sum()
    check(total(part / total(count, "d") / (2 if wrong else 1), "d"), d=R)


def microbatches(wrong: bool) -> None:
    """Microbatches that are each divided by their own count."""
    parts = [(value(4, d=S(0)).sum(), value(4, d=S(0)).sum()) for _ in range(2)]
    sums, counts = zip(*((total(a, "d"), total(b, "d")) for a, b in parts), strict=True)
    right = (sums[0] + sums[1]) / (counts[0] + counts[1])
    check((sums[0] / counts[0] + sums[1] / counts[1]) / 2 if wrong else right, d=R)


def overwritten(wrong: bool) -> None:
    """Gradients of a microbatch that overwrite those before it."""
    g = [value(4, d=P) for _ in range(2)]
    check(total(g[1] if wrong else g[0] + g[1], "d"), d=R)


def unreduced_metric(wrong: bool) -> None:
    """A part of a sum that is returned for the sum."""
    part = value(4, t=S(0)).sum()
    check(part if wrong else total(part, "t"), t=R)


def partly_reduced_metric(wrong: bool) -> None:
    """A sum over one of the two axes over which it differs."""
    part = value(4, 6, d=S(0), t=S(1)).sum()
    check(total(part, "t") if wrong else total(part, "t", "d"), d=R, t=R)


def reduced_twice(wrong: bool) -> None:
    """A complete value that is summed over devices that hold the same."""
    part = value(4, d=S(0)).sum()
    check(total(part, "d", "t") if wrong else total(part, "d"), d=R, t=R)


def local_size(wrong: bool) -> None:
    """A factor that is the size of a block."""
    x = value(4, 6, t=S(0))
    check(total(x.sum(), "t") * (x.shape[0] if wrong else 8), t=R)


def loss_of_whole(wrong: bool) -> None:
    """All devices compute the same loss of a gathered value, whose gradients the gather adds up."""
    x = gathered(value(4, 6, kind=I, t=S(0)), "t", 0, to=R if wrong else I)
    check((x * x).sum(), t=I)


def gradient_as_whole(wrong: bool) -> None:
    """A gradient that is still to be added up, used in an update."""
    w, g = value(4), value(4, d=P)
    check(w - (g if wrong else total(g, "d")), d=R)


def whole_in_place_of_shard(wrong: bool) -> None:
    """A batch that all devices have, in a step that adds up what each has of its own."""
    x = value(4) if wrong else value(4, d=S(0))
    check(total(x.sum(), "d"), d=R)


# ---- products and biases ------------------------------------------------------------------------------------------


def without_sum_of_gradient(wrong: bool) -> None:
    """A weight that all devices have meets blocks, and nothing says that its gradient is a sum."""
    x, gain = value(4, 6, t=S(0)), value(6, t=I)
    check(x * (gain if wrong else used(gain, "t")), t=S(0))


def without_sum_of_inputs_gradient(wrong: bool) -> None:
    """The same of the input of a product with blocks of a weight."""
    x, w = value(4, 6, t=I), value(6, 8, t=S(1))
    check(torch.matmul(x if wrong else used(x, "t"), w), t=S(1))


def bias_before_sum(wrong: bool) -> None:
    """A bias that is added to a partial sum."""
    y, bias = torch.matmul(value(4, 6, t=S(1)), value(6, 8, t=S(0))), value(8)
    check(total(y + bias, "t") if wrong else total(y, "t") + bias, t=R)


def share_of_bias_before_sum(wrong: bool) -> None:
    """A bias that is divided by the number of devices, and added to a partial sum."""
    y, bias = torch.matmul(value(4, 6, t=S(1)), value(6, 8, t=S(0))), value(8)
    check(total(y + bias / 2, "t") if wrong else total(y, "t") + bias, t=R)


def fused_bias(wrong: bool) -> None:
    """A product with a bias in it, before the sum."""
    x, w, bias = value(4, 6, t=S(1)), value(8, 6, t=S(1)), value(8)
    linear = torch.nn.functional.linear
    check(total(linear(x, w, bias), "t") if wrong else total(linear(x, w), "t") + bias, t=R)


def gathered_logits(wrong: bool) -> None:
    """Logits that are gathered go into a sum over their shards."""
    logits = value(4, 6, t=S(1))
    z = gathered(logits, "t", 1) if wrong else logits
    check(torch.log(total(torch.exp(z).sum(-1), "t")), t=R)


def other_group(wrong: bool) -> None:
    """A partial sum that is summed over another axis."""
    y = torch.matmul(value(4, 6, t=S(1)), value(6, 8, t=S(0)))
    check(total(y, "r" if wrong else "t"), t=R)


def cut_by_other_group(wrong: bool) -> None:
    """Each device keeps the positions of its place along another axis."""
    x = spmd.convert(value(8, 6), MESH["r" if wrong else "t"], src=R, dst=S(0))
    check(x, t=S(0), r=R)


def mask_of_other_group(wrong: bool) -> None:
    """A mask of the positions of another axis."""
    x, mask = value(4, 6, t=S(0)), value(4, 1, **{"r" if wrong else "t": S(0)})
    check(total((x * mask).sum(), "t"), t=R)


def sum_of_positions(wrong: bool) -> None:
    """A sum of what are different positions on each device."""
    x = value(4, 6, t=S(0)) if wrong else torch.matmul(value(8, 6, t=S(1)), value(6, 6, t=S(0)))
    check(spmd.reduce_scatter(x, MESH["t"], dst=S(0)), t=S(0))


def gather_that_cuts(wrong: bool) -> None:
    """A gather whose backward pass cuts this device's part out."""
    x, w = gathered(value(4, 6, t=S(0)), "t", 0, to=I if wrong else R), value(6, 8, t=S(1))
    check(torch.matmul(x, w), t=S(1))


@spmd.register_local_autograd_function
class _Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx, g):
        x, gain = ctx.saved_tensors
        return g * gain, (g * x).sum(0)


def fused_norm(wrong: bool) -> None:
    """A fused gain whose backward pass returns this device's part."""
    x, gain = value(4, 6, t=S(0)), value(6, t=I)
    with spmd.local():
        _Gain.apply(x, gain if wrong else used(gain, "t"))


def adapter_in_partial(wrong: bool) -> None:
    """A complete value that is added to a partial sum."""
    y, adapter = torch.matmul(value(4, 6, t=S(1)), value(6, 8, t=S(0))), value(4, 8)
    check(total(y + adapter, "t") if wrong else total(y, "t") + adapter, t=R)


def sum_of_blocks(wrong: bool) -> None:
    """A sum over the axis that shards a gradient."""
    g = value(4, 6, t=S(0)) if wrong else value(4, 6, t=P)
    check(total(g, "t"), t=R)


# ---- local operations along a sharded dim -------------------------------------------------------------------------


def balanced_by_shard(wrong: bool) -> None:
    """Columns are divided by their sums over the positions of a device."""
    x = value(4, 6, t=S(0))
    columns = x.sum(0, keepdim=True)
    check(x / (columns if wrong else total(columns, "t")), t=S(0))


def rolled_by_shard(wrong: bool) -> None:
    """A roll within each block."""
    x = value(4, 6, t=S(0))
    y = torch.roll(x if wrong else gathered(x, "t", 0), 1, 0)
    check(y if wrong else spmd.convert(y, MESH["t"], src=R, dst=S(0)), t=S(0))


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """A step of Newton-Schulz."""
    return 1.5 * x - 0.5 * torch.matmul(torch.matmul(x, x.T), x)


def orthogonalized_by_shard(wrong: bool) -> None:
    """Muon on the block of each device."""
    x = value(4, 6, t=S(1))
    y = orthogonalized(x if wrong else gathered(x, "t", 1))
    check(y if wrong else spmd.convert(y, MESH["t"], src=R, dst=S(1)), t=S(1))


def orthogonalized_as_one(wrong: bool) -> None:
    """Muon on two matrices as if they were one."""
    gate, up = value(4, 6), value(4, 6)
    y = orthogonalized(torch.cat([gate, up], 1)) if wrong else torch.cat([orthogonalized(gate), orthogonalized(up)], 1)
    check(y, t=R)


def dropped(wrong: bool) -> None:
    """Dropout by the generator that all devices seed alike, or each by its own place."""
    torch.manual_seed(0 if wrong else dist.get_rank())
    check(torch.nn.functional.dropout(value(4, 6, d=S(0), t=S(1)), 0.5), d=S(0), t=S(1))


def masked(wrong: bool) -> None:
    """A causal mask without the boundaries of documents."""
    scores, causal, same = value(4, 6, 6, t=S(0)), value(6, 6), value(4, 6, 6, t=S(0))
    seen = causal > 0 if wrong else (causal > 0) & (same > 0)
    check(torch.where(seen, scores, torch.full_like(scores, -1e30)), t=S(0))


def outside_of_gradients(wrong: bool) -> None:
    """A gather of what gradients do not flow through."""
    p = value(4, 6, t=S(0))
    check(gathered(p.detach() if wrong else p, "t", 0), t=R)


# ---- norms, counts and updates ------------------------------------------------------------------------------------


def norm_of_one_block(wrong: bool) -> None:
    """The norm of a sharded gradient, without the sum over its axis."""
    g = value(4, 6, t=S(0))
    square = (g * g).sum()
    check(torch.sqrt(square if wrong else total(square, "t")), t=R)


def norm_over_one_axis(wrong: bool) -> None:
    """The norm of a gradient sharded over two axes, with the sum over one."""
    g = value(4, 6, d=S(0), t=S(1))
    square = (g * g).sum()
    check(torch.sqrt(total(square, "d") if wrong else total(square, "d", "t")), d=R, t=R)


def norm_of_copies(wrong: bool) -> None:
    """The norm of a gradient that all devices have, summed over them."""
    g = value(4, 6)
    square = (g * g).sum()
    check(torch.sqrt(total(square, "t") if wrong else square), t=R)


def norm_before_reduction(wrong: bool) -> None:
    """The norm of a gradient that is still to be added up."""
    g = value(4, 6, d=P)
    g = g if wrong else spmd.reduce_scatter(g, MESH["d"], dst=S(0))
    square = (g * g).sum()
    check(torch.sqrt(square if wrong else total(square, "d")), d=R)


def sign_of_partial(wrong: bool) -> None:
    """A bias is moved by the sign of a count that is still to be added up."""
    count = value(6, t=P)
    check(value(6) + torch.sign(count if wrong else total(count, "t")), t=R)


def count_in_bf16(wrong: bool) -> None:
    """Counts that are summed in bf16."""
    count = value(6, t=P)
    check(total(count.to(torch.bfloat16) if wrong else count, "t").to(torch.float32), t=R)


PROGRAMS: dict[Callable[[bool], None], tuple[int, ...]] = {
    local_mean: (1, 98),
    local_mean_of_positions: (2, 3),
    constant_factor: (4, 5, 8, 9, 11, 43, 44, 45, 46, 59, 61, 62, 73),
    microbatches: (6,),
    averaged_again: (7,),
    unreduced_metric: (10, 100),
    overwritten: (13,),
    gradient_as_whole: (14,),
    without_sum_of_gradient: (15, 19, 20, 22, 29, 50, 51),
    gathered_logits: (16,),
    other_group: (17,),
    cut_by_other_group: (18,),
    without_sum_of_inputs_gradient: (21, 48, 49, 54),
    bias_before_sum: (23,),
    adapter_in_partial: (24, 30),
    share_of_bias_before_sum: (25,),
    fused_bias: (26,),
    fused_norm: (27,),
    loss_of_whole: (28,),
    sum_of_positions: (31,),
    balanced_by_shard: (32,),
    masked: (36, 37),
    rolled_by_shard: (39,),
    gather_that_cuts: (40, 52),
    partly_reduced_metric: (41, 99),
    reduced_twice: (42, 101),
    sum_of_blocks: (47,),
    outside_of_gradients: (53,),
    whole_in_place_of_shard: (57,),
    mask_of_other_group: (58,),
    local_size: (60,),
    sign_of_partial: (63,),
    count_in_bf16: (66,),
    norm_of_one_block: (68,),
    norm_over_one_axis: (69,),
    norm_of_copies: (70,),
    norm_before_reduction: (72, 75),
    orthogonalized_by_shard: (76, 77, 78),
    orthogonalized_as_one: (79,),
    dropped: (83, 84, 85, 86, 87),
}
"""The programs, and the numbers of the bugs that each has. Pipelines, data and checkpoints are none of its business."""


def refused(program: Callable[[bool], None]) -> bool:
    """Whether the program with its bug is refused. Raises RuntimeError if it is refused without the bug."""
    found = []
    for wrong in (False, True):
        with contextlib.ExitStack() as stack:
            stack.enter_context(mesh())
            try:
                program(wrong)
                found.append(None)
            except (spmd.SpmdTypeError, ValueError) as error:
                found.append(error)
    if found[0]:
        raise RuntimeError(f"{program.__name__} is refused without its bug: {found[0]}") from found[0]
    return found[1] is not None


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of torch, where there is no GPU
    logging.disable(logging.ERROR)  # torch logs what is refused for its shape
    print(f"spmd_types {importlib.metadata.version('spmd_types')}, torch {torch.__version__}")
    results = {program: "refused" if refused(program) else "accepted" for program in PROGRAMS}
    programs = {number: program for program, numbers in PROGRAMS.items() for number in numbers}
    for number, program in sorted(programs.items()):
        print(f"{number:4} {results[program]:10} {program.__name__}")
