"""Of planted NaNs and infinities all are named: the tensor, the line, the layer, the document."""

import dataclasses
import functools
import re
import types

import jax
import numpy as np
import pytest
import tiny
from recipes import SOURCE, module_of

from cluster.devices import make_mesh
from modeling.model import load_model
from tools.replay import nonfinite
from tools.replay.documents import _by_starts, on_host
from training_io.microscope import StepWithoutStages
from training_io.stages import placement_of

pytestmark = pytest.mark.long

LAYERS, MICROBATCHES = 4, 2
STACKS = ("attention_norm", "w_q", "w_k", "w_v", "w_o", "mlp_norm", "w_gate", "w_up", "w_down")
OTHERS = ("embed", "final_norm", "unembed")
MESHES = {
    "one device": functools.partial(tiny.mesh, "one device"),
    "d=4 t=2": functools.partial(tiny.mesh, "d=4 t=2"),
    "p=2": lambda: make_mesh(1, 2, 2, jax.devices(), 2),
}


def session_of(c, model=None, train=tiny.train):
    """What an Explainer asks of a Session."""
    model = model or load_model(c.model)
    session = types.SimpleNamespace(c=c, model=model, step=3, placement=placement_of(c, model))
    session.init = functools.partial(train.init_state, c=c, model=model)
    session.without_stages = functools.partial(StepWithoutStages, c, model, session.placement, train.programs)
    return session


@pytest.fixture(
    scope="module", params=["one device", *(pytest.param(x, marks=pytest.mark.slow) for x in ("d=4 t=2", "p=2"))]
)
def told(request):
    """Lines on a step whose state has a change, and the documents of its batch."""
    c = tiny.config(tiny.model(layers=LAYERS), microbatches=MICROBATCHES)
    with jax.set_mesh(MESHES[request.param]()):
        session = session_of(c)
        explainer, batch = nonfinite.Explainer(session), tiny.place_batch(c)
        documents = [
            dataclasses.replace(x, document=i) for i, x in enumerate(_by_starts(on_host(jax.device_get(batch))))
        ]
        clean = tiny.state(c)

        def explain(part: str, name: str, change) -> list[str]:
            state = jax.tree.map(lambda x: x.copy(), clean)
            owner = getattr(state, part)
            *inner, last = name.split("/")
            owner = functools.reduce(getattr, inner, owner)
            array = np.array(getattr(owner, last))
            change(array)
            setattr(owner, last, jax.device_put(array, getattr(owner, last).sharding))
            return explainer.explain(state, batch, documents)

        yield explain, documents


def planted(value: float, layer: int | None):
    def change(array):
        row = array if layer is None else array[layer]
        row.reshape(-1)[row.size // 2] = value

    return change


def names():
    yield from ((f"layers/{name}", layer) for name in STACKS for layer in range(LAYERS))
    yield from ((name, None) for name in OTHERS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["weights", "adam_mu", "adam_nu"])
def test_of_a_state_the_array_and_the_layer_are_named(told, part, value):
    """234 plants: 39 arrays of weights by layer, as many of each moment, with NaN and with infinity."""
    explain, _ = told
    kind = "NaN" if np.isnan(value) else "an infinity"
    for name, layer in names():
        (line,) = explain(part, name, planted(value, layer))
        of_layer = "" if layer is None else f", layer {layer}"
        assert line.startswith(f"before the step, {part}/{name}{of_layer}, entry ["), line
        assert f": {kind} (1 of " in line


LINES = {  # weight: the line that computes with it
    "attention_norm": 'return shardops.einsum_unreduced("B/r/d L/t M, M -> B/r/d L/t M", unit_rms(x, epsilon), weight)',
    "w_q": 'q = einsum("B/r/d L M, M K/t Q D',
    "w_k": 'k = einsum("B/r/d L M, M K/t D',
    "w_v": "v = save_for_backward(einsum(",
    "w_o": 'out = einsum("B/r/d L K/t Q D, K/t Q D M',
    "mlp_norm": 'return shardops.einsum_unreduced("B/r/d L/t M, M -> B/r/d L/t M", unit_rms(x, epsilon), weight)',
    "w_gate": "gate = save_for_backward(einsum(",
    "w_up": "up = save_for_backward(einsum(",
    "w_down": 'out = einsum("B/r/d L F/t, F/t M',
}


def line_of(text: str, source: str = SOURCE) -> int:
    (number,) = [i for i, line in enumerate(source.splitlines(), 1) if line.strip().startswith(text)]
    return number


def huge(layer: int | None):
    """All entries of a layer at the end of f32's range, with their signs: finite, and no product with them is."""

    def change(array):
        row = array if layer is None else array[layer]
        row[...] = np.where(row < 0, -3e38, 3e38)

    return change


@pytest.mark.parametrize("name", STACKS)
def test_of_an_activation_the_line_and_the_layer_are_named(told, name):
    """36 plants: a finite weight with which the product of one layer overflows."""
    explain, _ = told
    for layer in range(LAYERS):
        first, *_ = explain("weights", f"layers/{name}", huge(layer))
        assert re.match(rf"(NaN|an infinity) is first computed at train\.py:{line_of(LINES[name])}, ", first), first
        assert f", layer {layer} (" in first
        assert "backward" not in first


def test_outside_of_the_layers_there_is_no_layer(told):
    explain, _ = told
    first, *_ = explain("weights", "final_norm", huge(None))
    assert f"train.py:{line_of(LINES['mlp_norm'])}, rms_norm (" in first
    first, *_ = explain("weights", "unembed", huge(None))
    assert f"train.py:{line_of('logits = shardops.einsum_unreduced(')}, Llama.logits logits (" in first


def test_the_document_is_named(told):
    """Tokens that one document has: their embedding is finite, and its square is not."""
    explain, documents = told
    read = {}
    for document in documents:
        for token in document.ids[:-1].tolist():  # the last is predicted, and not read
            read.setdefault(token, set()).add(document.document)
    unique = {token: owners.pop() for token, owners in read.items() if len(owners) == 1 and token != 0}
    assert len(unique) > 3
    for token, document in unique.items():
        first, where = explain("weights", "embed", lambda array, token=token: array[token].fill(1e25))
        assert f"train.py:{line_of('return x32 * lax.rsqrt(jnp.mean(jnp.square(x32)')}, unit_rms, layer 0 (" in first
        assert re.fullmatch(rf"sequence \d+, position \d+: document {document}", where), (where, document)


def test_a_step_that_is_finite_has_no_origin(told):
    explain, _ = told
    assert explain("weights", "final_norm", lambda array: None) == []


CODE = {  # a change of train.py, the line to be named, and what follows
    "log of a negative": (
        "        hidden: act[",
        "        gate = jnp.where(jnp.arange(gate.shape[1])[None, :, None] == 5, jnp.log(-jnp.square(gate)), gate)\n",
        "Llama.layer gate, layer 0 (log)",
    ),
    "gradient of a root at 0": (
        "        hidden: act[",
        "        gate = gate + jnp.sqrt(jnp.maximum(gate, 0))\n",
        "Llama.layer gate, layer 3, in the backward pass",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CODE)
def test_of_code_the_line_is_named(name):
    """Where a fresh state is not finite either."""
    before, added, expected = CODE[name]
    source = SOURCE.replace(before, added + before)
    with module_of(source) as module, jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.MonkeyPatch.context() as patched:
        patched.setattr(nonfinite, "train", module)
        c = tiny.config(tiny.model(layers=LAYERS, module="changed_train"), microbatches=MICROBATCHES)
        session = session_of(c, train=module)
        state, batch = (
            jax.jit(session.init)(jax.random.key(0)),
            tiny.place(jax.device_get(tiny.place_batch(c)), module.Batch),
        )
        first, *_ = nonfinite.Explainer(session).explain(state, batch, [])
    assert f":{line_of(added.strip()[:20], source)}, {expected}" in first
