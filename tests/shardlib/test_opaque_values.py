"""Partial sums and copies meet functions that know nothing of them: each is rejected, with what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_mesh import drop, on_mesh
from jax import lax

from shardlib.shardops import einsum_unreduced, psum, replicate
from shardlib.shardtypes import ShardError, f32

pytestmark = pytest.mark.quick


def total(h):
    return einsum_unreduced("B/d L F/t -> B/d L +t", h)


# A function of jax.numpy, jax.nn or jax.lax given a partial sum over t of shape [B/d, L].
FUNCTIONS = {
    "exp": jnp.exp,
    "where": lambda p: jnp.where(True, p, 0),
    ".value": lambda p: p.value,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "logsumexp": jax.nn.logsumexp,
    "einsum": lambda p: jnp.einsum("bl->b", p),
    "matmul": lambda p: jnp.ones((3, 2)) @ p,
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "cumsum": jnp.cumsum,
    "concatenate": lambda p: jnp.concatenate([p, p]),
    "stack": lambda p: jnp.stack([p, p]),
    "pad": lambda p: jnp.pad(p, 1),
    "take": lambda p: jnp.take(p, 0, axis=0),
    "reshape": lambda p: jnp.reshape(p, -1),
    "zeros_like": jnp.zeros_like,
    "asarray": jnp.asarray,
    "lax.add": lambda p: lax.add(p, p),
    "lax.mul": lambda p: lax.mul(p, p),
    "lax.select": lambda p: lax.select(True, p, p),
    "lax.convert_element_type": lambda p: lax.convert_element_type(p, jnp.bfloat16),
    "lax.concatenate": lambda p: lax.concatenate([p, p], 0),
    "numpy.exp": np.exp,
    "numpy * ": lambda p: np.ones((2, 6)) * p,
    "jit of exp": jax.jit(jnp.exp),
    "** 2": lambda p: p**2,
    "2 ** ": lambda p: 2.0**p,
    "+ 1": lambda p: p + 1,
    "+ 0.0": lambda p: p + 0.0,
    "- 1": lambda p: p - 1,
    "* itself": lambda p: p * p,
    "/ itself": lambda p: p / p,
    "1 /": lambda p: 1 / p,
    "array +": lambda p: jnp.ones((2, 6)) + p,
    "array *": lambda p: jnp.ones((2, 6)) * p,
    "[0]": lambda p: p[0],
    "< 0": lambda p: p < 0,
    "== 0": lambda p: p == 0,
    "if": lambda p: 1 if p else 0,
    "iteration": list,
    ".sum()": lambda p: p.sum(),
    ".reshape(-1)": lambda p: p.reshape(-1),
    ".T": lambda p: p.T,
    ".at[0]": lambda p: p.at[0].add(1.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_partial_sums_are_rejected_by(name):
    wrong = FUNCTIONS[name]
    with pytest.raises(ShardError, match=r"f32\[2,6\], a partial sum over t(.|\n)*remedy: .*reduce it over t first"):
        on_mesh(lambda h: drop(wrong(total(h))))


LINEAR = {
    "* 2": lambda p: p * 2,
    "0.5 *": lambda p: 0.5 * p,
    "/ 2": lambda p: p / 2,
    "- itself": lambda p: p - p,
    "minus": lambda p: -p,
    "+ 0": lambda p: p + 0,
    "python's sum": lambda p: sum([p, p]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_partial_sums_stay_so_under(name):
    on_mesh(lambda h: psum("B/d L +t -> B/d L", LINEAR[name](total(h))), f32["B/d L"])


@pytest.mark.parametrize("name", LINEAR)
def test_copies_are_rejected_by_linear(name):
    with pytest.raises(ShardError, match=r"f32\[2,6\], a copy on each device of t(.|\n)*remedy: use it through "):
        on_mesh(lambda losses: drop(LINEAR[name](replicate("... -> ... *t", losses))))


# A function of the array in a partial sum. JAX refuses the first ones itself, and the last ones give what is no sum.
INSIDE = {
    "sqrt": jnp.sqrt,
    "+ 1e-6": lambda x: x + 1e-6,
    "* 2": lambda x: x * 2,
    "** 3": lambda x: x * x * x,
    "abs": jnp.abs,
    "maximum": lambda x: jnp.maximum(x, 0),
    "> 0": lambda x: x > 0,
    "softmax": jax.nn.softmax,
    "vmap of sqrt": jax.vmap(jnp.sqrt),
    "matmul": lambda x: x @ jnp.ones((6, 6)),
    "mask": lambda x: jnp.where(jnp.ones((2, 6), bool), x, 0.0),
    "max": lambda x: x.max(axis=0, keepdims=True) + jnp.zeros((2, 6)),
    "cumsum": lambda x: jnp.cumsum(x, axis=1),
    "integer_pow": lambda x: x**3,
    "zeros_like": jnp.zeros_like,
    "psum": lambda x: lax.psum(x, "t"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_the_array_in_a_partial_sum_is_rejected_by(name):
    whole = lambda p: drop(psum("B/d L +t -> B/d L", jax.tree.map(INSIDE[name], p)))
    with pytest.raises(
        ShardError, match=r"partial sum(.|\n)*f32\[2,6\](.|\n)*remedy: .*reduce it over t first"
    ) as raised:
        on_mesh(lambda h: whole(total(h)))
    lines = str(raised.value).splitlines()
    assert "tests/shardlib/test_opaque_values.py:" in lines[0]
    on_mesh(lambda h: drop(INSIDE[name](psum("B/d L +t -> B/d L", total(h)))) if name != "psum" else drop())


def test_a_partial_sum_under_vmap():
    of_row = lambda row: psum("B/d +t -> B/d", einsum_unreduced("B/d F/t -> B/d +t", row))
    with pytest.raises(ShardError, match=r"einsum_unreduced.* under jax.vmap.*\n  remedy: name the mapped dim"):
        on_mesh(lambda h: drop(jax.vmap(of_row, in_axes=1)(h)))
    reduced = lambda p: jax.vmap(lambda row: psum("B/d +t -> B/d", row), in_axes=1)(p)
    with pytest.raises(
        ShardError, match=r"in a partial sum, f32\[2\](.|\n)*remedy: .*instead of jax.vmap, name the dim"
    ):
        on_mesh(lambda h: drop(reduced(total(h))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_copies_are_rejected_by(name):
    wrong = FUNCTIONS[name]
    copy = lambda losses: replicate("... -> ... *t", losses)
    with pytest.raises(ShardError, match=r"f32\[2,6\], a copy on each device of t(.|\n)*remedy: use it through "):
        on_mesh(lambda losses: wrong(copy(losses)))


# CPython 3.13 also reports what was raised inside of a hasattr that JAX makes in C.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("function", [lax.exp, lax.rsqrt, lax.logistic])
def test_partial_sums_are_rejected_by_jax_lax(function):
    with pytest.raises((ShardError, TypeError), match=r"Partial|partial sum over t"):
        on_mesh(lambda h: function(total(h)))


def test_opaque_values_still_answer_hasattr_and_repr():
    def body(h):
        p = total(h)
        assert not hasattr(p, "sum")
        assert (p.shape, p.ndim, p.dtype) == ((2, 6), 2, jnp.float32)
        assert repr(p) == "Partial(f32[2,6], a partial sum over t)"
        return drop()

    on_mesh(body)
