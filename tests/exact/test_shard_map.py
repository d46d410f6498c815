"""`check` on programs of jax.shard_map as others write them: gradients around it, values between
shard_maps.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardlib.exact import check
from shardlib.parsing import ShardError
from tests.programs.drawn import draw

MESH = AbstractMesh((2, 4), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
BLOCKS, STACKED = P("d", "t"), P(("d", "t"))


def gradient(function):
    def loss(*args):
        return jnp.sum(jnp.sin(function(*args)))

    return lambda *args: jax.grad(loss, argnums=tuple(range(len(args))))(*args)


def pushed_forward(function, *args):
    return jax.jvp(function, args, tuple(map(jnp.cos, args)))


def looped(function, *args):
    return lax.scan(
        lambda total, scale: (total + jnp.sum(function(*args) * scale), None), 0.0, jnp.arange(3.0)
    )[0]


def chosen(function, *args):
    return lax.cond(args[0].sum() > 0, function, lambda *args: 2 * function(*args), *args)


TRANSFORMS = {
    "as it is": lambda p: p.function(),
    "grad": lambda p: gradient(p.function()),
    "jvp": lambda p: functools.partial(pushed_forward, p.function()),
    "checkpoint inside": lambda p: gradient(p.function(jax.checkpoint)),
    "grad of scan": lambda p: gradient(functools.partial(looped, p.function())),
    "grad of cond": lambda p: gradient(functools.partial(chosen, p.function())),
    "second derivative": lambda p: gradient(
        lambda *args: jnp.sum(gradient(p.function())(*args)[0])
    ),
}


def is_accepted(program, transform: str) -> bool:
    # JAX has no forward derivative of a custom_vjp. With check_vma=False it divides by devices
    # after the second one.
    is_forward = transform == "jvp" and "custom_vjp" in program.name
    if is_forward or (transform == "second derivative" and not program.vma):
        return not program.how
    try:
        check(TRANSFORMS[transform](program), *program.args, mesh=program.abstract())
    except ShardError:
        return False
    return True


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 36), marks=pytest.mark.long)])
def test_programs_keep_their_verdict_under_a_transform(seeds):
    mistakes = []
    for seed in seeds:
        transform = list(TRANSFORMS)[seed % len(TRANSFORMS)]
        for program in draw(seed):
            # the sum of a gradient may undo what is wrong
            if is_accepted(program, transform) == bool(program.how) and (
                not program.how or program.differs(TRANSFORMS[transform])
            ):
                mistakes.append(f"{transform} of {program.name} ({program.how or 'right'})")
    assert mistakes == []


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.long)])
def test_the_drawn_verdicts_are_those_of_a_run(seeds):
    drawn = [program for seed in seeds for program in draw(seed)]
    assert {bool(program.how) for program in drawn} == {False, True}
    assert [p.name for p in drawn if p.differs(TRANSFORMS["as it is"]) != bool(p.how)] == []
    assert [p.name for p in drawn if not p.how and p.differs(TRANSFORMS["grad"])] == []


# ---- values that pass from one shard_map to another


def mapped(body, specs, outs, **options):
    return lambda *args: jax.shard_map(body, in_specs=specs, out_specs=outs, **options)(*args)


def sum_of_block(x):
    return x.sum()[None]


def total(x):
    return lax.psum(x[0], ("d", "t"))


def carried(x):
    def step(kept, _):
        return KEPT(x) + 0 * kept, mapped(total, STACKED, P())(kept)

    return lax.scan(step, KEPT(x), None, length=2)[1]


def devices():
    return jax.sharding.get_abstract_mesh().size


scaled = mapped(lambda x, scale: x * scale, (BLOCKS, P()), BLOCKS)
KEPT = mapped(sum_of_block, BLOCKS, STACKED)
CLAIMED = mapped(lambda x: x.sum(), BLOCKS, P(), check_vma=False)
SUMMED = mapped(lambda x: lax.psum(x, ("d", "t")), P(), P(), check_vma=False)
NUMBER = "a number that depends on the mesh"
PASSED = {  # a function, and what is wrong
    "to a shard_map with the same spec": (lambda x: mapped(total, STACKED, P())(KEPT(x)), None),
    "with another order of axes": (lambda x: mapped(total, P(("t", "d")), P())(KEPT(x)), None),
    "as a result": (
        lambda x: (KEPT(x), mapped(total, STACKED, P())(KEPT(x))),
        "a reduction is missing",
    ),
    "wrong where it is taken": (
        lambda x: mapped(jnp.sin, STACKED, STACKED)(KEPT(x)),
        "sin: operand 0 is a partial sum",
    ),
    "carried by a loop": (carried, None),
    "what devices do not share": (lambda x: SUMMED(CLAIMED(x)), "do not make up what"),
    "a number": (lambda x: scaled(x, float(devices())), NUMBER),
    "a part that is summed": (lambda x: SUMMED(x.sum() / devices()), None),
    "a part that is not": (lambda x: mapped(jnp.sin, P(), P())(x.sum() / devices()), NUMBER),
}


@pytest.mark.parametrize("name", PASSED)
def test_what_passes_between_shard_maps(name):
    function, problem = PASSED[name]
    if problem is None:
        return check(function, X, mesh=MESH)
    with pytest.raises(ShardError, match=problem):
        check(function, X, mesh=MESH)


# ---- gradients that JAX sums over devices


def gradients_of_samples(cast):
    """The gradient by shared weights for each sample, as in https://github.com/jax-ml/jax/issues/36886."""
    weights = jnp.array([1.0, 2.0])
    return jax.vmap(lambda x: jax.grad(lambda w: w @ x)(cast(weights)))


def test_a_gradient_that_jax_sums_is_refused_where_it_is_taken():
    rows = np.array([[0, 1], [1, 1], [1, 0], [0, 0]], np.float32)
    mesh = AbstractMesh((2,), ("d",))
    specs: dict[str, Any] = {"in_specs": P("d"), "out_specs": P("d")}
    problem = r"^\S*test_shard_map.py:\d+: psum: dim 0 of operand 0 is sharded over d"
    with pytest.raises(ShardError, match=problem):
        check(gradients_of_samples(lambda w: w), rows, mesh=mesh, **specs)
    own = gradients_of_samples(lambda w: lax.pcast(w, "d", to="varying"))
    check(own, rows, mesh=mesh, **specs)


# ---- with check_vma=False each device gets a part of the gradient


@pytest.mark.parametrize(
    ("share", "problem"), [(4, None), (2, NUMBER), (1, "is added to a partial sum over t")]
)
def test_what_all_devices_have_is_added_to_a_partial_sum_as_parts(share, problem):
    def body(x, y):
        return lax.psum(x.sum(1) + y / (share if lax.axis_size("t") > 1 else 1), "t")

    function = mapped(body, (BLOCKS, P("d")), P("d"), check_vma=False)
    with pytest.raises(ShardError, match=problem) if problem else contextlib.nullcontext():
        check(function, X, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=MESH)
