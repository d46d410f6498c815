"""The compiled training step: what the backward pass keeps."""

import re

import pytest

import train
from tests.support import tiny
from tests.support.step_text import compile_step, computations


def kept_for_backward(hlo: str, layers: int) -> list[str]:
    """Shapes, for one layer, of the arrays that the forward loop stacks up layer by layer.

    The loop carries its inputs as well, which it passes on unchanged; what it writes is not among
    them.
    """
    loops = [
        (line, body)
        for line in hlo.splitlines()
        for body in re.findall(r" while\(.*body=%?([\w.\-]+)", line)
    ]
    line, body = next((line, body) for line, body in loops if "transpose" not in line)
    shapes = re.findall(r"\w+\[[\d,]*\]", line.split(" while(")[0].split(" = ", 1)[1])
    root = next(i for i in computations(hlo)[body] if i.lstrip().startswith("ROOT"))
    results = re.findall(r"%([\w.\-]+)", root.split(" tuple(", 1)[1].split(")", 1)[0])
    unchanged = {
        re.match(r"\s*%?([\w.\-]+) = ", i)[1]
        for i in computations(hlo)[body]
        if " get-tuple-element(" in i
    }
    stacked = [s for s, name in zip(shapes, results, strict=True) if name not in unchanged]
    return sorted(re.sub(rf"\[{layers},", "[", s) for s in stacked if f"[{layers}," in s)


@pytest.mark.long
def test_the_backward_pass_keeps_what_is_saved_for_it():
    c = tiny.model()
    b, l, k, f = tiny.BATCH // 4, tiny.LENGTH, c.n_kv // 2, c.d_ff // 2
    q, kv = f"f32[{b},{l},{k},{c.n_q_per_kv},{c.d_head}]", f"f32[{b},{l},{k},{c.d_head}]"
    stream, hidden = f"f32[{b},{l // 2},{c.d_model}]", f"f32[{b},{l},{f}]"
    saved = [q, q, kv, kv, stream, hidden, hidden]
    # Beside what is saved, a layer's backward pass gets the layer's own input.
    assert kept_for_backward(compile_step("d=4 t=2").as_text(), c.layers) == sorted(
        [*saved, stream]
    )


@pytest.mark.long
def test_without_saving_the_backward_pass_keeps_the_layer_input_only(monkeypatch):
    monkeypatch.setattr(train, "save_for_backward", lambda x, **_: x)
    assert len(kept_for_backward(compile_step("d=4 t=2").as_text(), tiny.model().layers)) == 1
