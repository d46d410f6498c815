"""`check` on programs of jax.shard_map as others write them: gradients around it, values between
shard_maps.
"""

import contextlib
import functools

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

COUNT = 55
MESH = AbstractMesh((2, 4), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
BLOCKS, STACKED = P("d", "t"), P(("d", "t"))


def gradient(function):
    def loss(*args):
        return jnp.sum(jnp.sin(function(*args)))

    return lambda *args: jax.grad(loss, argnums=tuple(range(len(args))))(*args)


def pulled_back(function, *args):
    result, pull = jax.vjp(function, *args)
    return result, pull(jnp.cos(result))


def pushed_forward(function, *args):
    return jax.jvp(function, args, tuple(map(jnp.cos, args)))


def linearized(function, *args):
    result, push = jax.linearize(function, *args)
    return result, push(*map(jnp.cos, args))


def looped(function, *args):
    return lax.scan(
        lambda total, scale: (total + jnp.sum(function(*args) * scale), None), 0.0, jnp.arange(3.0)
    )[0]


def chosen(function, *args):
    return lax.cond(args[0].sum() > 0, function, lambda *args: 2 * function(*args), *args)


TRANSFORMS = {
    "as it is": lambda p: p.function(),
    "grad": lambda p: gradient(p.function()),
    "vjp": lambda p: functools.partial(pulled_back, p.function()),
    "jvp": lambda p: functools.partial(pushed_forward, p.function()),
    "linearize": lambda p: functools.partial(linearized, p.function()),
    "checkpoint around": lambda p: gradient(jax.checkpoint(p.function())),
    "checkpoint inside": lambda p: gradient(p.function(jax.checkpoint)),
    "grad of jit": lambda p: gradient(jax.jit(p.function())),
    "grad of scan": lambda p: gradient(functools.partial(looped, p.function())),
    "grad of cond": lambda p: gradient(functools.partial(chosen, p.function())),
    "second derivative": lambda p: gradient(
        lambda *args: jnp.sum(gradient(p.function())(*args)[0])
    ),
}


def refusal(program, transform: str) -> str | None:
    """What check says of a program under a transform; None if it accepts it."""
    # JAX has no forward derivative of a custom_vjp. With check_vma=False it divides by devices
    # after the second one.
    is_forward = transform in ("jvp", "linearize") and "custom_vjp" in program.name
    if is_forward or (transform == "second derivative" and not program.vma):
        return "not tried" if program.how else None
    try:
        check(TRANSFORMS[transform](program), *program.args, mesh=program.abstract())
    except ShardError as error:
        return str(error)
    return None


def mistakes(seeds, transforms) -> list[str]:
    """Right programs that are refused, and wrong ones that are accepted and differ, of the
    seeds.
    """
    cases = (
        (program, transform)
        for seed in seeds
        for transform in transforms(seed)
        for program in draw(seed)
    )
    return [
        f"{transform} of {program.name} ({program.how or 'right'})"
        for program, transform in cases
        if (refusal(program, transform) is None) == bool(program.how)
        # the sum of a gradient may undo what is wrong
        if not program.how or program.differs(TRANSFORMS[transform])
    ]


@pytest.mark.parametrize(
    "seeds", [range(11), pytest.param(range(11, COUNT), marks=pytest.mark.long)]
)
def test_programs_keep_their_verdict_under_a_transform(seeds):
    names = list(TRANSFORMS)
    assert mistakes(seeds, lambda seed: [names[seed % len(names)]]) == []


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.long)])
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


def through_a_loop(x):
    sums = lax.scan(
        lambda _, scale: (None, mapped(sum_of_block, BLOCKS, STACKED)(x * scale)),
        None,
        jnp.arange(3.0),
    )[1]
    return lax.scan(lambda _, row: (None, mapped(total, STACKED, P())(row)), None, sums)[1]


def carried(x):
    def step(kept, _):
        return (
            mapped(sum_of_block, BLOCKS, STACKED)(x) + 0 * kept,
            mapped(total, STACKED, P())(kept),
        )

    return lax.scan(step, mapped(sum_of_block, BLOCKS, STACKED)(x), None, length=2)[1]


def devices():
    return jax.sharding.get_abstract_mesh().size


def array(make):
    """An array that NumPy makes for the number of devices."""
    return jnp.asarray(make(devices()).astype(np.float32))


def swapped(x):
    kept, whole = (
        KEPT(x),
        mapped(lambda x: vary(lax.psum(x, ("d", "t")).sum()[None]), BLOCKS, STACKED)(x),
    )
    pair = lax.cond(x.sum() > 0, lambda *pair: pair, lambda *pair: pair[::-1], kept, whole)
    return mapped(lambda kept, _: total(kept), (STACKED, STACKED), P())(*pair)


def mean_of_rows(x):
    return lax.pcast(
        jnp.broadcast_to(lax.psum(x.sum(), "d") / lax.axis_size("d"), x.shape), "d", to="varying"
    )


def part_or_rows(x):
    of_all = jax.sharding.get_abstract_mesh().shape["d"]
    chosen = lax.cond(x.sum() > 0, lambda x: x / of_all, mapped(mean_of_rows, P("d"), P("d")), x)
    return mapped(lambda x: lax.psum(x, "d")[0], P("d"), P())(chosen)


vary = functools.partial(lax.pcast, axis_name=("d", "t"), to="varying")
scaled = mapped(lambda x, scale: x * scale, (BLOCKS, P()), BLOCKS)
KEPT = mapped(sum_of_block, BLOCKS, STACKED)
CLAIMED = mapped(lambda x: x.sum(), BLOCKS, P(), check_vma=False)
summed_up = mapped(lambda x: lax.psum(x, "d"), P(), P(), check_vma=False)
NUMBER, MISSING, OF_BLOCKS = (
    "a number that depends on the mesh",
    "a reduction is missing",
    "do not make up what",
)
PASSED = {  # a function, and what is wrong
    "to a shard_map with the same spec": (lambda x: mapped(total, STACKED, P())(KEPT(x)), None),
    "with another order of axes": (lambda x: mapped(total, P(("t", "d")), P())(KEPT(x)), None),
    "as a result": (lambda x: (KEPT(x), mapped(total, STACKED, P())(KEPT(x))), MISSING),
    "wrong where it is taken": (
        lambda x: mapped(jnp.sin, STACKED, STACKED)(KEPT(x)),
        "sin: operand 0 is a partial sum",
    ),
    "through a loop": (through_a_loop, None),
    "carried by a loop": (carried, None),
    "through jit": (lambda x: jax.jit(mapped(total, STACKED, P()))(jax.jit(KEPT)(x)), None),
    "what devices do not share": (
        lambda x: mapped(lambda x: lax.psum(x, ("d", "t")), P(), P(), check_vma=False)(CLAIMED(x)),
        OF_BLOCKS,
    ),
    "a number": (lambda x: scaled(x, float(devices())), "a number that depends on the mesh"),
    "a number of one program": (
        lambda x: (lambda total: scaled(x, total if devices() == 1 else 1.0))(x.sum()),
        NUMBER,
    ),
    "a number as a result": (
        lambda x: (scaled(x, 1.0), float(devices())),
        "result 1: 100% of 1 entries differ",
    ),
    "a part that is summed": (
        lambda x: summed_up(x.sum() / jax.sharding.get_abstract_mesh().shape["d"]),
        None,
    ),
    "a part that is not": (
        lambda x: mapped(jnp.sin, P(), P())(x.sum() / devices()),
        "a number that depends on the mesh",
    ),
    "a complex number": (lambda x: scaled(x, 1 + 1j * devices()), NUMBER),
    "a part by numbers": (
        lambda x: mapped(jnp.sin, BLOCKS, BLOCKS)(
            x / array(lambda n: np.arange(1, 129).reshape(8, 16) ** n)
        ),
        OF_BLOCKS,
    ),
    "a part or rows": (part_or_rows, "depends on the mesh"),
    "either of two": (swapped, MISSING),
    "ones for each device": (
        lambda x: scaled(x, jnp.sum(array(np.ones))),
        "it is 8 times what one device computes",
    ),
    "ones for each row of a block": (
        lambda x: mapped(lambda x: x / jnp.sum(jnp.asarray(np.ones(x.shape[0]))), BLOCKS, BLOCKS)(
            x
        ),
        "it is 0.5 times what one device computes",
    ),
    "a part as a result": (lambda x: x.sum() / devices(), NUMBER),
}


@pytest.mark.parametrize("name", PASSED)
def test_what_passes_between_shard_maps(name):
    function, problem = PASSED[name]
    if problem is None:
        return check(function, X, mesh=MESH)
    with pytest.raises(ShardError, match=problem):
        check(function, X, mesh=MESH)


def test_manual_axes_are_refused():
    mesh = AbstractMesh((2, 4), ("d", "t"), axis_types=(AxisType.Manual,) * 2)
    with pytest.raises(
        ValueError, match=r"has Manual axes, as inside of jax\.shard_map: make them"
    ):
        check(mapped(lambda x: x, BLOCKS, BLOCKS), X, mesh=mesh)


# ---- gradients that JAX sums over devices


def gradients_of_samples(cast):
    """The gradient by shared weights for each sample, as in https://github.com/jax-ml/jax/issues/36886."""
    weights = jnp.array([1.0, 2.0])
    return jax.vmap(lambda x: jax.grad(lambda w: w @ x)(cast(weights)))


def gradient_of_gathered(cast):
    """The gradient of a loss that all devices compute alike, of all rows."""

    def body(x, w):
        rows = lax.all_gather(x, "d", tiled=True)
        return lax.pmean(jax.grad(lambda w: jnp.sum(jnp.sin(rows @ w)))(cast(w)), "d")

    return body


ROWS = np.array([[0, 1], [1, 1], [1, 0], [0, 0]], np.float32)
SUMMED = {  # the program, its arguments and specs
    "different samples": (
        gradients_of_samples,
        [ROWS],
        P("d"),
        P("d"),
        "dim 0 of operand 0 is sharded over d",
    ),
    "the same loss": (
        gradient_of_gathered,
        [ROWS, ROWS[1]],
        (P("d"), P()),
        P(),
        "it is 2 times what one device computes",
    ),
}


@pytest.mark.parametrize("name", SUMMED)
def test_a_gradient_that_jax_sums_is_refused_where_it_is_taken(name):
    program, args, specs, outs, problem = SUMMED[name]
    mesh = AbstractMesh((2,), ("d",))
    with pytest.raises(ShardError, match=rf"^\S*test_shard_map.py:\d+: psum: {problem}"):
        check(program(lambda w: w), *args, mesh=mesh, in_specs=specs, out_specs=outs)
    check(
        program(lambda w: lax.pcast(w, "d", to="varying")),
        *args,
        mesh=mesh,
        in_specs=specs,
        out_specs=outs,
    )


# ---- a residual stream inside of jax.shard_map: with check_vma=False each device gets a part of it


def stream(share, is_looped=False):
    def body(x, up, down):
        def layer(x, _):
            return (x * share() + lax.psum(jnp.tanh(x @ up) @ down, "t"), None)

        return (
            lax.scan(layer, x, None, length=2)[0]
            if is_looped
            else layer(layer(x, None)[0], None)[0]
        )

    of = mapped(body, (P("d"), P(None, "t"), P("t")), P("d"), check_vma=False)
    return jax.grad(lambda *args: jnp.sum(jnp.sin(of(*args))), argnums=(0, 1, 2))


SQUARE = jax.ShapeDtypeStruct((16, 16), jnp.float32)


@pytest.mark.parametrize("is_looped", [False, True])
def test_a_gradient_passes_by_a_layer_and_through_it(is_looped):
    check(stream(lambda: 1.0, is_looped), X, SQUARE, SQUARE, mesh=MESH)
    with pytest.raises(
        ShardError, match=r"number that depends on the mesh|partial sum over t is combined"
    ):
        check(stream(lambda: lax.axis_size("t"), is_looped), X, SQUARE, SQUARE, mesh=MESH)


@pytest.mark.parametrize(
    ("share", "problem"), [(4, None), (2, NUMBER), (1, "is added to a partial sum over t")]
)
def test_what_all_devices_have_is_added_to_a_partial_sum_as_parts(share, problem):
    def body(x, y):
        return lax.psum(x.sum(1) + y / (share if lax.axis_size("t") > 1 else 1), "t")

    function = mapped(body, (BLOCKS, P("d")), P("d"), check_vma=False)
    with pytest.raises(ShardError, match=problem) if problem else contextlib.nullcontext():
        check(function, X, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=MESH)


# ---- a whole training step, as JAX programs are written: shard_map for the layers, and the rest ou


def training_step(check_vma):
    """A transformer of three layers, with a loss over a sharded vocabulary."""

    part = functools.partial(mapped, check_vma=check_vma)

    def mlp(x, up, down):
        return lax.psum(jax.nn.gelu(x @ up) @ down, "t")

    def attention(q, k, v):
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)

    def cross_entropy(x, out, targets):
        logits = x @ out
        n = logits.shape[-1]
        top = lax.pmax(lax.stop_gradient(logits).max(-1), "t")
        normalizer = jnp.log(lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "t")) + top
        hit = jnp.arange(n) == (targets - lax.axis_index("t") * n)[..., None]
        total = lax.psum((normalizer - lax.psum(jnp.where(hit, logits, 0).sum(-1), "t")).sum(), "d")
        return total / (targets.size * lax.axis_size("d"))

    heads = P("d", None, "t")

    def layer(x, w):
        h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.moveaxis((h @ w["qkv"]).reshape(*x.shape[:2], 3, 4, 8), 2, 0)
        x = x + part(attention, (heads,) * 3, heads)(q, k, v).reshape(x.shape)
        return x + part(mlp, (P("d"), P(None, "t"), P("t")), P("d"))(x, w["up"], w["down"]), None

    def loss(weights, tokens, targets):
        x, _ = lax.scan(jax.checkpoint(layer), weights["embed"][tokens], weights["layers"])
        return part(cross_entropy, (P("d"), P(None, "t"), P("d")), P())(x, weights["out"], targets)

    @jax.jit
    def step(weights, tokens, targets):
        value, gradients = jax.value_and_grad(loss)(weights, tokens, targets)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


WEIGHTS = {
    "embed": (64, 32),
    "out": (32, 64),
    "layers": {"qkv": (3, 32, 96), "up": (3, 32, 64), "down": (3, 64, 32)},
}


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_training_step(check_vma):
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        WEIGHTS,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    check(training_step(check_vma), shapes, tokens, tokens, mesh=MESH)
