"""The compiled training step: its collectives, and what the backward pass keeps."""

import functools
import re

import jax
import pytest
import tiny
from step_text import collectives, compile_step, computations

import train


@functools.cache
def optimized_hlo(mesh: str) -> str:
    return compile_step(mesh).as_text()


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["d=4 t=2", "r=2 d=2 t=2"])
def test_every_collective_is_a_written_one(mesh):
    found, table = collectives(optimized_hlo(mesh)), train.Llama(tiny.model()).table
    of_layers, all_weights = len(jax.tree.leaves(table.layers)), len(jax.tree.leaves(table))
    # Attention and the MLP each gather the positions and scatter their output.
    gathers, scatters = of_layers + 2, 2
    assert found["forward"] == {"all-gather": gathers, "reduce-scatter": scatters}
    # Backward: the layer's gathers again, and each collective transposed, a gather to a reduce-scatter and back. The
    # gradient of each weight is summed over the replicas where replicate() is.
    backward = {"all-gather": gathers + scatters, "reduce-scatter": gathers, "all-reduce": of_layers}
    assert found["backward"] == backward

    # The head gathers the positions; the embedding scatters its output.
    outer_gathers, outer_scatters = all_weights - of_layers + 1, 1
    # Three in cross_entropy; the loss, the number of targets, the norm of the gradients.
    reductions = 3 + 3
    assert found["outside"] == {
        "all-gather": outer_gathers + outer_scatters,
        "reduce-scatter": outer_scatters + outer_gathers,
        "all-reduce": reductions + all_weights - of_layers,
    }


def kept_for_backward(hlo: str, layers: int) -> list[str]:
    """Shapes, for one layer, of the arrays that the forward loop stacks up layer by layer.

    The loop carries its inputs as well, which it passes on unchanged; what it writes is not among them.
    """
    loops = [(line, body) for line in hlo.splitlines() for body in re.findall(r" while\(.*body=%?([\w.\-]+)", line)]
    line, body = next((line, body) for line, body in loops if "transpose" not in line)
    shapes = re.findall(r"\w+\[[\d,]*\]", line.split(" while(")[0].split(" = ", 1)[1])
    root = next(i for i in computations(hlo)[body] if i.lstrip().startswith("ROOT"))
    results = re.findall(r"%([\w.\-]+)", root.split(" tuple(", 1)[1].split(")", 1)[0])
    unchanged = {re.match(r"\s*%?([\w.\-]+) = ", i)[1] for i in computations(hlo)[body] if " get-tuple-element(" in i}
    stacked = [s for s, name in zip(shapes, results, strict=True) if name not in unchanged]
    return sorted(re.sub(rf"\[{layers},", "[", s) for s in stacked if f"[{layers}," in s)


def test_the_backward_pass_keeps_what_is_saved_for_it():
    mesh, c = "d=4 t=2", tiny.model()
    b, l, k, f = tiny.BATCH // 4, tiny.LENGTH, c.n_kv // 2, c.d_ff // 2
    q, kv = f"f32[{b},{l},{k},{c.n_q_per_kv},{c.d_head}]", f"f32[{b},{l},{k},{c.d_head}]"
    stream, hidden = f"f32[{b},{l // 2},{c.d_model}]", f"f32[{b},{l},{f}]"
    saved = [q, q, kv, kv, stream, hidden, hidden]
    # Beside what is saved, a layer's backward pass gets the layer's own input.
    assert kept_for_backward(optimized_hlo(mesh), c.layers) == sorted([*saved, stream])


@pytest.mark.long
def test_without_saving_the_backward_pass_keeps_the_layer_input_only(monkeypatch):
    monkeypatch.setattr(train, "save_for_backward", lambda x: x)
    assert len(kept_for_backward(compile_step("d=4 t=2").as_text(), tiny.model().layers)) == 1
