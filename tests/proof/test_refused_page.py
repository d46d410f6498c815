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


@pytest.mark.parametrize("code", BLOCKS)
@pytest.mark.parametrize("verdict", ["refused", "accepted"])
def test_a_function_of_the_page(code, verdict):
    names = {"jnp": jnp, "lax": lax, "f32": f32, "i32": i32}
    exec(code, names)
    p = program(names[verdict], vma=False)
    trace = lambda: {"": traced(p, jax.sharding.get_abstract_mesh().axis_sizes)}
    found = prove(trace, abstract_mesh(p, (2, 2)))
    assert bool(found) == (verdict == "refused"), [str(f) for f in found]
    assert all("remedy:" in str(finding) for finding in found)


def test_messages_name_what_to_do():
    """Programs whose messages once gave a remedy that did not help, or none."""

    def found(body, check_vma=True, **options):
        p = program(body, vma=check_vma, **options)
        trace = lambda: {"": traced(p, jax.sharding.get_abstract_mesh().axis_sizes)}
        return "\n".join(map(str, prove(trace, abstract_mesh(p, (2, 2)))))

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

    assert "With check_vma=False a psum in what is differentiated is summed again" in found(outer, check_vma=False)
    assert "5 here and 4 on one device" in found(seed)
    assert "a key is the same on every mesh" in found(seed)
    assert "masks its block by positions" in found(cache)
    assert "let no choice in the code depend on the size of a block" in found(another)
    assert "compute the shape from whole sizes, shardops.size(name)" in found(shape)
