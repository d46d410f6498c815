"""What a user reads of a wrong edit: the line of the edit, the types of the values there, what to do about it."""

import linecache
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from abstract_mesh import MESH

from shardlib.shardtypes import ShardError

pytestmark = pytest.mark.quick

FILE = "<model>"
MODEL = """
import dataclasses
import functools
import jax
import jax.numpy as jnp
from jax import lax
from shardlib import shardops
from shardlib.shardtypes import f32, i32, pytree_dataclass, typed, typed_shard_map

@pytree_dataclass
class Layer:
    up: f32["M/d F/t"]
    down: f32["F/t M/d"]

def squared(x):
    return jnp.square(x)

@typed
def layer(x: f32["B/d L/t M"], w: Layer, bias: f32["M"], ids: i32["B/d L"]) -> f32["B/d L/t M"]:
    whole = shardops.all_gather("B/d L/t M -> B/d L M", x)
    up = shardops.all_gather("M/d F/t -> M F/t", w.up)
    hidden: f32["B/d L F/t"] = shardops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", whole, up)
    half = hidden.astype(jnp.bfloat16)
    down = shardops.all_gather("F/t M/d -> F/t M", w.down)
    out = shardops.einsum_unreduced("B/d L F/t, F/t M -> B/d L M +t", hidden, down)
    y = shardops.psum_scatter("B/d L M +t -> B/d L/t M", out)
    EDIT
    return x + y

@typed_shard_map
def step(x: f32["B/d L/t M"], w: Layer, bias: f32["M"], ids: i32["B/d L"]) -> f32["B/d L/t M"]:
    return layer(x, w, bias, ids)
"""
LINE = MODEL[: MODEL.index("EDIT")].count("\n") + 1

X = "x: `B/d L/t M`, f32[2,3,8] {varying over t, d}"
Y = "y: `B/d L/t M`, f32[2,3,8] {varying over t, d}"
HIDDEN = "hidden: `B/d L F/t`, f32[2,6,6] {varying over t, d}"
BIAS = "bias: `M`, f32[8] {the same on every device}"
MISSING = (
    "a gather or a reduction over t is missing before this point (all_gather, psum_scatter, psum), "
    "or the spec lacks `/t` on the dim sharded over it, or `+t` for a partial sum"
)
GATHER_X = (
    "dim L/t of x has a block of 3 here, where the other has 6: all_gather('B/d L/t M -> B/d L M', x) first, "
    "or shard the other over t too"
)
GATHERED = (
    "give the gathered array to einsum_unreduced, index_unreduced or broadcast: its gradient is a partial sum over d, "
    "which jax.numpy does not know; or compute on the blocks before the gather, shard another dim in place of this one "
    "with all_to_all, or have a plain array that is the same on all devices: all_gather(..., replicated=True)"
)
CONSTANT = (
    "if it is to be the same on every device of t, d, reduce or gather it over t, d (psum, all_gather); if it differs, "
    "and only starts as a constant: jax.lax.pcast(c, ('t', 'd'), to='varying')"
)
EQUAL = "make {} and {} equal; inside shard_map an array has the shape of this device's block"

# The edit; what follows its line number in the message; the values that are shown, None for those of an op or an
# annotation, which test_shardlib_rejections.py has; the remedy.
EDITS = {
    # -- refused by shardlib
    "partial sum given to jax.numpy": (
        "y = x + out",
        "a jax.numpy or jax.lax function was given f32[2,6,8], a partial sum over t, made by "
        "einsum_unreduced(B/d L F/t, F/t M -> B/d L M +t)",
        None,
        "reduce it over t first, with psum_scatter or psum",
    ),
    "op on a value of another type": (
        "z = shardops.einsum_unreduced('B/d L M, M -> B/d L', x, bias)",
        "einsum_unreduced('B/d L M, M -> B/d L'): operand 1 `B/d L M`: the value differs between devices of t, which "
        "`B/d L M` does not mention",
        ["operand 1: " + X[3:], "operand 2: " + BIAS[6:]],
        MISSING,
    ),
    "annotated local": (
        "z: f32['B/d L M'] = x * 2",
        "layer, local z: f32['B/d L M']: the value differs between devices of t, which `B/d L M` does not mention",
        ["value: like " + X[3:]],
        MISSING,
    ),
    "spec that does not parse": (
        "z = shardops.psum('B/d L M +t B -> B', out)",
        "psum('B/d L M +t B -> B'): in spec 'B/d L M +t B', 'B' comes after a + or * mark",
        ["operand 1: `B/d L M +t`, f32[2,6,8], a partial sum over t"],
        "write all dims first",
    ),
    "argument of another typed function": (
        "z = layer(whole, w, bias, ids)",
        "layer, argument x: f32['B/d L/t M']: the value was gathered over t, but `B/d L/t M` says it is sharded "
        "over it",
        ["value: `B/d L M`, f32[2,6,8] {varying over d; gathered over t}"],
        "drop the gather, or the axis from the spec",
    ),
    "replicated operand": (
        "z = shardops.einsum_unreduced('B/d L/t M, M -> B/d L/t M', x, bias)",
        "einsum_unreduced('B/d L/t M, M -> B/d L/t M'): operand 2 `M` is the same on every device of t, d, over which "
        "the result varies: its gradient would be all-reduced over t, d unseen",
        ["operand 1: " + X[3:], "operand 2: " + BIAS[6:]],
        "say so once, where operand 2 is made: x = replicate('... -> ... *t *d', x)",
    ),
    # -- refused by JAX
    "one operand a block, the other whole": (
        "z = x + whole",
        "`x + whole`: add got incompatible shapes for broadcasting: (2, 3, 8), (2, 6, 8)",
        [X, "whole: `B/d L M`, f32[2,6,8] {varying over d; gathered over t}"],
        GATHER_X,
    ),
    "the same in an expression over several lines": (
        "z = (y +\n         x *\n         jnp.exp(hidden[..., :1]))",
        "`x * jnp.exp(hidden[..., :1])`: mul got incompatible shapes for broadcasting: (2, 3, 8), (2, 6, 1)",
        [X, HIDDEN],
        GATHER_X,
    ),
    "value without a type of its own": (
        "z = half * x",
        "`half * x`: mul got incompatible shapes for broadcasting: (2, 6, 6), (2, 3, 8)",
        ["half: like `B/d L F/t`, bf16[2,6,6] {varying over t, d}", X],
        GATHER_X,
    ),
    "contraction of a whole dim with a block": (
        "z = x @ w.down.T",
        "`x @ w.down.T`: dot_general requires contracting dimensions to have the same shape, got (8,) and (4,)",
        [X, "w.down: `F/t M/d`, f32[6,4] {varying over t, d}"],
        "dim M/d of w.down has a block of 4 here, where the other has 8: all_gather('F/t M/d -> F/t M', w.down) first, "
        "or shard the other over d too",
    ),
    "einsum of different dims": (
        "z = jnp.einsum('blf,fm->blm', x, w.down)",
        "`jnp.einsum('blf,fm->blm', x, w.down)`: Size of label 'f' for operand 1 (8) does not match previous terms (6)",
        [X, "w.down: `F/t M/d`, f32[6,4] {varying over t, d}"],
        EQUAL.format(6, 8),
    ),
    "gathered with replicated": (
        "z = down * bias",
        "`down * bias`: an array that was gathered over d meets one that was not, f32[1,8] {varying over t}",
        ["down: `F/t M`, f32[6,8] {varying over t; gathered over d}", BIAS],
        GATHERED,
    ),
    "carry that begins to differ": (
        "z, _ = lax.scan(lambda c, _: (c + x[0, 0], None), bias, None, length=2)",
        "the carry c of scan goes in as f32[8] {the same on every device} and comes out as f32[8] {varying over t, d}",
        [X, BIAS],
        CONSTANT,
    ),
    "carry of a while_loop": (
        "z = lax.while_loop(lambda c: True, lambda c: c + x[0, 0], bias)",
        "`lax.while_loop(lambda c: True, lambda c: c + x[0, 0], bias)`: the carry c of while_loop goes in as "
        "f32[8] {the same on every device} and comes out as f32[8] "
        "{varying over t, d}",
        [X, BIAS],
        CONSTANT,
    ),
    "carry in another dtype": (
        "z, _ = lax.scan(lambda c, _: (c.astype(jnp.bfloat16), None), x, None, length=2)",
        "the carry c of scan goes in as f32[2,3,8] {varying over t, d} and comes out as bf16[2,3,8] {varying "
        "over t, d}",
        [X],
        "cast one of them with .astype: f32 and bf16",
    ),
    "branches that differ": (
        "z = lax.cond(True, lambda: x[0, 0], lambda: bias)",
        "`lax.cond(True, lambda: x[0, 0], lambda: bias)`: true_fun gives f32[8] {varying over t, d} and "
        "false_fun gives "
        "f32[8] {the same on every device}",
        [X, BIAS],
        CONSTANT.replace("pcast(c", "pcast(x"),
    ),
    "reshape to whole sizes": (
        "z = hidden.reshape(4, 6, 12)",
        "`hidden.reshape(4, 6, 12)`: cannot reshape array of shape (2, 6, 6) (size 72) into shape (4, 6, 12) "
        "(size 288)",
        [HIDDEN],
        "inside shard_map an array has the shape of this device's block: take sizes from x.shape, not from the "
        "configuration",
    ),
    "dims that are matched from the last": (
        "z = x + jnp.max(x, axis=-1)",
        "`x + jnp.max(x, axis=-1)`: Incompatible shapes for broadcasting: shapes=[(2, 3, 8), (2, 3)]",
        [X],
        "dims are matched from the last: x[..., None] adds a dim of 1 there",
    ),
    "list of arrays": (
        "parts = [x, whole]; z = jnp.stack(parts)",
        "`jnp.stack(parts)`: All input arrays must have the same shape. Got (2, 3, 8), (2, 6, 8)",
        [
            X.replace("x:", "parts[0]:"),
            "parts[1]: `B/d L M`, f32[2,6,8] {varying over d; gathered over t}",
        ],
        GATHER_X.replace(" x", " parts[0]"),
    ),
    "dim that does not exist": (
        "z = jnp.mean(x, axis=3)",
        "`jnp.mean(x, axis=3)`: tuple index out of range",
        [X],
        "",
    ),
}


def trace(edit: str) -> None:
    """Traces the model with `edit` in its place, on a mesh without devices."""
    source = MODEL.replace("EDIT", edit)
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    module = {"__name__": "model"}
    exec(compile(source, FILE, "exec"), module)
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)
    weights = module["Layer"](up=shape(8, 12), down=shape(12, 8))
    with jax.sharding.use_abstract_mesh(MESH):
        jax.eval_shape(module["step"], shape(4, 6, 8), weights, shape(8), shape(4, 6, dtype=jnp.int32))


def test_the_model_without_an_edit():
    trace("")


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_edit(name):
    edit, problem, values, remedy = EDITS[name]
    with pytest.raises(ShardError) as raised:
        trace(edit)
    first, *shown = str(raised.value).splitlines()
    line = LINE + (name == "the same in an expression over several lines")
    assert first == f"{FILE}:{line}: {problem}"
    *context, last = shown if remedy else [*shown, None]
    assert last == (f"  remedy: {remedy}" if remedy else None)
    if values is not None:
        assert context[:-1] == [f"  {value}" for value in values]
        assert re.fullmatch("  sizes so far: (none|B=4, L=6, M=8.*); mesh: d=2, t=2", context[-1])


def test_a_result_is_refused_at_its_return():
    result = r"layer, result: f32\['B/d L/t M'\]: the value was gathered over t"
    with pytest.raises(ShardError, match=rf"^{FILE}:{LINE + 1}: {result}"):
        trace("x, y = whole, whole")
    with pytest.raises(ShardError, match=rf"^{FILE}:{LINE - 8}: {result}"):  # of several, at its def
        trace("if len(bias): return whole")


def test_the_innermost_line_of_the_user_is_shown():
    with pytest.raises(ShardError, match=rf"^{FILE}:{LINE - 11}: `jnp.square\(x\)`: ") as raised:
        trace("z = squared(None)")
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        ("z = int('seven')", ValueError),
        ("a, b = x.shape", ValueError),
        ("z = x + None", TypeError),
        ("z = layer(x)", TypeError),
        ("z = w.gate", AttributeError),
        ("z = 1 if x[0, 0, 0] > 0 else 2", jax.errors.TracerBoolConversionError),
        ("raise ValueError('shape')", ValueError),
    ],
)
def test_other_errors_stay_as_they_are(edit, error):
    with pytest.raises(error) as raised:
        trace(edit)
    assert type(raised.value) is error


def test_outside_of_jit_where_jax_removes_its_frames():
    source = textwrap.dedent(
        """
        import jax.numpy as jnp
        from shardlib.shardtypes import f32, typed

        @typed
        def add(x: f32["B M"], y: f32["M"]) -> f32["B M"]:
            return x + y[:3]
        """
    )
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    module = {"__name__": "model"}
    exec(compile(source, FILE, "exec"), module)
    with pytest.raises(ShardError, match=rf"^{FILE}:7: `x \+ y\[:3\]`: .*\n  x: f32\[2,4\]\n  y: f32\[4\]\n"):
        module["add"](jnp.ones((2, 4)), jnp.ones(4))
