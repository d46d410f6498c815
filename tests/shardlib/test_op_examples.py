"""The examples in the ops' docstrings, from which docs/ops.md is made: each runs and shows what it
says.
"""

import inspect

import jax
import pytest

from shardlib import shardops
from tests.support.examples import run
from tests.support.ops_page import GROUPS

pytestmark = pytest.mark.quick


@pytest.fixture
def names():
    """What the module's own example imports, with its mesh in force."""
    found: dict = {}
    with jax.set_mesh(None):  # restores the mesh before, also if the example fails halfway
        run("shardops", shardops.__doc__, found)
        assert dict(found["mesh"].shape) == {"d": 2, "t": 2}
        yield found


@pytest.mark.parametrize("op", shardops.__all__)
def test_the_example_of(op, names):
    ran = run(op, getattr(shardops, op).__doc__, names)
    assert ran, f"shardops.{op} has no example in its docstring"


def test_each_op_is_exported_and_on_the_page():
    defined = {
        name
        for name, value in vars(shardops).items()
        if inspect.isfunction(value)
        and value.__module__ == shardops.__name__
        and not name.startswith("_")
    }
    assert defined <= set(shardops.__all__)
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(shardops.__all__)
