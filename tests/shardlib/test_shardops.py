"""Each op against the dense computation on whole arrays, values and gradients; and that typed ops
add no operation.

The ops and the dense computations are in right_ops.txt.
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from shardlib import shardops, zigzag
from shardlib.shardops import all_gather, einsum_unreduced, psum, replicate
from shardlib.shardtypes import bf16, f32, f64, i32, typed, typed_shard_map
from tests.support import golden

SIZES = {"B": 8, "L": 8, "M": 16, "N": 8, "F": 24, "V": 32, "K": 8, "Q": 4, "D": 6}
SIZES |= {"layers": 3, "1": 1, "2": 2}


@functools.cache
def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(sizes.values())]
    types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=types, devices=devices)


# ---- what the expressions of right_ops.txt name --------------------------------------------------


def down(h, w):
    return einsum_unreduced("B/d F/t, F/t M -> B/d M +t", h, all_gather("F/t M/d -> F/t M", w))


def of_whole(x, part):
    x = all_gather("B/d M/t -> B/d M", x)
    return einsum_unreduced("B/d M, M F/t -> B/d F/t", x, part)


def of_copies(x, w):
    return einsum_unreduced(
        "F/t, F/t M -> M +t", replicate("F/t -> F/t *d", x), replicate("F/t M -> F/t M *d", w)
    )


def squares(x):
    return einsum_unreduced("B/d M/t, B/d M/t -> +t +d", x, x)


@typed
def typed_down(h: f32["B/d F/t"], w: f32["F/t M/d"]) -> f32["B/d M +t"]:
    return down(h, w)


@typed
def typed_half(h: f32["B/d F/t"], w: f32["F/t M/d"]) -> f32["B/d M +t"]:
    half: f32["B/d M +t"] = 0.5 * down(h, w)
    return half


@jax.custom_vjp
def own_product(h, w):
    return einsum_unreduced("B/d F/t, F/t M -> B/d M +t", h, w)


def own_gradients(operands, g):
    (h, w), (g,) = operands, jax.tree.leaves(g)
    of_w = einsum_unreduced("B/d F/t, B/d M -> F/t M +d", h, g)
    return einsum_unreduced("B/d M, F/t M -> B/d F/t", g, w), *jax.tree.leaves(of_w)


own_product.defvjp(lambda h, w: (own_product(h, w), (h, w)), own_gradients)


@jax.custom_vjp
def doubled(p):
    return p + p


doubled.defvjp(lambda p: (doubled(p), None), lambda _, g: (g * 2,))


def scan_over(stack, x, product):
    return lax.scan(lambda x, w: (jnp.tanh(product(x, w)), None), x, stack)[0]


# ---- against dense -------------------------------------------------------------------------------

CASES = golden.read(Path(__file__).parent / "right_ops.txt")
"""An expression of blocks, and the same of whole arrays. The first line has their types, f32 but
for ids, i."""
IDS = i32["B/d L"]


def typed_body(body: Callable, operands, result):
    """`body` under typed_shard_map, with these types on its arguments and result."""

    def fn(*args):
        return body(*args)

    names = [f"x{i}" for i in range(len(operands))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fn.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    fn.__annotations__ = dict(zip(names, operands, strict=True)) | {"return": result}
    return typed_shard_map(fn)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op on blocks, and the same on whole arrays."""

    body: Callable
    operands: tuple
    result: object
    dense: Callable
    gradients: bool = True

    @property
    def typed(self) -> Callable:
        return typed_body(self.body, self.operands, self.result)

    def arrays(self) -> list[np.ndarray]:
        return [random_array(t, seed) for seed, t in enumerate(self.operands)]


def random_array(t, seed: int) -> np.ndarray:
    def whole(name):
        return SIZES.get(name) or math.prod(SIZES[letter] for letter in name)

    rng, shape = np.random.default_rng(seed), [whole(dim.name) for dim in t.spec.dims]
    if t is IDS:
        return rng.integers(0, SIZES["V"], shape).astype(np.int32)
    return rng.normal(size=shape).astype(np.float32)


def case_of(name: str, block: int) -> Case:
    program, dense = CASES[name]
    types, _, body = program.partition("\n")
    operands, result = types.split("->")
    specs = {key.strip(): spec for key, spec in (x.split(":") for x in operands.split(","))}
    known = {**vars(shardops), **globals(), "BLOCK": block}

    def run(text):
        return lambda *args: eval(f"({text})", known | dict(zip(specs, args, strict=True)))

    types = tuple(IDS if key == "i" else f32[spec] for key, spec in specs.items())
    return Case(run(body), types, f32[result], run(dense), gradients="pmax" not in name)


def values_and_gradients(functions: dict, cases: dict[str, Case]) -> dict[str, list]:
    """Of each function on random arrays the value, and the gradients of a weighted sum of it.

    They are one program.
    """

    def of(fn, arrays, case):
        if not case.gradients:
            return [fn(*arrays)]
        floats = tuple(i for i, t in enumerate(case.operands) if t.dtype == "f32")

        def weighted(*args):
            out = fn(*args)
            weights = np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
            return jnp.sum(out * weights), out

        (_, out), grads = jax.value_and_grad(weighted, argnums=floats, has_aux=True)(*arrays)
        return [out, *grads]

    arrays = {name: cases[name].arrays() for name in functions}
    return jax.jit(
        lambda arrays: {name: of(functions[name], arrays[name], cases[name]) for name in functions}
    )(arrays)


def test_ops_against_dense():
    d, t = 2, 4
    cases = {name: case_of(name, 16 // (d * t)) for name in CASES}
    for shift in (1, -1):
        body = functools.partial(shardops.ppermute, "B/d M/t", axis="t", shift=shift)
        rolled = functools.partial(jnp.roll, shift=shift * 16 // t, axis=1)
        cases[f"ppermute by {shift}"] = Case(body, (f32["B/d M/t"],), f32["B/d M/t"], rolled)
    with jax.set_mesh(mesh_of(d=d, t=t)):
        found = values_and_gradients({name: case.typed for name, case in cases.items()}, cases)
    with jax.set_mesh(mesh_of(one=1)):
        expected = values_and_gradients({name: case.dense for name, case in cases.items()}, cases)
    wrong = []
    for name, arrays in found.items():
        for x, y in zip(arrays, expected[name], strict=True):
            try:
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * np.max(np.abs(y)))
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def test_each_op_is_compared_with_dense():
    named = set(re.findall(r"\w+", " ".join(program for program, _ in CASES.values())))
    elsewhere = {"ppermute", "zigzag", "alone", "products"}
    assert set(shardops.__all__) - named == elsewhere


def test_sums_are_of_the_preferred_dtype():
    def body(x):
        sums = einsum_unreduced("B/d, B/d -> +d", x, x, preferred_element_type=jnp.float64)
        return psum("+d ->", sums)

    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    with jax.enable_x64(True), jax.set_mesh(mesh_of(d=1, t=1)):
        found = jax.jit(typed_body(body, (f32["B/d"],), f64[""]))(x)
    np.testing.assert_allclose(found, np.sum(x.astype(np.float64) ** 2), rtol=1e-14)


# ---- no added operation --------------------------------------------------------------------------


def test_gradients_of_a_product_are_products_in_the_operands_dtype():
    """Behind a result that is wider than they are, too: an accelerator multiplies f32 many times
    slower than bf16.
    """

    def body(x, w):
        def loss(x, w):
            wide = einsum_unreduced("L M, M F -> L F", x, w, preferred_element_type=jnp.float32)
            return jnp.sum(wide**2)

        return jax.grad(loss, argnums=(0, 1))(x, w)

    types = bf16["L M"], bf16["M F"]
    with jax.set_mesh(mesh_of(d=4, t=2)):
        args = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4), jnp.bfloat16)
        text = jax.jit(typed_body(body, types, tuple[types])).lower(*args).as_text()
    dots = re.findall(r"stablehlo.dot_general.*: \((.*)\) ->", text)
    assert len(dots) == 3
    assert not any("f32" in dot.replace("bf16", "") for dot in dots)


@pytest.mark.parametrize(("in_stage", "op"), [(False, "collective_permute"), (True, "all_to_all")])
def test_a_permute_within_a_stage_is_among_the_devices_of_its_axis(in_stage, op):
    with jax.set_mesh(mesh_of(d=2, t=2)):

        @typed_shard_map
        def swap(x: f32["B/t"]) -> f32["B/t"]:
            return zigzag.permuted(x, "t", [(0, 1), (1, 0)], in_stage)

        lowered = jax.jit(swap).lower(jnp.zeros(8)).as_text()
    assert re.findall(r"stablehlo\.(collective_permute|all_to_all)", lowered) == [op]
