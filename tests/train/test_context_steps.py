"""Whole steps with positions sharded over c are proved. Their numbers: test_oracles.py."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardwright.inspect.soundness import find_unsound
from shardwright.modeling import attention_calls, attention_paths
from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from shardwright.tools.verify import ONE_DEVICE
from tests.support import tiny


def sizes_of(mesh: str) -> dict[str, int]:
    return ONE_DEVICE | {word[0]: int(word[2:]) for word in mesh.split()}


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("how", "path", "mesh"),
    [
        ("gather", "blockwise", "d=2 c=2 t=2"),
        ("ring", "auto", "r=2 e=2 c=4"),
        ("ring", "auto", "p=2 c=2"),
    ],
)
def test_steps_are_proved(how, path, mesh):
    """Four kv heads are fewer than some meshes have devices of c and t."""
    sizes = {axis: n for axis, n in sizes_of(mesh).items() if n > 1 or axis in "rdt"}
    on = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes)
    )
    model = tiny.model(d_model=48, layers=2, n_kv=4, n_q_per_kv=6)
    c = tiny.config(model, context=how, attention=path, microbatches=2, seq_len=48)
    assert find_unsound(trace_step(c, load_model(c.model), on)) == []


@pytest.mark.long
@pytest.mark.parametrize("path", ["cudnn", "splash"])
def test_a_step_by_ulysses_and_a_kernel_is_proved(monkeypatch, path):
    """The kernels, which take whole sequences, are not run; cuDNN's is replaced."""
    real = jax.nn.dot_product_attention

    def plain(*args, implementation, **options):
        return real(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    for module in (attention_calls, attention_paths):
        # this device has no kernels
        monkeypatch.setattr(module, "choose", lambda setting, *_, **__: setting)
    c = tiny.config(tiny.model(layers=1, n_kv=4), context="ulysses", attention=path)
    c.training.seq_len = 128
    assert find_unsound(trace_step(c, load_model(c.model), tiny.mesh("d=2 c=2 t=2"))) == []
