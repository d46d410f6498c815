"""The examples in the docstrings of shardlib/proof: what comes out is what the proof says.

An example is a line `x: f32[8/d 4]    jnp.sum(x, 0)    f32[4 +d]`: types of arguments, what each device computes, and
the type of the result, or `refused`. Axes have two devices.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import shardlib.proof
from shardlib.array_types import DType
from shardlib.equations import body_of
from shardlib.parsing import parse_shape
from shardlib.proof.check import on_one_device
from shardlib.proof.domain import describe
from shardlib.proof.equation import Twins
from shardlib.proof.interpreter import Interpreter, block_of
from shardlib.proof.outside import shard_maps_in

pytestmark = pytest.mark.quick

ARGUMENT = r"(\w+): (\w+)\[([^]]*)\]"
LINE = re.compile(rf"^ +({ARGUMENT}(?:, {ARGUMENT})*)  +(\S.*?)  +(\S.*)$", re.MULTILINE)
SIZES = {"d": 2, "t": 2}


def examples() -> list[tuple[str, str, str]]:
    """Arguments, code and result of each line of the docstrings."""
    found = []
    for path in sorted(Path(shardlib.proof.__file__).parent.glob("*.py")):
        found += [(line[1], line[8], line[9]) for line in LINE.finditer(path.read_text())]
    return found


def result_of(arguments: str, code: str) -> str:
    """The type of what each device computes, as the proof describes it; `refused` if it knows none."""
    types = [(name, DType(dtype).dtype, parse_shape(spec)) for name, dtype, spec in re.findall(ARGUMENT, arguments)]
    specs = [PartitionSpec(*(dim.axes or None for dim in spec.dims)) for _, _, spec in types]

    def per_device(*values):
        names = {t[0]: x for t, x in zip(types, values, strict=True)}
        return eval(code, names | {"jnp": jnp, "lax": lax, "jax": jax})

    def traced(mesh):
        shapes = [jax.ShapeDtypeStruct([dim.literal_size for dim in spec.dims], dtype) for _, dtype, spec in types]
        run = jax.shard_map(per_device, in_specs=(*specs,), out_specs=PartitionSpec(), mesh=mesh, check_vma=False)
        (found,) = shard_maps_in(jax.make_jaxpr(run)(*shapes))
        return found.params["jaxpr"]

    mesh = AbstractMesh((*SIZES.values(),), (*SIZES,), axis_types=(AxisType.Auto,) * len(SIZES))
    here, there = traced(mesh), traced(on_one_device(mesh))
    shapes = [var.aval.shape for var in body_of(here)[0].invars]
    args = [
        block_of([dim.axes for dim in spec.dims], shape, SIZES, spec.partial)
        for (_, _, spec), shape in zip(types, shapes, strict=True)
    ]
    interpreter = Interpreter(SIZES, dict.fromkeys(SIZES, 1), is_unchecked=True)
    (found,) = interpreter.run(Twins(here, there), args)
    aval = body_of(here)[0].outvars[0].aval
    return "refused" if found.unprovable else describe(found, aval.shape, aval.dtype, interpreter.sizes)


@pytest.mark.parametrize(("arguments", "code", "result"), examples())
def test_an_example_is_true(arguments, code, result):
    assert result_of(arguments, code) == result


def test_most_rules_have_one():
    assert len(examples()) > 40
