"""The page of right programs that are refused: each of its functions gets the verdict that its name says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardlib.proof.check import prove_function
from shardlib.shardtypes import f32, i32
from tests.programs.program import abstract_mesh, program, traced

PAGE = Path(__file__).parents[2] / "docs" / "refused.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def findings(body):
    p = program(body, vma=False)

    def trace():
        return traced(p, jax.sharding.get_abstract_mesh().axis_sizes)

    return list(map(str, prove_function(trace, abstract_mesh(p, (2, 2)))))


@pytest.mark.parametrize("code", BLOCKS)
@pytest.mark.parametrize("verdict", ["refused", "accepted"])
def test_a_function_of_the_page(code, verdict):
    names = {"jnp": jnp, "lax": lax, "f32": f32, "i32": i32}
    exec(code, names)
    found = findings(names[verdict])
    assert bool(found) == (verdict == "refused"), found
    assert all("remedy:" in finding for finding in found)
