"""The page of right programs that are refused: each of its functions gets the verdict that its name says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from running import abstract_mesh, program, traced

from shardlib.proof.check import prove
from shardlib.shardtypes import f32, i32

PAGE = Path(__file__).parents[2] / "docs" / "refused.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def findings(body, check_vma=True):
    p = program(body, vma=check_vma)
    trace = lambda: {"": traced(p, jax.sharding.get_abstract_mesh().axis_sizes)}
    return list(map(str, prove(trace, abstract_mesh(p, (2, 2)))))


@pytest.mark.parametrize("code", BLOCKS)
@pytest.mark.parametrize("verdict", ["refused", "accepted"])
def test_a_function_of_the_page(code, verdict):
    names = {"jnp": jnp, "lax": lax, "f32": f32, "i32": i32}
    exec(code, names)
    found = findings(names[verdict], check_vma=False)
    assert bool(found) == (verdict == "refused"), found
    assert all("remedy:" in finding for finding in found)


def outer(w: f32["M M"], x: f32["B/d M"]) -> f32["M M"]:
    return lax.psum(jax.grad(lambda w: lax.psum(jnp.sum((x @ w) ** 2), "d"))(w), "d")


def seed(x: f32["B M"]) -> f32["B M"]:
    return x * jax.random.normal(jax.random.key(3 + lax.axis_size("d")), x.shape)


def cache(x: f32["B/d L/t"], new: f32["B/d 2"]) -> f32["B/d L/t"]:
    return x.at[:, :2].set(new)


def another(x: f32["B/d M"]) -> f32["B/d M"]:
    return jnp.tanh(x) if x.shape[0] > 4 else jnp.sin(x)


def shape(x: f32["B/d M"]) -> f32["B M"]:
    return jnp.zeros(x.shape)


MESSAGES = {  # programs whose messages once gave a remedy that did not help, or none
    outer: ["With check_vma=False a psum in what is differentiated is summed again"],
    seed: ["5 here and 4 on one device", "a key is the same on every mesh"],
    cache: ["masks its block by positions"],
    another: ["let no choice in the code depend on the size of a block"],
    shape: ["compute the shape from whole sizes, shardops.size(name)"],
}


@pytest.mark.parametrize("body", MESSAGES, ids=lambda body: body.__name__)
def test_messages_name_what_to_do(body):
    found = "\n".join(findings(body, check_vma=body is not outer))
    assert all(text in found for text in MESSAGES[body])
