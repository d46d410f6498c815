"""Finds the answers to the questions in the program: in traced steps, and in calls that actions make."""

import ast
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from omegaconf import OmegaConf

from shardlib.interpret import Operation, operations_in
from shardwright.cluster.devices import make_mesh
from shardwright.data.loader import make_loader
from shardwright.modeling import attention_paths
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.config import Config
from shardwright.run.launch import composed
from shardwright.run.opening import fresh_state
from shardwright.run.step import Step, open_steps
from shardwright.run.stores import Store

ROOT = Path(__file__).parents[2]
NAME = "local_test_synthetic"
SMALL = "training.batch_size=8", "model.d_model=64"


def callers(
    owner: Any, name: str, action: Callable[[], object], when: Callable[..., Any] = lambda *_: True
) -> set[str]:
    """The lines of the trainer that call owner.name while `action` runs, where when(result, *arguments)."""
    found = set()
    original = getattr(owner, name)

    def recorded(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if when(result, *args):
            frame = sys._getframe(1)
            while frame and not is_trainers(frame.f_code.co_filename):
                frame = frame.f_back
            found.add(place(frame.f_code.co_filename, frame.f_lineno) if frame else "")
        return result

    with mock.patch.object(owner, name, recorded):
        action()
    return found


def is_trainers(file: str) -> bool:
    path = Path(file)
    return path == ROOT / "train.py" or path.is_relative_to(ROOT / "shardwright")


def place(file: str, line: int) -> str:
    return f"{Path(file).relative_to(ROOT)}:{line}"


def lines(step: Step, kind: str, when: Callable[[Operation], Any] = lambda op: True) -> set[str]:
    """The lines of a step's operations of this kind."""
    found = (op.line() for op in operations_in(step.jaxpr) if kind in op.shown and when(op))
    return {place(*line) for line in found if line}


def axes_of(op: Operation) -> set[str]:
    names = op.params.get("axis_name") or op.params.get("axes") or ()
    return {names} if isinstance(names, str) else set(names)


def times(op: Operation) -> int:
    return int(np.prod([outer.params.get("length", 1) for outer in op.callers]))


def facts() -> Iterator[tuple[str, set[str]]]:
    """Each question with its right answers."""
    c = composed(NAME, *SMALL)
    (step,) = open_steps(c, {"d": 2, "c": 2, "t": 2})
    one = jax.devices()[:1]
    evaluation = step.other(name="evaluation")

    def load() -> None:
        with jax.set_mesh(make_mesh(one)):
            make_loader(c.data, "train", 8, 64).load(0)

    def start() -> None:
        with jax.set_mesh(make_mesh(one)):
            fresh_state(open_steps(c, {})[0].other(mesh=make_mesh(one)))

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpoints:
            checkpoints.save(0, {"x": jax.numpy.ones((64, 1024))}, {})
            checkpoints.wait()

    yield "mesh", callers(jax, "make_mesh", lambda: make_mesh(one))
    yield "config", callers(OmegaConf, "to_object", lambda: composed(NAME), lambda made, _: isinstance(made, Config))
    yield "data", callers(jax, "make_array_from_callback", load)
    yield "seed", callers(jax.random, "key", start, lambda _, seed: isinstance(seed, int))
    yield "attention", callers(attention_paths, "choose", lambda: open_steps(c, {})[0].traced)
    yield "rope", lines(evaluation, "cos")
    yield "swiglu", lines(step, "logistic")
    yield "norms", {str(sum(times(op) for op in operations_in(evaluation.jaxpr) if op.shown == "rsqrt"))}
    yield "context", lines(step, "all_gather", lambda op: axes_of(op) == {"c"} and op.eqn.invars[0].aval.ndim == 4)
    at_rest = c.model.d_ff // 2, c.model.d_model // 4  # a device's part of w_down, and of its gradient
    yield "fsdp", lines(step, "psum", lambda op: op.eqn.invars[0].aval.shape == at_rest)
    yield "clipping", lines(step, "psum", lambda op: {"d", "t"} <= axes_of(op) and not op.eqn.outvars[0].aval.shape)
    yield "checkpoint", callers(Store, "write", save, lambda _, store, key, content: len(content or b"") > 2**16)


def is_right(answer: object, right: set[str]) -> bool:
    """Whether an answer is one of these: the number, or path:line of any line of the statement."""
    file, _, line = str(answer).strip().rpartition(":")
    path = ROOT / file
    if not file or not line.isdigit() or not path.is_file() or not path.resolve().is_relative_to(ROOT):
        return str(answer).strip() in right
    statements = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    spans = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in statements if not hasattr(node, "body")
    ]
    own = next((span for span in spans if int(line) in span), range(0))
    return any(f"{path.resolve().relative_to(ROOT)}:{i}" in right for i in own)
