"""Of a wrong program, the line is named that makes it wrong, with what is wrong there."""

import inspect

import jax.numpy as jnp
from jax import lax

from shardlib.exact.inputs import draw
from shardlib.exact.origin import origins
from shardlib.shardtypes import f32
from tests.programs.program import Program, cases, program, traced

CASES: list[Program] = []


def wrong(problem: str):
    """Registers a wrong program. `problem` is said of the line that ends in `# here`."""

    def register(body) -> Program:
        CASES.append(program(body, problem=problem, vma=False))
        return CASES[-1]

    return register


# ---- reductions ----------------------------------------------------------------------------------


@wrong(
    "summed over t it is right: a reduction over t is missing\n  remedy: Add jax.lax.psum(…, 't')."
)
def partial_sum_returned(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    y = x @ w  # here
    return 2 * y


@wrong(
    "summed over t it is right: a reduction is missing\n  remedy: Add jax.lax.psum_scatter(…, 't', "
    "scatter_dimension=1"
)
def partial_sum_returned_as_blocks(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M/t"]:
    return x @ w  # here


@wrong(
    "operand 0 is a partial sum over t, used as if it were whole\n  remedy: Sum it first: "
    "jax.lax.psum(…, 't')."
)
def activation_before_the_sum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    y = x @ w
    y = jnp.tanh(y)  # here
    return lax.psum(y, "t")


@wrong("it is 2 times what one device computes: each device of d adds a value that is whole")
def sum_over_one_axis_too_many(x: f32["B F/t"], w: f32["F/t M"]) -> f32["B M"]:
    y = x @ w
    y = lax.psum(y, ("d", "t"))  # here
    return y + 1


@wrong("a number that depends on the mesh: 2.0 here, 8.0 on one device")
def mean_of_a_block_s_rows(x: f32["B/t M"]) -> f32["M"]:
    total = lax.psum(jnp.sum(x, axis=0), "t")
    return total / x.shape[0]  # here


@wrong(
    "by its maximum over t it is right: a reduction over t is missing\n  remedy: Add "
    "jax.lax.pmax(…, 't')."
)
def own_maxima_subtracted(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    largest = jnp.max(x, axis=-1, keepdims=True)  # here
    return x - largest


# ---- positions -----------------------------------------------------------------------------------


@wrong("the blocks of d, t along dim 0 are in another order")
def gather_in_another_order(x: f32["V/t/d"]) -> f32["V"]:
    whole = lax.all_gather(x, ("d", "t"), tiled=True)  # here
    return 2 * whole


@wrong("the blocks of t are on other devices: device 0 has that of 3")
def blocks_passed_on(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    n = lax.axis_size("t")
    x = lax.ppermute(x, "t", [(i, (i + 1) % n) for i in range(n)])  # here
    return jnp.sin(x)


@wrong("each device of t has the block of device 0\n  remedy: Add n * jax.lax.axis_index('t')")
def positions_within_a_block(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    at = jnp.arange(x.shape[1])  # here
    return x * at


@wrong("it is right on device d=0, t=0 only")
def sum_of_what_is_before_in_a_block(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return jnp.cumsum(x, axis=1)  # here


@wrong("dim 1 of operand 0 is sharded over t: each device sees only its own block")
def entries_sorted_in_each_block(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return jnp.sort(x, axis=1)  # here


@wrong("the index of a device gets into the result")
def index_of_a_device_added(x: f32["B/d M"]) -> f32["B/d M"]:
    at = lax.axis_index("t")  # here
    return x + at


# ---- results and programs ------------------------------------------------------------------------


@wrong("result 0 is [t, d], and out_specs declares [d, t]")
def transposed(w: f32["M/d N/t"]) -> f32["N/d M/t"]:
    return w.T  # here


@wrong("a device of the mesh runs this, and one device does not")
def doubled_on_several_devices(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return x * 2.0 if lax.axis_size("t") > 1 else x  # here


@wrong("not all devices of d reach it")
def sum_in_a_branch_of_one_device(x: f32["B/d M"]) -> f32["B/d M"]:
    def add(x):
        return x + lax.psum(x, "d")  # here

    return lax.cond(lax.axis_index("d") == 0, add, lambda x: x, x)


@cases(CASES)
def test_a_line_is_named_with_what_is_wrong_there(program):
    one, several = traced(program, (1, 1)), traced(program, (2, 4))
    found = origins(several, one, {"d": 2, "t": 4}, draw(several.in_avals, 0))
    source, start = inspect.getsourcelines(program.body)
    (here,) = (start + i for i, text in enumerate(source) if text.rstrip().endswith("# here"))
    assert found, "nothing was found"
    assert found[0].place.endswith(f"test_origin.py:{here}"), found[0]
    assert program.problem in str(found[0])
