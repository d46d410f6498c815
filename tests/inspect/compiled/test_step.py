"""The compiled step by source line: from texts by hand, against XLA's own figures, and against another reader."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
import step_text
import tiny
from hlo_texts import HEAD, TEXT
from step_text import table_of

from models import gpt2
from shardwright.cluster.devices import make_mesh
from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.compiled.table import Table, as_text, in_bytes, in_flops, read_table
from shardwright.run.files import write_json

MESH = {"d": 2, "t": 2}


@pytest.mark.quick
def test_collectives_of_a_text_by_hand():
    """Of four devices as d=2 t=2: {0,1} is along t, {0,2} along d, and an array of 4 × 8 f32 has 128 bytes."""
    found = {(row.what, row.where): row for row in table_of(TEXT, MESH).of("collective")}
    figures = {key: (r.line, r.axes, r.size, r.count, r.turns, r.overlapped) for key, r in found.items()}
    assert figures == {
        ("all-gather", "outside of loops"): ("train.py:10", "t", 128, 1, 1, True),
        ("reduce-scatter", "loop in f"): ("train.py:10", "d", 64, 1, 5, None),
        ("all-gather", "loop in f"): ("train.py:10", "d", 64, 1, 5, None),
        ("all-reduce", "outside of loops"): ("train.py:20", "d t", 2 * 128 * 3 // 4, 1, 1, None),
    }
    assert found["reduce-scatter", "loop in f"].total == 320
    (row,) = table_of(TEXT, MESH).of("matmul")  # in a fusion, and has its own line
    assert (row.line, row.what, row.dtype, row.total) == ("train.py:20", "8×8×16", "f32", 2 * 8 * 8 * 16)


def started(text):
    """The collectives with a start and an end."""
    return [row for row in table_of(text, MESH).of("collective") if row.overlapped is not None]


@pytest.mark.quick
def test_a_collective_without_work_until_its_end_is_not_overlapped():
    lines = TEXT.splitlines()
    done = next(i for i, line in enumerate(lines) if "all-gather-done" in line)
    lines.insert(next(i for i, line in enumerate(lines) if "all-gather-start" in line) + 1, lines.pop(done))
    assert [row.overlapped for row in started("\n".join(lines))] == [False]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3}}", "t"),
        ("{{0,2,1,3}}", "d t"),
        ("[2,2]<=[4]", "t"),
        ("[2,2]<=[2,2]T(1,0)", "d"),
        ("{}", "d t"),
        ("mesh['d'=2,'t'=2] {'d'}, use_global_device_ids=true", "d"),  # jax 0.12
        ("mesh['d'=2,'t'=2] {'t','d'}", "d t"),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", "t"),  # of GSPMD
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'c'}", "d"),
        ("mesh['a'=2,'c'=2], device_ids=([4]) {'a'}", "d"),
        ("@a_form_of_the_future", ""),
    ],
)
def test_axes_of_groups(groups, axes):
    (row,) = started(TEXT.replace("replica_groups={{0,1},{2,3}}", f"replica_groups={groups}"))
    assert row.axes == axes
    assert row.size == 128 * (1 if len(axes) == 1 else 3)


@pytest.mark.quick
def test_a_permutation_and_a_group_of_one():
    old = "replica_groups={{0,1},{2,3}}"
    (row,) = started(
        TEXT.replace("all-gather-", "collective-permute-").replace(old, "source_target_pairs={{0,2},{2,0}}")
    )
    assert (row.what, row.axes, row.size) == ("collective-permute", "d", 128)
    assert started(TEXT.replace(old, "replica_groups={{0},{1},{2},{3}}")) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    "operation",
    [
        'custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{'
        '"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
        '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
        "convolution(%a, %b), dim_labels=bf_io->bf",
    ],
)
def test_matmuls_as_other_compilers_write_them(operation):
    text = f"""HloModule jit_f

ENTRY main {{
  %a = bf16[6,4]{{1,0}} parameter(0)
  %b = bf16[4,10]{{1,0}} parameter(1)
  ROOT %c = bf16[6,10]{{1,0}} {operation}
}}
"""
    (row,) = table_of(text).of("matmul")
    assert (row.what, row.dtype, row.size) == ("6×4×10", "bf16", 2 * 6 * 4 * 10)


@pytest.mark.parametrize("spec", ["ab,bc->ac", "xab,xbc->xac", "abc,cd->abd", "xab,cbx->xac"])
def test_flops_are_those_of_xlas_cost_analysis(spec):
    sizes = dict(zip("xabcd", (3, 16, 32, 48, 64), strict=True))
    left, right = ([sizes[dim] for dim in dims] for dims in spec.split("->")[0].split(","))
    compiled = jax.jit(lambda x, y: jnp.einsum(spec, x, y)).lower(jnp.ones(left), jnp.ones(right)).compile()
    assert sum(row.total for row in table_of(compiled.as_text()).of("matmul")) == compiled.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("padding", "stride", "spread", "apart"),
    [((0, 0), 1, 1, 1), ((3, 3), 1, 1, 1), ((3, 1), 2, 1, 1), ((2, 2), 1, 3, 1), ((4, 5), 2, 3, 2)],
)
def test_flops_of_convolutions_are_those_of_xlas_cost_analysis(padding, stride, spread, apart):
    """As TPUs write products of more than two dims. XLA does not count what meets padding either."""

    def convolved(x, y):
        return jax.lax.conv_general_dilated(x, y, (stride,), [padding], (spread,), (apart,), ("NWC", "WIO", "NWC"))

    compiled = jax.jit(convolved).lower(jnp.ones((2, 5, 16)), jnp.ones((4, 16, 24))).compile()
    assert " convolution(" in compiled.as_text()
    found = sum(row.total for row in table_of(compiled.as_text()).of("matmul"))
    assert found == compiled.cost_analysis()["flops"] > 0


def test_a_collective_in_parts_counts_once():
    """TPUs begin a gather in one fusion, go on with it in the next ones, which compute, and end it in the last one."""
    part = """%part{} (p{}: f32[4,8]) -> f32[8,8] {{
  %p{} = f32[4,8]{{1,0}} parameter(0)
  ROOT %g{} = f32[8,8]{{1,0}} all-gather(%p{}), channel_id=7, replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="{}"}}, metadata={{op_name="jit(f)/all_gather" stack_frame_id=2}}
}}

"""  # noqa: E501
    parts = "".join(part.format(i, i, i, i, i, 7 if i < 3 else 8) for i in range(4))
    fusions = "\n".join(f"  %f{i} = f32[8,8]{{1,0}} fusion(%x.1), kind=kCustom, calls=%part{i}" for i in range(4))
    before = {row.what: row.count for row in table_of(TEXT, MESH).of("collective") if row.where == "outside of loops"}
    text = TEXT.replace("%sum (a", f"{parts}%sum (a").replace("  %zero =", f"{fusions}\n  %zero =")
    rows = [row for row in table_of(text, MESH).of("collective") if row.where == "outside of loops"]
    assert sum(row.count for row in rows) == sum(before.values()) + 2
    assert {row.line for row in rows if row.what == "all-gather"} == {"train.py:10"}


def test_a_collective_without_a_name_has_the_line_of_what_sums():
    """XLA drops the name of collectives that it merges, and keeps that of the sum of two numbers."""
    text = TEXT.replace(', metadata={op_name="jit(f)/psum" stack_frame_id=3}', "").replace(
        "add(%a, %b)", 'add(%a, %b), metadata={op_name="add" stack_frame_id=2}'
    )
    (row,) = (row for row in table_of(text, MESH).of("collective") if row.what == "all-reduce")
    assert row.line == "train.py:10"


def test_a_reduce_scatter_as_a_slice_of_a_sum():
    """In one fusion, as TPUs write it where they pad the operand. A slice by another operation sums all of it."""
    scattered = """%scattered (q: f32[4,8]) -> f32[2,8] {
  %q = f32[4,8]{1,0} parameter(0)
  %r = f32[4,8]{1,0} all-reduce(%q), channel_id=7, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %z = s32[] constant(0)
  ROOT %cut = f32[2,8]{1,0} dynamic-slice(%r, %z, %z), dynamic_slice_sizes={2,8}
}

"""
    fusion = "  %f = f32[2,8]{1,0} fusion(%x.1), kind=kCustom, calls=%scattered\n  %zero ="
    text = TEXT.replace("%fused (p0", f"{scattered}%fused (p0").replace("  %zero =", fusion)
    found = lambda text: {(row.what, row.axes, row.size) for row in table_of(text, MESH).of("collective")}
    new = found(text) - found(TEXT)
    assert new == {("reduce-scatter", "t", 64)}
    assert ("all-reduce", "t", 128) in found(text.replace("dynamic-slice(%r,", "dynamic-slice(%q,"))


def test_a_collective_that_another_core_does():
    """libtpu gives some to the sparse cores of a chip, as a call that begins and ends."""
    call = """%called (q: f32[4,8], k: token[]) -> f32[8,8] {
  %q = f32[4,8]{1,0} parameter(0)
  %k = token[] parameter(1)
  ROOT %g = f32[8,8]{1,0} all-gather(%q), channel_id=7, replica_groups={{0,1},{2,3}}, dimensions={0}
}

"""
    start = """  %ready = token[] after-all()
  %cs = ((f32[4,8]{1,0}, token[]), f32[8,8]{1,0}) call-start(%x.1, %ready), async_execution_thread="sparsecore", to_apply=%called, metadata={op_name="jit(f)/all_gather" stack_frame_id=2}
  %meanwhile = f32[4,8]{1,0} add(%x.1, %x.1)
  %cd = f32[8,8]{1,0} call-done(%cs)
  %zero ="""  # noqa: E501
    text = TEXT.replace("%sum (a", f"{call}%sum (a").replace("  %zero =", start)
    count = lambda text: {
        (row.line, row.what, row.size, row.overlapped): row.count for row in table_of(text, MESH).of("collective")
    }
    assert (
        count(text)["train.py:10", "all-gather", 128, True] == count(TEXT)["train.py:10", "all-gather", 128, True] + 1
    )


# ---- the training step ------------------------------------------------------------------------------------------


@functools.cache
def training_step(mesh: str, **training) -> tuple[str, Table]:
    text = step_text.compile_step(mesh, **training).as_text()
    return text, table_of(text, dict(tiny.mesh(mesh).shape))


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["d=4 t=2", "r=2 d=2 t=2"])
def test_collectives_are_those_that_another_reader_counts(mesh):
    text, table = training_step(mesh)
    counted = step_text.collectives(text)
    found = collections.defaultdict(collections.Counter)
    for row in table.of("collective"):
        where = row.where.removesuffix(", again")
        found[where][row.what] += row.count
    # The gradients of a layer's nine weights over r: one operation, which the table leaves out where r is 1.
    assert counted["backward"].pop("all-reduce") == 9
    assert found["layers, backward"].pop("all-reduce", 0) == mesh.count("r=2")
    assert found["layers, forward"] == counted["forward"]
    assert found["layers, backward"] == counted["backward"]
    assert set(found["outside of loops"]) == set(counted["outside"])


def test_each_written_collective_of_a_layer_is_at_its_line():
    """The lines of train.py that call a collective, and the axes that their specs say."""
    _, table = training_step("d=4 t=2")
    with open(step_text.tiny.train.__file__) as file:
        source = dict(enumerate(file.read().splitlines(), 1))
    forward = [row for row in table.of("collective") if row.where == "layers, forward"]
    assert forward
    for row in forward:
        text = source[int(row.line.removeprefix("train.py:"))]
        assert ("psum_scatter(" if row.what == "reduce-scatter" else "all_gather(") in text
        spec = text.split('"')[1]
        assert "used.spec" in spec or all(f"/{axis}" in spec or f"+{axis}" in spec for axis in row.axes.split())
    assert {row.turns for row in forward} == {tiny.model().layers}


WHOLE, STAGES = {"r": 2, "d": 2, "t": 2}, {"r": 1, "d": 2, "t": 2, "p": 2}


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("model", "mesh", "microbatches", "gather"),
    [
        ("llama", WHOLE, 1, "layer"),
        ("llama with muon", WHOLE, 2, "step"),
        ("gpt2", WHOLE, 2, "layer"),
        ("llama", STAGES, 2, "step"),
    ],
)
def test_every_collective_has_its_line_in_what_one_reads(model, mesh, microbatches, gather):
    """But what stages send to each other, and how they share the loss, which shardwright/run/stages.py has."""
    sizes = gpt2.ModelConfig(vocab=64, positions=16, d_model=32, layers=4, heads=4, bos_id=0)
    c = tiny.config(
        sizes if model == "gpt2" else tiny.model(layers=4), microbatches=microbatches, gather_weights=gather
    )
    if model == "llama with muon":
        c.optimizer = tiny.optimizer(algorithm="muon")
    files = step_text.files_of_collectives(
        c, make_mesh(jax.devices(), r=mesh["r"], d=mesh["d"], t=mesh["t"], p=mesh.get("p", 1))
    )
    assert files.pop("shardwright/run/stages.py", set()) == ({"p"} if "p" in mesh else set())
    assert set(files) == {
        "train.py",
        *{"gpt2": ["models/gpt2.py"], "llama with muon": ["shardwright/optimizers/muon.py"]}.get(model, []),
    }


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.long)])
def test_what_save_for_backward_marks_is_kept_at_its_line(dtype):
    _, table = training_step("d=4 t=2", **({} if dtype == "f32" else {"compute_dtype": dtype}))
    with open(step_text.tiny.train.__file__) as file:
        lines = file.read().splitlines()
    layer = [next(i for i, line in enumerate(lines) if f"def {name}(" in line) for name in ("layer", "logits")]
    marked = {f"train.py:{i + 1}" for i in range(*layer) if "save_for_backward(" in lines[i]}
    kept = [row for row in table.of("kept") if row.where == "layers, forward" and row.line in marked]
    assert {row.line for row in kept} == marked
    assert len(kept) == len(marked)
    c = tiny.model()
    hidden = f"{dtype}[{c.layers},{tiny.BATCH // 4},{tiny.LENGTH},{c.d_ff // 2}]"
    assert sum(row.what == hidden for row in kept) == 2
    assert all(row.what.startswith(f"{dtype}[{c.layers},") for row in kept)


# ---- the table as text --------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_table_as_text():
    table = dataclasses.replace(table_of(TEXT, MESH), source={"train.py:20": "y = x @ w"})
    assert as_text(table, 100).splitlines() == [
        "f on 4 devices, d=2 t=2; what one device does in a step",
        "",
        "Collectives: a device sends 960 B",
        "bytes  number  what                      where             line",
        "320 B   1 × 5  reduce-scatter d          loop in f         train.py:10",
        "320 B   1 × 5  all-gather d              loop in f         train.py:10",
        "192 B       1  all-reduce d t            outside of loops  train.py:20  y = x @ w",
        "128 B       1  all-gather t, overlapped  outside of loops  train.py:10",
        "",
        "Matmuls: a device multiplies 2.05 kFLOP",
        "     FLOPs  number  what        where             line",
        "2.05 kFLOP       1  8×8×16 f32  outside of loops  train.py:20  y = x @ w",
        "",
        "Kept for the backward pass 0 B",
        "none",
    ]
    assert all(len(line) <= 60 for line in as_text(table, 60).splitlines()[1:])
    assert [in_bytes(n) for n in (7, 1536, 3 * 2**40)] == ["7 B", "1.50 KiB", "3072 GiB"]
    assert [in_flops(n) for n in (7, 1500, 2e13)] == ["7 FLOP", "1.50 kFLOP", "20.0 TFLOP"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("part", "changes", "problem"),
    [
        (None, {"devices": -1}, "out of range"),
        (None, {"mesh": {"d": 2**63}}, "out of range"),
        (None, {"source": {"train.py:10": 3}}, "source.train.py:10 is 3; it must be a text"),
        ("rows", {"size": 1.5}, "size is 1.5; it must be a whole number"),
        ("rows", {"section": 99}, "out of range"),
        ("sections", {"parent": 1}, "out of range"),
    ],
)
def test_a_table_is_read_as_it_was_written_and_odd_values_are_refused(tmp_path, part, changes, problem):
    table, path = table_of(TEXT, MESH), tmp_path / "step.json"
    write_json(path, table.as_data())
    of_operations = {"line_of": table.line_of, "communicating": table.communicating}
    assert dataclasses.replace(read_table(path), **of_operations) == table
    data = table.as_data()
    (data[part][-1] if part else data).update(changes)
    write_json(path, data)
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_table(path)


@pytest.mark.quick
def test_lines_of_files_that_changed_since_are_left_out(tmp_path):
    (tmp_path / "shardlib").mkdir()
    (tmp_path / "train.py").write_text("a\n" * 9 + "  tenth = 1\n")
    program = parse(TEXT.replace("/home/x", str(tmp_path)))
    changed = (tmp_path / "train.py").stat().st_mtime
    assert describe(program, changed).source == {"train.py:10": "tenth = 1"}
    assert describe(program, changed - 1).source == {}


SLOTS = """
%body (c: (s32[], f32[3,8], f32[3,8])) -> (s32[], f32[3,8], f32[3,8]) {
  %c = (s32[], f32[3,8], f32[3,8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %slots = f32[3,8] get-tuple-element(%c), index=1
  %others = f32[3,8] get-tuple-element(%c), index=2
  %x = f32[8] broadcast(%i), dimensions={}
  %saved = f32[8] tanh(%x), metadata={op_name="jit(f)/while/body/jvp()/tanh" stack_frame_id=3}
  %row = f32[1,8] bitcast(%saved), metadata={op_name="jit(f)/while" stack_frame_id=2}
  %put = f32[3,8] dynamic-update-slice(%slots, %row, %i, %i), metadata={op_name="jit(f)/while/dynamic_update_slice" stack_frame_id=2}
  %row2 = f32[1,8] broadcast(%i), dimensions={}, metadata={op_name="jit(f)/while/body/iota" stack_frame_id=3}
  %put2 = f32[3,8] dynamic-update-slice(%others, %row2, %i, %i)
  ROOT %t = (s32[], f32[3,8], f32[3,8]) tuple(%i, %put, %put2)
}

ENTRY %main (a: (s32[], f32[3,8], f32[3,8])) -> (s32[], f32[3,8], f32[3,8]) {
  %a = (s32[], f32[3,8], f32[3,8]) parameter(0)
  ROOT %loop = (s32[], f32[3,8], f32[3,8]) while(%a), condition=%body, body=%body, metadata={op_name="jit(f)/while" stack_frame_id=2}
}
"""  # noqa: E501


@pytest.mark.quick
def test_slots_that_a_loop_over_both_passes_carries():
    """As a pipeline has them: of two stacks, the one into which the forward pass puts something."""
    (row,) = table_of(HEAD + SLOTS).of("kept")
    assert (row.line, row.what, row.total, row.where) == ("train.py:20", "f32[3,8]", 96, "loop in all_gather")


PUT = "%put = f32[3,8] dynamic-update-slice(%slots, %row, %i, %i)"
TO_HOST = """
%stacked (p: f32[3,8], q: f32[1,8], n: s32[]) -> f32[3,8] {
  %p = f32[3,8]{1,0:S(5)} parameter(0)
  %q = f32[1,8] parameter(1)
  %n = s32[] parameter(2)
  ROOT %update = f32[3,8]{1,0:S(5)} dynamic-update-slice(%p, %q, %n, %n)
}
"""


@pytest.mark.quick
def test_a_stack_in_the_hosts_memory_has_the_line_of_its_rows():
    """As XLA for GPUs writes training.save=offload."""
    put = (
        "%put-start = ((f32[3,8]{1,0:S(5)}, f32[1,8], s32[]), f32[3,8]{1,0:S(5)}, u32[]) fusion-start(%slots, %row, "
        "%i), kind=kCustom, calls=%stacked\n  %put = f32[3,8]{1,0:S(5)} fusion-done(%put-start)"
    )
    row = '%row = f32[1,8] bitcast(%saved), metadata={op_name="jit(f)/while'
    text = SLOTS.replace(PUT, put).replace(row, row + "/body/jvp()/closed_call")
    assert table_of(HEAD + TO_HOST + text).of("kept") == table_of(HEAD + SLOTS).of("kept")


@pytest.mark.quick
def test_a_line_that_the_compiler_dropped_is_marked():
    text = TEXT.replace('metadata={op_name="jit(f)/dot_general" stack_frame_id=4}', "metadata={stack_frame_id=3}")
    (row,) = table_of(text, MESH).of("matmul")
    assert row.line == "~train.py:10"
    assert "~ the compiler dropped the line" in as_text(table_of(text, MESH))
