"""What a plan counts of a step, against the program that XLA compiles of it, and figures computed
by hand.
"""

import collections
import dataclasses
import math

import jax
import numpy as np
import pytest

from shardwright.axes import AXES
from shardwright.cluster.chips import chip_of
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import mesh_sizes, planned_step
from shardwright.modeling.model import load_model
from shardwright.models import family
from shardwright.optimizers.config import GroupConfig
from shardwright.tools.plan.screen import as_text
from tests.support import step_text, tiny

KINDS = {
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "ppermute": "collective-permute",
}
SIZES = {"d=4 t=2": (1, 1, 4, 2), "r=2 d=2 t=2": (1, 2, 2, 2)}
H100 = chip_of("h100")
PLANNED = {}


def planned(c, sizes=(1, 1, 8, 1), chip="h100"):
    """The plan of a step, made once for each configuration."""
    key = repr((c, sizes, chip))
    if key not in PLANNED:
        mesh = dict(zip("prdt", sizes, strict=True))
        PLANNED[key] = planned_step(c, load_model(c.model), mesh, chip_of(chip))
    return PLANNED[key]


def wide(**training):
    """A model whose arrays are large beside the scalars of a step."""
    return tiny.config(tiny.model(d_model=64, d_ff=192, vocab=128, layers=2), **training)


def flops(step, *kinds, phase=None):
    """What a device computes in operations of these kinds, or of all, in a phase or in all."""
    return sum(
        op.count * op.flops
        for op in step.ops
        if (not kinds or op.kind in kinds) and phase in (None, op.phase)
    )


def parameters(m):
    """Of the matrices of a layer."""
    return m.d_model * m.d_head * m.n_kv * (2 * m.n_q_per_kv + 2) + 3 * m.d_model * m.d_ff


def sent(op, mesh):
    """Bytes that a device of a ring sends, as compiled.operations counts them of a program."""
    n = math.prod(mesh[axis] for axis in op.axes)
    return op.count * op.bytes * (2 if op.what == "psum" else 1) * (n - 1) // n


@pytest.mark.long
@pytest.mark.parametrize("mesh", SIZES)
def test_a_step_sends_multiplies_and_holds_what_its_compiled_program_does(mesh):
    c, mesh_of = wide(attention="einsum"), tiny.mesh(mesh)
    compiled = step_text.compile_config(c, mesh_of)
    table, step = (
        step_text.table_of(compiled.as_text(), mesh_of.shape),
        planned(c, SIZES[mesh], "cpu"),
    )
    theirs, ours = collections.Counter(), collections.Counter()
    for row in table.of("collective"):
        theirs[row.what] += row.total
    for op in step.ops:
        if op.kind == "collective":
            ours[KINDS[op.what]] += sent(op, step.mesh)
    for kind in theirs | ours:
        assert ours[kind] == pytest.approx(theirs[kind], rel=0.02, abs=512), kind
    multiplied = sum(row.total for row in table.of("matmul"))
    assert flops(step) == pytest.approx(multiplied, rel=0.02)
    state = sum(array.bytes for array in step.held if array.kind in ("weights", "optimizer"))
    assert state == pytest.approx(compiled.memory_analysis().argument_size_in_bytes, rel=0.01)


def test_flops_by_hand():
    """Three products of each weight for a token, nothing again; of attention the causal pairs, its
    scores twice.
    """
    c, m = wide(attention="blockwise", save=None), wide().model
    step = planned(c)
    tokens = tiny.BATCH * tiny.LENGTH // 8
    assert flops(step, "matmul") == 6 * tokens * (m.layers * parameters(m) + m.vocab * m.d_model)
    pairs = tiny.BATCH // 8 * m.n_kv * m.n_q_per_kv * tiny.LENGTH * (tiny.LENGTH + 1) // 2
    assert flops(step, "attention") == 2 * pairs * m.d_head * (2 + 5) * m.layers


def test_windows_are_counted():
    """Of two layers one has a window: entries of both masks, in the plan and in model FLOPs."""
    sizes = {name: x for name, x in vars(tiny.model(layers=2)).items() if name != "module"}
    i, j = np.arange(tiny.LENGTH)[:, None], np.arange(tiny.LENGTH)
    full, window = np.sum(j <= i), np.sum((j <= i) & (i - j < 3))
    per_token = []
    for windows, pairs in (({"window": 3, "full_every": 2}, full + window), ({}, 2 * full)):
        c = tiny.config(family.ModelConfig(**sizes | windows), save=None, attention="blockwise")
        step = planned(c)
        entries = c.model.heads * c.model.d_head
        per_device = 2 * tiny.BATCH / 8 * entries * pairs * (2 + 5)
        assert flops(step, "attention") == pytest.approx(per_device, rel=1e-6)
        per_token.append(step.facts.flops_per_token)
    less = 12 * entries * (full - window) / tiny.LENGTH
    assert per_token[1] - per_token[0] == pytest.approx(less, rel=1e-6)


@pytest.mark.long
def test_stages_of_a_pipeline_and_their_bubble():
    """1F1B of p stages and m microbatches waits (p - 1) of m + p - 1 times, but for the work that
    stages share.
    """
    c = tiny.config(tiny.model(layers=4, d_model=64, d_ff=512), microbatches=8, batch_size=16)
    plan = plan_of(planned(c, (2, 1, 1, 1)), H100, 10)
    of_stages = sum(row.exposed for row in plan.rows if row.task in ("forward", "backward"))
    assert plan.bubble > 0
    assert plan.bubble / (plan.bubble + of_stages) < 0.5
    tasks = {"forward", "backward", "forward_first", "backward_last"}
    assert tasks <= {row.task for row in plan.rows}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_v", marks=pytest.mark.long)])
def test_each_schedule_computes_the_same(schedule):
    """The layers' products, and attention, which each device of p does for its own layers; nothing
    without a phase.
    """
    c = tiny.config(tiny.model(layers=4), microbatches=4, attention="blockwise", save=None)
    c.pipeline.schedule, c.pipeline.virtual_stages = schedule, 2 if schedule == "zb_v" else 1
    m, step = c.model, planned(c, (2, 1, 2, 1))
    pairs = tiny.BATCH // 2 * m.n_kv * m.n_q_per_kv * tiny.LENGTH * (tiny.LENGTH + 1) // 2
    tokens = tiny.BATCH * tiny.LENGTH // 2
    head = tokens * m.vocab * m.d_model // 2  # whose logits are sharded over p
    of_matrices = tokens * m.layers * parameters(m) // 2 + head
    for phase, of_attention, products in (("forward", 2, 2), ("backward", 5, 4), ("", 0, 0)):
        expected = 2 * pairs * m.d_head * of_attention * m.layers // 2
        assert flops(step, "attention", phase=phase) == expected
        assert flops(step, "matmul", phase=phase) == products * of_matrices


@pytest.mark.long
def test_what_is_offloaded_is_in_no_memory_of_the_device():
    """What a layer marks is in the host's memory then. The device keeps the input of each layer."""
    marked, offload = (planned(wide(save=save)) for save in ("marked", "offload"))

    def saved(step):
        return sum(array.bytes for array in step.held if array.kind == "saved")

    assert saved(offload) == 2 * tiny.BATCH // 8 * tiny.LENGTH * 64 * 4 < saved(marked)
    plans = [plan_of(step, H100, 1) for step in (marked, offload)]
    assert [plan.offloads for plan in plans] == [False, True]
    assert as_text(plans[1], "ours").count("and what moving to the host takes") == 1


def test_messages_slow_what_is_computed_beside_them():
    """And no step is faster than at the chip's peaks, by hand the sum of what each kernel
    multiplies or moves.
    """
    step = planned(wide())

    def of(interference):
        plan = plan_of(step, dataclasses.replace(H100, interference=interference), 1)
        return plan, [row for row in plan.rows if row.kind == "collective"]

    (alone, messages), (half, slowed) = of(0.0), of(0.5)
    hidden = sum(row.seconds - row.exposed for row in messages)
    assert half.seconds - alone.seconds == pytest.approx(hidden / 2)
    assert [row.exposed for row in slowed] == [row.exposed for row in messages]

    def peak(op):
        multiplying = op.flops / H100.peak_of(op.dtype) * (op.kind != "memory")
        return op.count * max(multiplying, op.traffic / H100.memory_bandwidth)

    assert alone.at_peaks >= sum(peak(op) for op in step.ops if op.kind != "collective") > 0
    assert alone.at_peaks < alone.range[0] < alone.seconds


def test_a_mesh_without_its_devices_is_refused():
    c = tiny.config()
    for t, devices, problem in (
        (1, None, "give plan"),
        (3, 8, r"plan.devices is 8, but the mesh is r=1 d=-1 t=3"),
        (0, 8, r"mesh\.t is 0; give a number of devices"),
        (-1, 8, r"mesh\.d and mesh\.t are -1; only one can"),
    ):
        c.mesh.t = t
        with pytest.raises(ValueError, match=problem):
            mesh_sizes(c, devices)
    c.mesh.t = 2
    assert mesh_sizes(c, 8) == dict.fromkeys(AXES, 1) | {"d": 4, "t": 2}


def test_gradients_of_frozen_weights_are_not_planned():
    """Of the three products of a frozen weight the backward pass leaves one out."""
    c, frozen = wide(), wide()
    frozen.optimizer.groups = [GroupConfig("layers.w_gate", algorithm="frozen")]
    m, less = c.model, flops(planned(c), "matmul") - flops(planned(frozen), "matmul")
    assert less == 2 * tiny.BATCH * tiny.LENGTH // 8 * m.layers * m.d_model * m.d_ff


@pytest.mark.long
def test_a_loop_copies_what_it_keeps_on_gpus():
    """By hand: each array is read and written once on its way into a stack, and once on its way
    out.
    """

    def copies(step):
        return [op for op in step.ops if op.what.startswith("stack")]

    loop, unrolled = (planned(tiny.config(unroll=unroll)) for unroll in (1, None))
    kept = sum(x.bytes for x in loop.held if x.kind == "saved")
    assert sum(op.count * op.traffic for op in copies(loop)) == 4 * kept
    assert {op.phase for op in copies(loop)} == {"forward", "backward"}
    assert not copies(unrolled)
    assert plan_of(unrolled, H100, 1).seconds < plan_of(loop, H100, 1).seconds
    assert not copies(planned(tiny.config(unroll=1), chip="v5e"))


@pytest.mark.long
def test_products_of_fp8_run_at_its_peak():
    """Where a chip has one, and never slower than bf16 where they are large."""
    large = tiny.model(d_model=4096, d_ff=16384, n_q_per_kv=4, d_head=128, layers=2, vocab=512)
    of = {"batch_size": 1024, "compute_dtype": "bf16"}
    seconds = []
    for fp8, dtype in ((False, "bf16"), (True, "fp8")):
        step = planned(tiny.config(large, fp8=fp8, **of))
        products = [op for op in step.ops if op.kind == "matmul" and min(op.shape[1:]) >= 1024]
        assert {op.dtype for op in products} == {dtype}
        seconds.append(plan_of(step, H100, 1).seconds)
    assert 0.5 * seconds[0] < seconds[1] < 0.95 * seconds[0]


@pytest.mark.long
def test_a_document_mask_is_read_as_a_bias():
    """cuDNN takes it as an array of all pairs in the dtype of the queries.

    JAX before 0.12 has its gradient written.
    """
    c = tiny.model(d_model=64, d_head=64, n_kv=2, n_q_per_kv=1)
    of = {"attention": "cudnn", "compute_dtype": "bf16"}
    plain, masked = (
        [op for op in planned(tiny.config(c, document_mask=x, **of)).ops if op.kind == "attention"]
        for x in (False, True)
    )
    forward = 2 * tiny.BATCH // 8 * tiny.LENGTH**2
    backward = forward * (2 if jax.__version_info__ < (0, 12) else 1)
    more = {"forward": forward, "backward": backward}
    assert {op.phase for op in plain} == more.keys()
    for x, y in zip(plain, masked, strict=True):
        assert y.traffic - x.traffic == more[x.phase]
