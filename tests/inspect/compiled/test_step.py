"""The compiled step by source line: from texts by hand, against XLA's own figures, and against
another reader.
"""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.compiled.table import CompiledStep, read_table
from shardwright.program.files import write_json
from tests.inspect.compiled.hlo_texts import TEXT
from tests.support import step_text, tiny
from tests.support.step_text import table_of

MESH = {"d": 2, "t": 2}


def collectives_of(text):
    """How often each collective is in a text: line, what, axes, bytes, turns of its loop, whether
    it is overlapped.
    """
    rows = table_of(text, MESH).of("collective")
    found = {
        (r.line, r.what, " ".join(r.axes), r.size, r.turns, r.overlapped): r.count for r in rows
    }
    return collections.Counter(found)


GATHER = ("train.py:10", "all-gather", "t", 128, 1, True)
OF_TEXT = {
    GATHER,
    ("train.py:10", "reduce-scatter", "d", 64, 5, None),
    ("train.py:10", "all-gather", "d", 64, 5, None),
}
SUM = ("all-reduce", "d t", 2 * 128 * 3 // 4, 1, None)


@pytest.mark.quick
def test_a_text_by_hand():
    """Of four devices as d=2 t=2: {0,1} is along t, {0,2} along d, and an array of 4 × 8 f32 has
    128 bytes.
    """
    assert collectives_of(TEXT) == dict.fromkeys(OF_TEXT | {("train.py:20", *SUM)}, 1)
    where = {(row.what, row.where): row.total for row in table_of(TEXT, MESH).of("collective")}
    assert where["reduce-scatter", "loop in f"] == 320
    assert ("all-reduce", "outside of loops") in where
    (row,) = table_of(TEXT, MESH).of("matmul")  # in a fusion, and has its own line
    assert (row.line, row.what, row.dtype, row.total) == (
        "train.py:20",
        "8×8×16",
        "f32",
        2 * 8 * 8 * 16,
    )


GROUPS = {  # how groups of devices are written, and the axes that they are along
    "[2,2]<=[2,2]T(1,0)": "d",
    "{}": "d t",
    "mesh['d'=2,'t'=2] {'d'}, use_global_device_ids=true": "d",  # jax 0.12
    "mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'c'}": "d",  # of GSPMD
    "@a_form_of_the_future": "",
}
OF_T = "replica_groups={{0,1},{2,3}}"
IN_PARTS = """%part{i} (p{i}: f32[4,8]) -> f32[8,8] {{
  %p{i} = f32[4,8]{{1,0}} parameter(0)
  ROOT %g{i} = f32[8,8]{{1,0}} all-gather(%p{i}), channel_id=7, replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="{chain}"}}, metadata={{op_name="jit(f)/all_gather" stack_frame_id=2}}
}}

"""
PARTS = "".join(IN_PARTS.format(i=i, chain=7 if i < 3 else 8) for i in range(4))
FUSIONS = "".join(
    f"  %f{i} = f32[8,8]{{1,0}} fusion(%x.1), kind=kCustom, calls=%part{i}\n" for i in range(4)
)
SCATTERED = """%scattered (q: f32[4,8]) -> f32[2,8] {
  %q = f32[4,8]{1,0} parameter(0)
  %r = f32[4,8]{1,0} all-reduce(%q), channel_id=7, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %z = s32[] constant(0)
  ROOT %cut = f32[2,8]{1,0} dynamic-slice(%r, %z, %z), dynamic_slice_sizes={2,8}
}

"""
FUSION = "  %f = f32[2,8]{1,0} fusion(%x.1), kind=kCustom, calls=%scattered\n"
CALLED = """%called (q: f32[4,8], k: token[]) -> f32[8,8] {
  %q = f32[4,8]{1,0} parameter(0)
  %k = token[] parameter(1)
  ROOT %g = f32[8,8]{1,0} all-gather(%q), channel_id=7, replica_groups={{0,1},{2,3}}, dimensions={0}
}

"""
CALL = """  %ready = token[] after-all()
  %cs = ((f32[4,8]{1,0}, token[]), f32[8,8]{1,0}) call-start(%x.1, %ready), async_execution_thread="sparsecore", to_apply=%called, metadata={op_name="jit(f)/all_gather" stack_frame_id=2}
  %meanwhile = f32[4,8]{1,0} add(%x.1, %x.1)
  %cd = f32[8,8]{1,0} call-done(%cs)
"""
FIRST, ZERO = "%sum (a", "  %zero ="
DONE = next(line for line in TEXT.splitlines(keepends=True) if "all-gather-done" in line)
UNNAMED = (', metadata={op_name="jit(f)/psum" stack_frame_id=3}', "")
# name: edits of the text, the collectives that it has more, and those that it no longer has
EDITS = {
    "without work until its end": (
        [(DONE, ""), (ZERO, f"{DONE}{ZERO}")], {(*GATHER[:-1], False): 1}, {GATHER: 1},
    ),
    **{
        groups: (
            [(OF_T, f"replica_groups={groups}")],
            {("train.py:10", "all-gather", axes, 128 if len(axes) == 1 else 3 * 128, 1, True): 1},
            {GATHER: 1},
        )
        for groups, axes in GROUPS.items()
    },
    "a permutation": (
        [("all-gather-", "collective-permute-"), (OF_T, "source_target_pairs={{0,2},{2,0}}")],
        {("train.py:10", "collective-permute", "d", 128, 1, True): 1}, {GATHER: 1},
    ),
    # TPUs begin a gather in one fusion, go on with it in the next ones, which compute, and end it
    # in the last one.
    "in parts": (
        [(FIRST, PARTS + FIRST), (ZERO, FUSIONS + ZERO)], {("train.py:10", "all-gather", "t", 128, 1, None): 2}, {},
    ),
    # XLA drops the name of collectives that it merges, and keeps that of the sum of two numbers.
    "without a name": (
        [UNNAMED, ("add(%a, %b)", 'add(%a, %b), metadata={op_name="add" stack_frame_id=2}')],
        {("train.py:10", *SUM): 1}, {("train.py:20", *SUM): 1},
    ),
    # In one fusion, as TPUs write it where they pad the operand. A slice by another operation sums
    # all of it.
    "a sum that is sliced": (
        [(FIRST, SCATTERED + FIRST), (ZERO, FUSION + ZERO)],
        {("without a line", "reduce-scatter", "t", 64, 1, None): 1}, {},
    ),
    "a sum that is not sliced": (
        [(FIRST, SCATTERED.replace("(%r,", "(%q,") + FIRST), (ZERO, FUSION + ZERO)],
        {("without a line", "all-reduce", "t", 128, 1, None): 1}, {},
    ),
    # libtpu gives some to the sparse cores of a chip, as a call that begins and ends.
    "of another core": ([(FIRST, CALLED + FIRST), (ZERO, CALL + ZERO)], {GATHER: 1}, {}),
}  # fmt: skip


@pytest.mark.quick
def test_collectives_as_compilers_write_them():
    found = {}
    for name, (edits, _, _) in EDITS.items():
        text = TEXT
        for old, new in edits:
            assert old in text, name
            text = text.replace(old, new)
        found[name] = (
            edits,
            collectives_of(text) - collectives_of(TEXT),
            collectives_of(TEXT) - collectives_of(text),
        )
    assert found == EDITS


@pytest.mark.quick
@pytest.mark.parametrize(
    "operation",
    [
        'custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
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


def test_flops_are_those_of_xlas_cost_analysis():
    """Of products, and of convolutions: TPUs write those of more dims so.

    Nor does XLA count what meets padding.
    """
    sizes = dict(zip("xabcd", (3, 16, 32, 48, 64), strict=True))
    programs = []
    for spec in ("ab,bc->ac", "xab,xbc->xac", "abc,cd->abd", "xab,cbx->xac"):
        shapes = [[sizes[dim] for dim in dims] for dims in spec.split("->")[0].split(",")]
        programs.append((functools.partial(jnp.einsum, spec), *shapes))
    for left, right, *steps in (
        (0, 0, 1, 1, 1),
        (3, 3, 1, 1, 1),
        (3, 1, 2, 1, 1),
        (2, 2, 1, 3, 1),
        (4, 5, 2, 3, 2),
    ):
        stride, spread, apart = ((n,) for n in steps)
        options = {
            "lhs_dilation": spread,
            "rhs_dilation": apart,
            "dimension_numbers": ("NWC", "WIO", "NWC"),
        }
        of_padding = {"window_strides": stride, "padding": [(left, right)], **options}
        convolved = functools.partial(jax.lax.conv_general_dilated, **of_padding)
        programs.append((convolved, (2, 5, 16), (4, 16, 24)))
    for program, *shapes in programs:
        compiled = jax.jit(program).lower(*map(jnp.ones, shapes)).compile()
        assert (" convolution(" in compiled.as_text()) == (
            len(shapes[0]) == 3 and shapes[0][1] == 5
        )
        found = sum(row.total for row in table_of(compiled.as_text()).of("matmul"))
        assert found == compiled.cost_analysis()["flops"] > 0, program


# ---- the training step ---------------------------------------------------------------------------


@functools.cache
def training_step(mesh: str, **training) -> tuple[str, CompiledStep]:
    text = step_text.compile_step(mesh, **training).as_text()
    return text, table_of(text, dict(tiny.mesh(mesh).shape))


@pytest.mark.long
def test_collectives_are_those_that_another_reader_counts():
    text, table = training_step("r=2 d=2 t=2")
    counted = step_text.collectives(text)
    found = collections.defaultdict(collections.Counter)
    for row in table.of("collective"):
        where = row.where.removesuffix(", again")
        found[where][row.what] += row.count
    # The gradients of a layer's nine weights over r: one operation.
    assert counted["backward"].pop("all-reduce") == 9
    assert found["layers, backward"].pop("all-reduce") == 1
    assert found["layers, forward"] == counted["forward"]
    assert found["layers, backward"] == counted["backward"]
    assert set(found["outside of loops"]) == set(counted["outside"])


@pytest.mark.long
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
        spec = spec.replace("/fsdp", "/c/d/e")
        assert all(f"/{axis}" in spec or f"+{axis}" in spec for axis in row.axes)
    assert {row.turns for row in forward} == {tiny.model().layers}


# ---- the table in a file -------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("part", "changes", "problem"),
    [
        (None, {"source": {"train.py:10": 3}}, "source.train.py:10 is 3; it must be a text"),
        ("rows", {"size": 1.5}, "size is 1.5; it must be a whole number"),
        ("rows", {"section": 99}, "out of range"),
    ],
)
def test_a_table_is_read_as_it_was_written_and_odd_values_are_refused(
    tmp_path, part, changes, problem
):
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
