"""docs/recipes/diloco.patch against trainings of one device by the released train.py, and torch's
outer optimizer.
"""

import contextlib
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from shardlib.equations import COLLECTIVES, axes_of
from shardlib.interpret import equations_in
from shardlib.parsing import ShardError
from shardwright.axes import axes_of_mesh
from shardwright.cluster.devices import explicit_mesh
from shardwright.data.loader import TokenBatch
from shardwright.inspect.soundness import examine
from shardwright.modeling.model import load_model
from shardwright.program.config import PipelineConfig
from shardwright.program.step import trace_step
from tests.models.test_experts import small
from tests.support import tiny
from tests.support.recipes import changed, module_of

BATCHES = [tiny.host_batch(seed) for seed in range(4)]
ROUNDING = {"rtol": 0, "atol": 2e-5}


def config(**training):
    c = tiny.config(tiny.model(layers=2), **training)
    c.optimizer = tiny.optimizer(warmup_steps=0, adam_epsilon=1e-5)
    return c


@contextlib.contextmanager
def diloco(edit=("", ""), **constants):
    """The module of train.py after the recipe, and after an edit of it, with these constants."""
    source = changed("diloco")
    assert edit[0] in source
    with module_of(source.replace(*edit)) as train:
        vars(train).update(INNER_STEPS=2, **constants)
        yield train


def host(tree):
    return jax.tree.map(np.asarray, tree)


def trained(train, mesh: str, steps: int = 4, **training) -> list:
    """The states after each step."""
    c, states = config(**training), []
    if "p=" in mesh:
        c.pipeline = PipelineConfig(schedule="1f1b")
    c.model = train.ModelConfig(**vars(c.model) | {"module": "changed_train"})
    with jax.set_mesh(tiny.mesh(mesh)):
        model = load_model(c.model)
        state = jax.jit(functools.partial(train.init_state, config=c, model=model))(
            jax.random.key(0)
        )
        step = train.make_training_step(c, model)
        for i in range(steps):
            state, metrics = step(state, tiny.place_batch(c, BATCHES[i]), np.int32(i))
            states.append((host(state), host(metrics)))
    return states


def rows_of(batch: TokenBatch, replica: int, replicas: int, microbatches: int) -> TokenBatch:
    """The rows of a replica: its part of each microbatch."""

    def rows(x: np.ndarray) -> np.ndarray:
        parts = x.reshape(microbatches, replicas, -1, *x.shape[1:])
        return parts[:, replica].reshape(-1, *x.shape[1:])

    return jax.tree.map(rows, batch)


@functools.cache
def by_hand(replicas: int, rate: float, momentum: float, microbatches: int = 1, steps: int = 4):
    """The weights after the outer steps, and those of each replica before them: one device trains
    after the other.
    """
    torch = pytest.importorskip("torch")
    c = config(batch_size=tiny.BATCH // replicas, microbatches=microbatches)
    weights, own, losses = [], [], []
    with jax.set_mesh(tiny.mesh("one device")):
        states = [tiny.state(c) for _ in range(replicas)]
        shared, tree = jax.tree.flatten(host(states[0].weights))
        shared = [torch.tensor(x) for x in shared]
        outer = torch.optim.SGD(shared, lr=rate, momentum=momentum, nesterov=momentum > 0)
        step = tiny.training_step(c)
        for i in range(steps):
            losses.append([])
            for k in range(replicas):
                batch = tiny.place_batch(c, rows_of(BATCHES[i], k, replicas, microbatches))
                states[k], metrics = step(states[k], batch, np.int32(i))
                losses[-1].append(float(metrics.loss))
            if i % 2 == 0:
                continue
            own.append([host(state.weights) for state in states])
            means = [
                np.mean(each, axis=0) for each in zip(*map(jax.tree.leaves, own[-1]), strict=True)
            ]
            for x, mean in zip(shared, means, strict=True):
                x.grad = x.detach() - torch.tensor(mean)
            outer.step()
            weights.append(tree.unflatten([x.numpy().copy() for x in shared]))
            for k, state in enumerate(states):
                states[k] = dataclasses.replace(
                    state, weights=tiny.place(weights[-1], type(state.weights))
                )
    return weights, own, losses


def assert_close(ours, theirs):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        np.testing.assert_allclose(x, y, **ROUNDING, err_msg=jax.tree_util.keystr(path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "training"),
    [
        ("r=2 d=2 t=2", {"microbatches": 2}),
        ("r=2", {}),
        ("r=2 e=2 c=2", {"context": "ring", "microbatches": 2}),
        ("r=2 p=2 d=2", {"microbatches": 2}),
        ("one device", {}),
    ],
)
def test_replicas_train_by_themselves_and_meet(mesh, training):
    with diloco() as train:
        found = trained(train, mesh, **training)
    weights, own, losses = by_hand(2, 0.7, 0.9, training.get("microbatches", 1))
    for (_, metrics), of_step in zip(found, losses, strict=True):
        np.testing.assert_allclose(metrics.loss, np.mean(of_step), rtol=1e-5)
    for i in range(2):
        state, _ = found[2 * i + 1]
        assert_close(state.weights, weights[i])
        for k in range(2):
            assert_close(jax.tree.map(lambda x, k=k: x[k], state.replicas.weights), own[i][k])
    before, _ = found[2]
    assert_close(before.weights, weights[0])
    apart = jax.tree.map(lambda x: np.abs(x[0] - x[1]).max(), state.replicas.weights)
    assert min(jax.tree.leaves(apart)) > 1e-3, "the replicas differ"


@pytest.mark.long
def test_one_replica_whose_outer_step_takes_its_weights_is_plain_training():
    with diloco(REPLICAS=1, OUTER_RATE=1.0, OUTER_MOMENTUM=0.0) as train:
        *_, (state, _) = trained(train, "d=2")
    c = config()
    with jax.set_mesh(tiny.mesh("d=2")):
        plain, step = tiny.state(c), tiny.training_step(c)
        for i, batch in enumerate(BATCHES):
            plain, _ = step(plain, tiny.place_batch(c, batch), np.int32(i))
    assert_close(state.weights, host(plain.weights))


@pytest.mark.long
def test_a_sum_in_place_of_the_mean_is_felt():
    """One device sums too, so the check accepts it."""
    edit = "total) / REPLICAS", "total)"
    assert findings(edit) == ""
    with diloco(edit) as train:
        *_, (state, _) = trained(train, "r=2", steps=2)
    (expected, *_), _, _ = by_hand(2, 0.7, 0.9)
    assert np.abs(state.weights.unembed - expected.unembed).max() > 0.1


# ---- the check -----------------------------------------------------------------------------------


def traced(train, mesh: str, model=None, **training):
    """The training step of the recipe on a mesh, traced."""
    c = config(**training)
    c.model = model or train.ModelConfig(**vars(c.model) | {"module": "changed_train"})
    if "p=" in mesh:
        c.pipeline = PipelineConfig(schedule="1f1b")
    sizes = dict.fromkeys("rdt", 1) | {
        axis: int(size) for axis, size in re.findall(r"(\w)=(\d)", mesh)
    }
    mesh = explicit_mesh(axes_of_mesh(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        return trace_step(c, load_model(c.model), mesh, spec=train.SPEC)


def findings(edit=("", ""), mesh: str = "r=2 d=2", **training) -> str:
    """What the check says of the recipe after an edit."""
    with diloco(edit) as train:
        found, undecided, *_ = examine(traced(train, mesh, **training))
        return "\n".join(map(str, (*found, *undecided)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "training"),
    [
        ("r=2 d=2 t=2", {"microbatches": 2, "eval_average": "ema"}),
        ("r=2 c=2", {"context": "ring"}),
        ("r=2 c=2", {"context": "ulysses"}),
        ("r=2 d=2", {"attention": "blockwise"}),
        ("r=2 e=2", {"microbatches": 2, "model": small()}),
        ("r=2 p=2 d=2", {"microbatches": 2}),
    ],
)
def test_it_is_right(mesh, training):
    assert findings(mesh=mesh, **training) == ""


GRADIENT = '        g = checkpoint_name(g, "gradient")'
WRONG = {
    "gradients are summed over replicas": (
        (GRADIENT, f'        g = jax.tree.map(lambda x: lax.psum(x, "r"), g)\n{GRADIENT}'),
        r"LINE: psum: one device runs another program, in which this line does something else",
    ),
    "the mean divides by the devices": (
        ("total) / REPLICAS", 'total) / shardops.axis_size("r")'),
        r"LINE: div: a number that depends on the mesh: 2\.0 here, 1\.0 on one device",
    ),
    "the mean is that of each device": (
        (
            "total = shardops.einsum_unreduced(",
            "return jnp.mean(x, 0)\n        total = shardops.einsum_unreduced(",
        ),
        r"the value differs between devices of r, which `\S+ \S+` does not mention",
    ),
    "a replica is not alone": (
        ('with shardops.alone("r")', "if True"),
        "the value differs between devices of r",
    ),
    "each replica takes all rows": (
        (
            "(*each, step, schedule_step), (replicas, *rows)",
            "(each, batch, seeds, step, schedule_step), replicas",
        ),
        r"reduce_sum: it is 0\.5 times what one device computes",
    ),
    "replicas take turns with the rows": (
        (
            "x.reshape(m, here, rows // here, *rest), 1, 0",
            "x.reshape(m, rows // here, here, *rest), 2, 0",
        ),
        r"one device runs another program, in which this line does something else",
    ),
    "noise of each device": (
        (GRADIENT, f'        g = jax.tree.map(lambda x: x + lax.axis_index("r"), g)\n{GRADIENT}'),
        r"LINE: add: a value that is whole is added to a partial sum over r",
    ),
    "each replica decides when to meet": (
        ("step % INNER_STEPS == INNER_STEPS - 1,", "metrics.loss[0] > 1,"),
        r"not all devices of r reach it: cond at .+ decides for each by itself",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_edit_is_refused(name):
    edit, problem = WRONG[name]
    before = changed("diloco")
    try:
        found = findings(edit)
    except ShardError as error:  # of the types
        found = str(error)
    line = before.count("\n", 0, before.index(edit[0]) + len(edit[0])) + 1
    assert re.search(problem.replace("LINE", f":{line}"), found), found


@pytest.mark.long
def test_two_replicas_on_one_device_of_r_have_no_axis_d():
    """Its devices hold rows of both."""
    assert (
        "reshape: dim 1 of operand 0 is sharded over d: each device sees only its own"
        in findings(mesh="d=2")
    )


def test_between_outer_steps_only_metrics_cross_r():
    with diloco() as train:
        program = traced(train, "r=2 d=2").jaxpr

    def over_r(jaxprs) -> list:
        eqns = (eqn for jaxpr in jaxprs for eqn in equations_in(jaxpr))
        return [eqn for eqn in eqns if eqn.primitive.name in COLLECTIVES and "r" in axes_of(eqn)]

    conditions = [eqn for eqn in equations_in(program) if eqn.primitive.name == "cond"]
    of_outer = over_r(branch for eqn in conditions for branch in eqn.params["branches"])
    always = [eqn for eqn in over_r([program]) if eqn not in of_outer]
    assert of_outer
    assert {x.aval.shape for eqn in always for x in eqn.invars} == {()}
