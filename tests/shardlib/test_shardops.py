"""Each op against the dense computation on whole arrays, values and gradients; and that typed ops
add no operation.

The ops and the dense computations are in right_ops.txt.
"""

import collections
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
from jax.sharding import AxisType, PartitionSpec

from shardlib import shardops
from shardlib.shardops import (
    all_gather,
    einsum_unreduced,
    ppermute,
    psum,
    psum_scatter,
    rearrange,
    replicate,
)
from shardlib.shardtypes import (
    Array,
    Partial,
    bf16,
    f32,
    f64,
    i32,
    pytree_dataclass,
    typed,
    typed_shard_map,
)
from tests.support import golden

SIZES = {
    "B": 8,
    "L": 8,
    "M": 16,
    "N": 8,
    "F": 24,
    "V": 32,
    "K": 8,
    "Q": 4,
    "D": 6,
    "layers": 3,
    "1": 1,
}


@functools.cache
def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    axis_types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=devices
    )


@pytest.fixture(params=["d=2 t=4", pytest.param("one device", marks=pytest.mark.long)])
def mesh(request):
    # in a ring of two each shift is the other
    d, t = (1, 1) if request.param == "one device" else (2, 4)
    with jax.set_mesh(mesh_of(d=d, t=t)):
        yield {"d": d, "t": t}


def random_array(t, seed: int) -> np.ndarray:
    def whole(name):
        return SIZES.get(name) or math.prod(SIZES[letter] for letter in name)

    rng, shape = np.random.default_rng(seed), [whole(dim.name) for dim in t.spec.dims]
    return (
        rng.integers(0, SIZES["V"], shape).astype(np.int32)
        if t is ids
        else rng.normal(size=shape).astype(np.float32)
    )


ids = i32["B/d L"]


def typed_body(body: Callable, operands, result):
    """`body` under typed_shard_map, with these types on its arguments and result."""

    def fn(*args):
        return body(*args)

    names = [f"x{i}" for i in range(len(operands))]
    fn.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
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


def values_and_gradients(functions: dict, cases: dict[str, Case]) -> dict[str, list]:
    """Of each function on random arrays the value, and the gradients of a weighted sum of it.

    They are one program.
    """

    def of(fn, arrays, case):
        floats = tuple(i for i, t in enumerate(case.operands) if t.dtype == "f32")

        def weighted(*args):
            out = fn(*args)
            return jnp.sum(
                out * np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
            ), out

        if not case.gradients:
            return [fn(*arrays)]
        (_, out), grads = jax.value_and_grad(weighted, argnums=floats, has_aux=True)(*arrays)
        return [out, *grads]

    arrays = {
        name: [random_array(t, seed) for seed, t in enumerate(cases[name].operands)]
        for name in functions
    }
    return jax.jit(
        lambda arrays: {name: of(functions[name], arrays[name], cases[name]) for name in functions}
    )(arrays)


def assert_same_values_and_gradients(cases: dict[str, Case]) -> None:
    """Each op on the blocks of random arrays, on the mesh in force, against whole arrays."""
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


def down(h, w):
    return einsum_unreduced("B/d F/t, F/t M -> B/d M +t", h, all_gather("F/t M/d -> F/t M", w))


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


CASES = golden.read(Path(__file__).parent / "right_ops.txt")
"""An expression of blocks, and the same of whole arrays. The first line has their types, f32 but
for ids, i."""


def case_of(name: str) -> Case:
    program, dense = CASES[name]
    types, _, body = program.partition("\n")
    operands, result = types.split("->")
    operands = dict(operand.split(":") for operand in operands.split(","))
    operands = {
        name.strip(): ids if name.strip() == "i" else f32[spec] for name, spec in operands.items()
    }
    known = {**vars(shardops), **globals()}

    def run(text):
        return lambda *args: eval(f"({text})", known | dict(zip(operands, args, strict=True)))

    return Case(
        run(body), tuple(operands.values()), f32[result], run(dense), gradients="pmax" not in name
    )


def test_ops_against_dense(mesh):
    cases = {name: case_of(name) for name in CASES}
    if math.prod(mesh.values()) == 1:
        # Differentiated around a shard_map over one device, JAX does not compile a partial sum kept
        # for the backward.
        for name in [name for name in cases if "a partial sum times a" in name]:
            cases[name] = dataclasses.replace(cases[name], gradients=False)
    for shift in (1, -1):
        body = functools.partial(ppermute, "B/d M/t", axis="t", shift=shift)
        rolled = functools.partial(jnp.roll, shift=shift * 16 // mesh["t"], axis=1)
        cases[f"ppermute by {shift}"] = Case(body, (f32["B/d M/t"],), f32["B/d M/t"], rolled)
    assert_same_values_and_gradients(
        cases | {f"rearrange {seed}": random_rearrange(seed) for seed in range(2)}
    )


def test_axis_size_and_index(mesh):
    def body(x):
        assert (
            shardops.axis_size("t d")
            == shardops.axis_size("t") * shardops.axis_size("d")
            == mesh["d"] * mesh["t"]
        )
        block = shardops.axis_index("t") * shardops.axis_size("d") + shardops.axis_index("d")
        return x * 0 + block

    blocks = np.repeat(np.arange(mesh["d"] * mesh["t"]), 16 // (mesh["d"] * mesh["t"]))

    def dense(x):
        return x * 0 + blocks

    assert_same_values_and_gradients(
        {"": Case(body, (f32["M/t/d"],), f32["M/t/d"], dense, gradients=False)}
    )


def random_einsum(seed: int):
    """A random product of two or three operands: typed spec, plain formula, the operands' types and
    the axes over which they must be copies, and the type of the result before it is reduced over
    the marked axes."""
    rng = np.random.default_rng(seed)
    shardings = dict(
        zip(rng.permutation(["B", "L", "M", "N", "F"]), ["/d", "/t", "", "", ""], strict=True)
    )
    names = list(shardings)
    operands = [
        list(rng.permutation(names)[: rng.integers(2, 5)]) for _ in range(rng.integers(2, 4))
    ]
    used = sorted({name for operand in operands for name in operand})
    result = [name for name in rng.permutation(used) if rng.random() < 0.5]
    varying = {axis for name in used if (axis := shardings[name])}

    def typed_dims(dims):
        return " ".join(name + shardings[name] for name in dims)

    marks = sorted(
        f"+{shardings[name][1:]}" for name in used if name not in result and shardings[name]
    )
    spec = f"{', '.join(map(typed_dims, operands))} -> {typed_dims(result)} {' '.join(marks)}"
    formula = f"{','.join(''.join(operand) for operand in operands)}->{''.join(result)}"
    copies = [
        " ".join(sorted(f"*{a[1:]}" for a in varying - {shardings[n] for n in operand}))
        for operand in operands
    ]
    return (
        spec,
        formula,
        [f32[typed_dims(operand)] for operand in operands],
        copies,
        f32[typed_dims(result)],
        marks,
    )


def einsum_case(seed: int) -> Case:
    spec, formula, types, copies, result, marks = random_einsum(seed)

    def body(*operands):
        marked = [
            replicate(f"... -> ... {copy}", x) if copy else x
            for x, copy in zip(operands, copies, strict=True)
        ]
        out = einsum_unreduced(spec, *marked)
        assert isinstance(out, Partial) == bool(marks)
        return psum(f"{result.spec} {' '.join(marks)} -> {result.spec}", out) if marks else out

    return Case(body, tuple(types), result, functools.partial(jnp.einsum, formula))


def test_random_einsums_against_jnp():
    with jax.set_mesh(mesh_of(d=2, t=4)):
        assert_same_values_and_gradients({f"seed {seed}": einsum_case(seed) for seed in range(4)})


def grouped(rng, names: list[str], shardings: dict[str, str]) -> list[list[str]]:
    """The names in groups, which a sharded name always begins."""
    groups: list[list[str]] = []
    for name in names:
        if groups and not shardings[name] and rng.random() < 0.5:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def random_rearrange(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    names = ["B", "L", "K", "Q", "D"]
    shardings = dict.fromkeys(names, "") | ({"B": "/d", "K": "/t"} if seed % 2 else {"K": "/t/d"})
    sides = [grouped(rng, list(rng.permutation(names)), shardings) for _ in range(2)]

    def dim(name):
        return name + shardings[name]

    def in_groups(side):
        return [
            f"({' '.join(map(dim, group))})" if len(group) > 1 else dim(group[0]) for group in side
        ]

    spec = " -> ".join(" ".join(in_groups(side)) for side in sides)
    flat = [[name for group in side for name in group] for side in sides]
    types = [
        f32[" ".join("".join(group) + shardings[group[0]] for group in side)] for side in sides
    ]
    split, merged = (
        [SIZES[name] for name in flat[0]],
        [math.prod(SIZES[name] for name in group) for group in sides[1]],
    )
    order = [flat[0].index(name) for name in flat[1]]
    body = functools.partial(rearrange, spec, **{name: SIZES[name] for name in names})
    return Case(
        body, (types[0],), types[1], lambda x: x.reshape(split).transpose(order).reshape(merged)
    )


def test_partial_sums_of_another_dtype():
    @typed_shard_map
    def fn(x: f32["B M/t"]) -> f32["B"]:
        low = einsum_unreduced("B M/t -> B +t", x.astype(jnp.bfloat16))
        assert (low.dtype, low.astype(jnp.float32).dtype) == (jnp.bfloat16, jnp.float32)
        return psum("B +t -> B", low.astype(jnp.float32))

    with jax.set_mesh(mesh_of(d=2, t=4)):
        np.testing.assert_array_equal(fn(np.ones((2, 8), np.float32)), 8)


# ---- no added operation --------------------------------------------------------------------------


@pytree_dataclass
class Layer:
    norm: f32["M/t/d"]
    w_up: f32["M/d F/t"]
    w_down: f32["F/t M/d"]


def rms(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)


@typed
def typed_layer(x: f32["B/d L/t M"], w: Layer) -> f32["B/d L/t M"]:
    nx = einsum_unreduced("B/d L/t M, M -> B/d L/t M", rms(x), all_gather("M/t/d -> M", w.norm))
    nx = all_gather("B/d L/t M -> B/d L M", nx)
    h: f32["B/d L F/t"] = jax.nn.silu(
        einsum_unreduced("B/d L M, M F/t -> B/d L F/t", nx, all_gather("M/d F/t -> M F/t", w.w_up))
    )
    out = einsum_unreduced(
        "B/d L F/t, F/t M -> B/d L M +t", h, all_gather("F/t M/d -> F/t M", w.w_down)
    )
    return x + psum_scatter("B/d L M +t -> B/d L/t M", out)


@typed
def typed_loss(w: Array["layers", Layer], x: f32["B/d L/t M"]) -> f32[""]:
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (typed_layer(x, w), None)), x, w)
    return psum("+t +d ->", einsum_unreduced("B/d L/t M -> +t +d", jnp.sin(x)))


def typed_step(
    w: Array["layers", Layer], x: f32["B/d L/t M"]
) -> tuple[f32[""], Array["layers", Layer]]:
    loss, grads = jax.value_and_grad(typed_loss)(w, x)
    return loss, jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)


gather = functools.partial(lax.all_gather, tiled=True)
scatter = functools.partial(lax.psum_scatter, tiled=True)


def plain_layer(x, w):
    nx = jnp.einsum("blm,m->blm", rms(x), gather(w.norm, ("t", "d")))
    nx = gather(nx, "t", axis=1)
    h = jax.nn.silu(jnp.einsum("blm,mf->blf", nx, gather(w.w_up, "d", axis=0)))
    out = jnp.einsum("blf,fm->blm", h, gather(w.w_down, "d", axis=1))
    return x + scatter(out, "t", scatter_dimension=1)


def plain_step(w, x):
    def loss(w):
        y, _ = lax.scan(jax.checkpoint(lambda x, w: (plain_layer(x, w), None)), x, w)
        return lax.psum(jnp.sum(jnp.sin(y)), ("t", "d"))

    value, grads = jax.value_and_grad(loss)(w)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)


def operations(step, *args) -> collections.Counter:
    """How often each product and collective of these sizes stands in the optimized HLO of `step`.

    Whatever the order of the dims: which one stands first is the affair of what lies between them,
    transpositions.
    """
    text = jax.jit(step).lower(*args).compile().as_text()
    opcodes = "dot|all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(
        rf"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ({opcodes})(?:-start)?\(", text, re.MULTILINE
    )

    def sizes(shape):
        return tuple(
            sorted(
                int(n)
                for n in re.findall(r"\d+", re.sub(r"\{.*?\}|[a-z]+\d+", "", shape))
                if n != "1"
            )
        )

    return collections.Counter((opcode, sizes(shape)) for shape, opcode in found)


def test_the_gradient_of_a_copy_is_reduced_where_it_was_made_not_in_the_loop():
    def all_reduces(mark):
        def body(x, w):
            def loss(w):
                return psum(
                    "+d ->", einsum_unreduced("B/d M -> +d", scan_over(mark(w), x, product))
                )

            return jax.grad(loss)(w)

        def product(x, w):
            return einsum_unreduced("B/d M, M -> B/d M", x, w)

        fn = typed_body(body, (f32["B/d M"], f32["layers M"]), f32["layers M"])
        text = (
            jax.jit(fn)
            .lower(np.ones((8, 16), np.float32), np.ones((3, 16), np.float32))
            .compile()
            .as_text()
        )
        entry = text[text.index("\nENTRY ") :]
        return len(re.findall(r" all-reduce(?:-start)?\(", entry)), len(
            re.findall(r" all-reduce(?:-start)?\(", text)
        )

    with jax.set_mesh(mesh_of(d=4, t=2)):
        inside, everywhere = all_reduces(lambda w: replicate("... -> ... *d", w))
        assert inside == everywhere > 0


@pytest.mark.slow
def test_typed_ops_compile_to_what_plain_jax_does():
    p = PartitionSpec
    specs = Layer(norm=p(None, ("t", "d")), w_up=p(None, "d", "t"), w_down=p(None, "t", "d"))
    with jax.set_mesh(mesh_of(d=4, t=2)):
        rng = np.random.default_rng(0)

        def array(shape, spec):
            return jax.device_put(rng.normal(size=shape).astype(np.float32), spec)

        w = Layer(*map(array, ((2, 16), (2, 16, 24), (2, 24, 16)), dataclasses.astuple(specs)))
        x = array((8, 4, 16), p("d", "t"))
        plain = jax.shard_map(plain_step, in_specs=(specs, p("d", "t")), out_specs=(p(), specs))
        typed = typed_shard_map(typed_step)
        counted, expected = operations(typed, w, x), operations(plain, w, x)
        assert counted == expected
        assert sum(n for (opcode, _), n in counted.items() if opcode == "reduce-scatter") == 5
        for result, reference in zip(
            jax.tree.leaves(typed(w, x)), jax.tree.leaves(plain(w, x)), strict=True
        ):
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_product_are_products_in_the_operands_dtype():
    """Behind a result that is wider than they are, too: an accelerator multiplies f32 many times
    slower than bf16.
    """

    def body(x, w):
        def loss(x, w):
            return jnp.sum(
                einsum_unreduced("L M, M F -> L F", x, w, preferred_element_type=jnp.float32) ** 2
            )

        return jax.grad(loss, argnums=(0, 1))(x, w)

    types = bf16["L M"], bf16["M F"]
    with jax.set_mesh(mesh_of(d=4, t=2)):
        fn = typed_body(body, types, tuple[types])
        text = (
            jax.jit(fn)
            .lower(jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4), jnp.bfloat16))
            .as_text()
        )
    dots = re.findall(r"stablehlo.dot_general.*: \((.*)\) ->", text)
    assert len(dots) == 3
    assert not any("f32" in dot.replace("bf16", "") for dot in dots)


def test_a_rearranged_block_is_one_transposition():
    with jax.set_mesh(mesh_of(d=2, t=2)):
        fn = typed_body(
            lambda x: rearrange("M/d N/t -> N/t M/d", x), [f32["M/d N/t"]], f32["N/t M/d"]
        )
        text = jax.jit(fn).lower(random_array(f32["M/d N/t"], 0)).as_text()
    assert text.count("stablehlo.transpose") == 1
    assert "stablehlo.reshape" not in text


def test_a_norm_transposes_nothing_on_one_cpu():
    """As written with `*` in plain JAX.

    Products of matrices and moved dims would have XLA transpose.
    """

    def gradients(norm):
        compiled = (
            jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(norm(w, x))), argnums=(0, 1)))
            .lower(w, x)
            .compile()
        )
        return len(re.findall(r" (?:transpose|copy)\(", compiled.as_text())), compiled(w, x)

    @typed_shard_map
    def typed_norm(w: f32["M/t/d"], x: f32["B/d L/t M"]) -> f32["B/d L M"]:
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
        x = einsum_unreduced("B/d L/t M, M -> B/d L/t M", x, all_gather("M/t/d -> M", w))
        return all_gather("B/d L/t M -> B/d L M", x, replicated=True)

    with jax.set_mesh(mesh_of(d=1, t=1)):
        w, x = jnp.linspace(1, 2, 64), jnp.sin(jnp.arange(16 * 32 * 64.0)).reshape(16, 32, 64)
        found, ours = gradients(typed_norm)
        plain, theirs = gradients(
            lambda w, x: w * (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)))
        )
    assert found <= plain
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_sums_are_of_the_preferred_dtype():
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    with jax.enable_x64(True), jax.set_mesh(mesh_of(d=1, t=1)):

        def body(x):
            return psum(
                "+d ->",
                einsum_unreduced("B/d, B/d -> +d", x, x, preferred_element_type=jnp.float64),
            )

        found = jax.jit(typed_body(body, (f32["B/d"],), f64[""]))(x)
    np.testing.assert_allclose(found, np.sum(x.astype(np.float64) ** 2), rtol=1e-14)
