"""What the check of a step says."""

import re

import jax
import jax.numpy as jnp
import pytest

import train
from shardlib import shardops
from shardlib.shardtypes import ShardError
from shardwright.inspect import soundness
from shardwright.program.step import Step
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("not_remembered")


class Plain(train.Llama):
    """Layers that only pass the residual stream on: it is traced in no time."""

    def layer(self, x, *rest):
        return x


class PerDevice(Plain):
    """Multiplies by the number of sequences on a device."""

    def layer(self, x, *rest):
        return super().layer(x * x.shape[0], *rest)


class FarPositions(Plain):
    """Doubles what is at positions that small sequences do not have."""

    def layer(self, x, *rest):
        is_far = jnp.arange(x.shape[1]) >= 1000
        return super().layer(x * jnp.where(is_far, 2, 1).astype(x.dtype)[:, None], *rest)


class FewerBits(Plain):
    """Multiplies by a number in bf16 if layers are divided among devices along t."""

    def layer(self, x, *rest):
        dtype = jnp.bfloat16 if shardops.axis_size("t") > 1 else x.dtype
        return super().layer(jnp.multiply(x.astype(dtype), 2).astype(x.dtype), *rest)


class FewDevices(Plain):
    """Divides by the number of devices along d, but multiplies by at most three."""

    def layer(self, x, *rest):
        n = shardops.axis_size("d")
        return super().layer(x * min(n, 3) / n, *rest)


class Square(train.Llama):
    """Flattens a matrix that has the width twice."""

    def layer(self, x, *rest):
        ones = jnp.ones((x.shape[-1],) * 2, x.dtype)
        return super().layer(x * ones.reshape(-1)[0], *rest)


FAR = {
    "bits": lambda p: (p | 127) - 127,
    "a table": lambda p: jnp.asarray([0.0] * 128 + [1.0] * 4000)[p],
}
"""Functions of a position that are 0 at those that small sequences have."""


def scaled(factor) -> type:
    """A model that multiplies far positions by the number of sequences on a device."""

    class Scaled(Plain):
        def layer(self, x, *rest):
            by = 1 + factor(jnp.arange(x.shape[1])) * x.shape[0]
            return super().layer(x * by.astype(x.dtype)[:, None], *rest)

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
    first, *_ = verdict_on(PerDevice).found
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


def test_few_chunks_and_square_matrices_are_decided(monkeypatch):
    dims = train.ModelConfig.dims
    monkeypatch.setattr(train.ModelConfig, "dims", dims | {"O": "d_model"})
    monkeypatch.setattr(train.ModelConfig, "slots", 3, raising=False)  # a name that moe.py has
    verdict = verdict_on(Square, loss_chunk=4)
    assert verdict.found == []
    assert verdict.undecided == []


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
    verdict = verdict_on(scaled(factor), "d=8", seq_len=4096)
    assert verdict.found == []
    assert any("tests/inspect/test_soundness.py" in line for line in verdict.undecided)


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


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("import jax as j", "return j.device_count()"),
        ("import jax\nN: int = jax.device_count()", "return N"),
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
