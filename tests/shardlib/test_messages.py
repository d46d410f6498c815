"""What types and ops refuse, and what a user reads then: the place, the types of the values there,
what to do about it.

The programs, their problems and the remedies are in the files refused_*.txt. See golden.py.
"""

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np  # noqa: F401 (programs name it)
import pytest
from jax import lax

from shardlib import parsing, shardops, shardtypes
from shardlib.shardops import all_gather, einsum_unreduced, psum, psum_scatter, replicate
from shardlib.shardtypes import (
    Partial,
    ShardError,
    Subset,
    dtype_name,
    f32,
    make_shardings,
    pytree_dataclass,
    typed,
    typed_shard_map,
)
from tests.support import abstract_mesh, golden
from tests.support.abstract_mesh import MESH, OPERANDS, drop

pytestmark = pytest.mark.quick

OPS, TYPES, EDITS = (
    Path(__file__).parent / f"refused_{theme}.txt" for theme in ("ops", "types", "edits")
)


def names() -> dict:
    """All that programs may name."""
    return {**vars(parsing), **vars(shardops), **vars(shardtypes), **globals()}


# ---- ops: programs on the blocks of the operands of abstract_mesh.py -----------------------------


def down(h, w_down) -> Partial:
    return einsum_unreduced(
        "B/d L F/t, F/t M -> B/d L M +t", h, all_gather("F/t M/d -> F/t M", w_down)
    )


def scattered(h, w_down):
    return psum_scatter("B/d L M +t -> B/d L/t M", down(h, w_down))


def total(h) -> Partial:
    return einsum_unreduced("B/d L F/t -> B/d L +t", h)


def own_gradient(h, wrong: bool) -> Partial:
    """`total` with a gradient of its own, which uses that of the partial sum as a partial sum if
    `wrong`.
    """
    own = jax.custom_vjp(total)

    def spread(g):
        return jnp.broadcast_to(lax.pcast(g, "t", to="varying")[..., None], h.shape)

    def reduced(g):
        return psum("B/d L +t -> B/d L", g) if wrong else jax.tree.leaves(g)[0]

    own.defvjp(lambda h: (total(h), None), lambda _, g: (spread(reduced(g)),))
    return own(h)


def drop_sum(p):
    return psum("+d ->", einsum_unreduced("B/d L -> +d", psum("B/d L +t -> B/d L", p)))


@typed
def activation(y: f32["B/d L M"]) -> f32["B/d L M"]:
    return jax.nn.silu(y)


@typed
def with_local(y, reduce: bool) -> f32["B/d L M"]:
    z: f32["B/d L M"] = psum("B/d L M +t -> B/d L M", y) if reduce else y
    return z


@typed
def per_device_loss(losses: f32["B/d L"]) -> f32[""]:
    return jnp.mean(losses)


@typed
def global_loss(losses: f32["B/d L"]) -> f32[""]:
    return psum("+d ->", einsum_unreduced("B/d L -> +d", losses))


def copied(rows):
    return replicate("... -> ... *t", rows)


def copies(bias):
    return replicate("M -> M *d", bias)


def scaled(x, bias):
    return einsum_unreduced("B/d L/t M, M -> B/d L/t M", x, bias)


def product_with_gathered(small):
    """On every device of t the same: right, but without a gradient with respect to `small`."""
    small = all_gather("F/t U -> F U", small)
    return einsum_unreduced("F U, F ->", small, jnp.ones(12))


def on_blocks(statement: ast.stmt) -> None:
    """Traces an expression of the operands that it names; in `result: T = expression`, T is the
    type of its result.
    """
    every = [node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)]
    used = [name for name in OPERANDS if name in every]
    code = compile(ast.Expression(statement.value), golden.FILE, "eval")
    has_type = isinstance(statement, ast.AnnAssign)

    def body(*operands):
        value = eval(code, names() | dict(zip(used, operands, strict=True)))
        return value if has_type else drop(value)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    body.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in used])
    abstract_mesh.on_mesh(body, eval(ast.unparse(statement.annotation)) if has_type else f32[""])


@pytest.mark.parametrize("name", golden.read(OPS))
def test_an_op(name):
    golden.check(OPS, name, lambda program: golden.refused(program, on_blocks))


# ---- types ---------------------------------------------------------------------------------------

W = TypeVar("W")
act = dtype_name("act")


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]
    bias: f32["F/t"] | None


@pytree_dataclass
class Plain:
    w: f32["M F"]
    bias: f32["F"] | None


@pytree_dataclass
class Other:
    a: f32["M"]


@pytree_dataclass
class Moments(Generic[W]):
    weights: W
    second: Subset[W]


@pytree_dataclass
class Loose:
    w: f32["M"]
    count: jax.Array


@pytree_dataclass
class Scaled:
    w: f32["M/d"]
    scale: float = dataclasses.field(metadata={"static": True})


def ones(*sizes: int):
    return jnp.ones(sizes)


def shape(*sizes: int, dtype=jnp.float32, type=None):
    sharding = None if type is None else lambda: make_shardings(type)
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding and in_mesh(sharding))


def in_mesh(fn):
    with jax.sharding.use_abstract_mesh(MESH):
        return fn()


def on_mesh(fn, *args):
    return in_mesh(lambda: jax.eval_shape(fn, *args))


@typed_shard_map
def identity(x: f32["B/d M"]) -> f32["B/d M"]:
    return x


def executing():
    namespace = names()
    return lambda node: exec(compile(ast.Module([node], []), golden.FILE, "exec"), namespace)


@pytest.mark.parametrize("name", golden.read(TYPES))
def test_a_type(name):
    golden.check(TYPES, name, lambda program: golden.refused(program, executing()))


# ---- edits of a model: what JAX refuses, too -----------------------------------------------------

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


def traced(edit: str) -> None:
    """Traces the model with `edit` in its place, on a mesh without devices."""
    module = {"__name__": "model"}
    exec(compile(golden.in_file(MODEL.replace("EDIT", edit), "<model>"), "<model>", "exec"), module)
    weights = module["Layer"](up=shape(8, 12), down=shape(12, 8))
    on_mesh(module["step"], shape(4, 6, 8), weights, shape(8), shape(4, 6, dtype=jnp.int32))


def message_of(edit: str) -> str:
    with pytest.raises(ShardError, match=": ") as raised:
        traced(edit)
    return str(raised.value)


@pytest.mark.parametrize("name", golden.read(EDITS))
def test_an_edit(name):
    golden.check(EDITS, name, message_of)


# of a file each: all of a message, with the types of the values and where they come from
MESSAGES = {
    (OPS, "sum over this device's block alone"): """\
tests/support/abstract_mesh.py:…: fn, result: f32['B/d L']: PROBLEM
  made at <program>:2, as the sum of this device's block alone
  value: f32[2,6] {varying over t, d}
  sizes so far: B=4, L=6, F=12; mesh: d=2, t=2
  remedy: """,
    (OPS, "reduction twice"): """\
<program>:2: psum('B/d L +t -> B/d L'): operand 1 `B/d L +t`: PROBLEM
  made at tests/support/abstract_mesh.py:…
  operand 1: `B/d L`, f32[2,6] {varying over d}
  sizes so far: B=4, L=6, F=12; mesh: d=2, t=2
  remedy: """,
    (TYPES, "size of an argument"): """\
<program>:6: same, argument y: f32['B N']: size mismatch: PROBLEM
  value: f32[5,4]
  sizes so far: B=2, M=3; mesh: none
  remedy: """,
    (EDITS, "the same in an expression over several lines"): """\
<model>:28: `x * jnp.exp(hidden[..., :1])`: mul got incompatible shapes for broadcasting: PROBLEM
  x: `B/d L/t M`, f32[2,3,8] {varying over t, d}
  hidden: `B/d L F/t`, f32[2,6,6] {varying over t, d}
  sizes so far: B=4, L=6, M=8, F=12; mesh: d=2, t=2
  remedy: """,
}


@pytest.mark.parametrize(("file", "name"), MESSAGES)
def test_a_message_has_the_place_and_the_values_too(file, name):
    program, _ = golden.read(file)[name]
    runs = {
        OPS: lambda: golden.refused(program, on_blocks),
        TYPES: lambda: golden.refused(program, executing()),
        EDITS: lambda: message_of(program),
    }
    shown = re.escape(MESSAGES[file, name]).replace("PROBLEM", ".*").replace("…", r"\d+")
    assert re.match(shown, runs[file]())


# ---- partial sums and copies meet functions that know nothing of them ----------------------------

# Of a partial sum or copy p, f32[2,6] on a device.
REFUSED = """
jnp.exp(p)
jnp.where(True, p, 0)
jnp.einsum('bl->b', p)
jnp.ones((3, 2)) @ p
jnp.stack([p, p])
lax.add(p, p)
np.ones((2, 6)) * p
jax.jit(jnp.exp)(p)
p**2
2.0**p
p + 1
p - 1
p * p
p / p
1 / p
p[0]
p < 0
jnp.ones((2, 6)) * p
p == 0
1 if p else 0
list(p)
p.value
p.sum()
""".strip().splitlines()
LINEAR = ["p * 2", "0.5 * p", "p / 2", "p - p", "-p", "p + 0", "sum([p, p])"]
PARTIAL = r"f32\[2,6\], a partial sum over t(.|\n)*remedy: .*reduce it over t first"
COPY = r"f32\[2,6\], a copy on each device of t(.|\n)*remedy: use it through "


def of(expression: str, p):
    return eval(expression, {**names(), "p": p})


@pytest.mark.parametrize("expression", REFUSED + LINEAR)
def test_partial_sums_and_copies_are_refused_in_all_but_what_is_linear(expression):
    def of_sum(h):
        return drop(of(expression, total(h)))

    def of_copy(losses):
        return drop(of(expression, replicate("... -> ... *t", losses)))

    def reduced(h):
        return psum("B/d L +t -> B/d L", of(expression, total(h)))

    if expression in LINEAR:
        abstract_mesh.on_mesh(reduced, f32["B/d L"])
    else:
        with pytest.raises(ShardError, match=PARTIAL):
            abstract_mesh.on_mesh(of_sum)
    if expression != "p[0]":  # a part of a copy is one
        with pytest.raises(ShardError, match=COPY):
            abstract_mesh.on_mesh(of_copy)
