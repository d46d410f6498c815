"""What the check of a step says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import train
from shardlib import shardops
from shardlib.shardtypes import ShardError
from shardwright.inspect import smaller, soundness
from shardwright.program.step import Step
from tests.support import tiny


class PerDevice(train.Llama):
    """Multiplies by the number of sequences on a device."""

    def layer(self, x, *rest):
        return super().layer(x * x.shape[0], *rest)


class FarPositions(train.Llama):
    """Doubles what is at positions that small sequences do not have."""

    def layer(self, x, *rest):
        is_far = jnp.arange(x.shape[1]) >= 1000
        return super().layer(x * jnp.where(is_far, 2, 1).astype(x.dtype)[:, None], *rest)


class FewerBits(train.Llama):
    """Multiplies by a number in bf16 if layers are divided among devices along t."""

    def layer(self, x, *rest):
        dtype = jnp.bfloat16 if shardops.axis_size("t") > 1 else x.dtype
        return super().layer(jnp.multiply(x.astype(dtype), 2).astype(x.dtype), *rest)


class FewDevices(train.Llama):
    """Divides by the number of devices along d, but multiplies by at most three."""

    def layer(self, x, *rest):
        n = shardops.axis_size("d")
        return super().layer(x * min(n, 3) / n, *rest)


FAR = {
    "rounded": lambda x, p: jnp.floor((p + 100) / 100) - 1,
    "bits": lambda x, p: (p | 127) - 127,
    "a table": lambda x, p: jnp.asarray([0.0] * 128 + [1.0] * 4000)[p],
    "masks that never meet": lambda x, p: (p % 5 == 4).astype(float) * (p % 7 == 6),
    "fewer one-hots than devices": lambda x, p: 1 - jnp.sum(jax.nn.one_hot(lax.axis_index("d"), 3)),
}
"""Factors of x that are 0 at small sizes, by number of positions on a device, or on few devices."""
ORDINARY = {
    "the second half of layers": lambda c, layer: jnp.where(layer >= c.layers // 2, 1.0, 0.5),
    "a table of layers": lambda c, layer: jnp.asarray(np.linspace(0.1, 1, c.layers), jnp.float32)[
        layer
    ],
}


def model_of(factor) -> type:
    """A model that multiplies x by what `factor` returns for the model, x and the number of a
    layer.
    """

    class Scaled(train.Llama):
        def layer(self, x, w, tokens, attention):
            by = jnp.asarray(factor(self.config, x, tokens.layer), x.dtype)
            return super().layer(x * by.reshape(by.shape + (1,) * by.ndim), w, tokens, attention)

    return Scaled


def place(function, offset: int) -> str:
    return f"tests/inspect/test_soundness.py:{function.__code__.co_firstlineno + offset}: "


def verdict_on(model: type, mesh: str = "d=4 t=2", **training) -> soundness.Verdict:
    c = tiny.config(tiny.model(layers=2), **training)
    with jax.set_mesh(tiny.mesh(mesh)):
        step = Step(c, model(c.model), jax.sharding.get_mesh(), train.SPEC)
        return soundness.examine(step, ("evaluation",))


@pytest.mark.quick
def test_a_finding_names_its_line():
    first, *_ = verdict_on(PerDevice, attention="blockwise").found
    # JAX 0.12 turns the number into an array first (astype).
    where = place(PerDevice.layer, 1)
    assert re.match(
        where
        + "(mul|astype): a number that depends on the mesh: 2(.0)? here, 6(.0)? on one device",
        str(first),
    )


@pytest.mark.quick
def test_a_line_that_rounds_to_fewer_bits_on_the_mesh_is_wrong():
    """Exact arithmetic does not see it."""
    first, *_ = verdict_on(FewerBits).found
    where = place(FewerBits.layer, 2)
    assert re.match(
        where + "computes bfloat16( and float32)? on the mesh, float32 on one device", str(first)
    )


@pytest.mark.long
def test_what_is_right_on_a_few_devices_only_is_named():
    verdict = verdict_on(FewDevices, "d=8")
    (line,) = verdict.undecided
    assert line.startswith(place(FewDevices.layer, 2))
    assert re.search(
        r"no product of sizes explains: 3(\.0)? \(3(\.0)? and 2(\.0)? in the small programs\)$",
        line,
    )


@pytest.mark.long
@pytest.mark.parametrize("factor", FAR.values(), ids=FAR)
def test_what_small_sizes_do_not_reach_is_named(factor):
    model = model_of(lambda c, x, layer: 1 + factor(x, jnp.arange(x.shape[1])) * x.shape[0])
    verdict = verdict_on(model, "d=8", seq_len=4096)
    assert verdict.found == []
    assert any("tests/inspect/test_soundness.py" in line for line in verdict.undecided)


@pytest.mark.long
@pytest.mark.parametrize("factor", ORDINARY.values(), ids=ORDINARY)
def test_numbers_of_a_model_are_decided(factor):
    verdict = verdict_on(model_of(lambda c, x, layer: factor(c, layer)))
    assert (verdict.found, verdict.undecided) == ([], [])


def limited(otherwise):
    """A model with another factor of x if that is larger than any input makes it."""

    class Limited(train.Llama):
        def logits(self, w, x):
            size = shardops.einsum_unreduced("B/b L/c/t M -> +b +c +t", jnp.abs(x))
            size = shardops.psum("+b +c +t ->", size)
            return super().logits(w, x * jnp.where(size > 1e9, otherwise(x), 1.0).astype(x.dtype))

    return Limited


@pytest.mark.long
def test_branches_that_no_input_takes_are_compared():
    right = verdict_on(limited(lambda x: 0.5))
    assert (right.found, right.undecided) == ([], [])
    wrong = verdict_on(limited(lambda x: x.shape[0]))
    assert wrong.found == []
    assert re.search("gt: always false in what was run", "".join(wrong.undecided))


@pytest.mark.long
def test_a_decision_that_small_sizes_never_reach_is_named_and_must_be_accepted(monkeypatch):
    verdict = verdict_on(FarPositions, seq_len=4096)
    assert verdict.found == []
    (line,) = [line for line in verdict.undecided if "ge" in line]
    assert line.startswith(place(FarPositions.layer, 1) + "ge: always false in what was run")

    monkeypatch.setattr(soundness, "examine", lambda step, names: verdict)
    step = tiny.step(tiny.config())
    with pytest.raises(
        ShardError, match=r"test_soundness.py:\d+: ge: always false in what was run\n  remedy: set "
    ):
        soundness.check_steps(step)
    accepting = tiny.step(tiny.config(accept_undecided=True))
    assert f"not decided: {place(FarPositions.layer, 1)}ge" in soundness.check_steps(accepting).how


@pytest.mark.long
def test_what_stands_for_a_kernel_is_named(monkeypatch):
    monkeypatch.setattr(smaller, "attention_paths_of", lambda step: ["triton"])
    assert verdict_on(train.Llama).apart == ["attention by triton run as blockwise"]


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("import jax as j", "return j.device_count()"),
        ("", "from jax import device_count\n        return device_count()"),
        ("import jax\nN: int = jax.device_count()", "return N"),
        ("import jax\nN, M = jax.local_device_count(), 1", "return N"),
        ("import jax\nN = jax.device_count()", None),
    ],
)
def test_questions_about_the_machine_are_found_however_they_are_written(
    tmp_path, monkeypatch, head, body
):
    """A number that no step reads is none of them."""
    name = f"a_model_that_asks_{abs(hash((head, body)))}"
    (tmp_path / f"{name}.py").write_text(
        f"{head}\n\n\nclass Model:\n    def layer(self):\n        {body or 'return 1'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [str(finding) for finding in soundness._machines(__import__(name).Model)]
    assert bool(found) == (body is not None)
    assert all("device_count is the same on all meshes" in text for text in found)
