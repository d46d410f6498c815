"""The table of facts in the docstring of proof.domain.Value: each example has the fact that it stands for."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardlib.equations import body_of
from shardlib.proof.check import on_one_device
from shardlib.proof.domain import Value
from shardlib.proof.equation import Twins
from shardlib.proof.interpreter import Interpreter
from shardlib.proof.outside import axes_of_spec, block_of, shard_maps_in

pytestmark = pytest.mark.quick

TABLE = inspect.getdoc(Value).partition("A value that has each")[2]
EXAMPLES = dict(re.findall(r"^    (\w+) +(\S.*)$", TABLE, re.MULTILINE))
SPECS = P("d"), P("d"), P()
FACTS = [field.name for field in dataclasses.fields(Value) if field.name != "token"]


def value_of(code: str) -> Value:
    """What the proof knows of the value that each of four devices computes."""

    def per_device(x, table, ids):
        n = len(table)
        at = ids - n * lax.axis_index("d")
        return eval(code, {"jnp": jnp, "lax": lax}, locals() | {"inside": (at >= 0) & (at < n)})

    def traced(mesh):
        run = jax.shard_map(per_device, in_specs=SPECS, out_specs=P("d"), mesh=mesh)
        shapes = [((8, 3), jnp.float32), ((16, 3), jnp.float32), ((5,), jnp.int32)]
        (found,) = shard_maps_in(jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(*x) for x in shapes]))
        return found.params["jaxpr"]

    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
    here, there = traced(mesh), traced(on_one_device(mesh))
    shapes = [var.aval.shape for var in body_of(here)[0].invars]
    args = [block_of(axes_of_spec(s, len(shape)), shape, {"d": 4}) for s, shape in zip(SPECS, shapes, strict=True)]
    (found,) = Interpreter({"d": 4}, {"d": 1}).run(Twins(here, there), args)
    return found


@pytest.mark.parametrize("fact", FACTS)
def test_an_example_has_the_fact_that_it_stands_for(fact):
    found = getattr(value_of(EXAMPLES[fact]), fact)
    assert found != getattr(Value(()), fact)


def test_a_plain_block_has_no_other_fact():
    found = value_of("x")
    assert [fact for fact in FACTS if getattr(found, fact) != getattr(Value(()), fact)] == ["dims"]
