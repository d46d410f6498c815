"""The check of a run's steps before the first one: on this mesh they compute what they compute on one device."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from input_loader import batch_shapes
from modeling.model import inputs_of
from shardlib.parsing import PIPELINE_AXIS, ShardError
from soundness.check import Finding, prove
from training_io.config import Config

SHOWN = 5
"""Number of findings that an error shows."""


def check_steps(programs: Callable, c: Config, model: Any, source: Any, known: Path | None = None) -> None:
    """Refuses steps that do not compute on the mesh in force what they compute on one device. They are not run.

    With pipeline stages, the pieces that the stages run are checked on a mesh without them, where they are one program;
    their schedule is checked by shardlib.schedules.

    Args:
        programs: train.programs.
        c: the configuration.
        model: the model.
        source: hashes of the source, from training_io.provenance.source_of.
        known: directory that records what was found right, so that each program is checked once; None: no record.

    Raises:
        ShardError: with the lines of the source that are wrong, what the values there are, and what to do.
    """
    mesh = jax.sharding.get_abstract_mesh()
    settings = {k: v for k, v in dataclasses.asdict(c).items() if k in ("model", "optimizer", "training", "pipeline")}
    _refuse(lambda: find_unsound(programs, c, model, mesh), known, source, settings)


def check_program(program: Any, args: Any, source: Any, known: Path | None, *settings: Any) -> None:
    """Refuses a jitted program like check_steps, for arguments of these shapes.

    Args:
        program: the jitted program, which calls typed_shard_map.
        args: its arguments.
        source: as in check_steps; None: no record.
        known: as in check_steps.
        *settings: what its source reads beside the arguments.

    Raises:
        ShardError: as check_steps.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    trace = lambda: {program.__name__: program.trace(*shapes).jaxpr}
    _refuse(lambda: prove(trace), known if source else None, source, program.__name__, settings, repr(shapes))


def _refuse(find: Callable[[], list[Finding]], known: Path | None, *parts: Any) -> None:
    """Raises ShardError for what `find` finds, but for `parts` in which nothing was found before."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = *parts, tuple(mesh.shape.items()), jax.__version__, jax.default_backend()
    record = known and known / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    if record and record.exists():
        return
    found = find()
    if found:
        more = f"\n… and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ShardError("\n".join(map(str, found[:SHOWN])) + more, place="")
    if record:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def find_unsound(programs: Callable, c: Config, model: Any, mesh: Any) -> list[Finding]:
    """What is wrong with the training and the evaluation step on a mesh. The arguments are those of check_steps."""

    def trace(c: Config = c, model: Any = model) -> dict[str, Any]:
        batch = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches, len(inputs_of(model)))
        return {name: traced.jaxpr for name, traced in programs(c, model, batch).items()}

    def larger() -> dict[str, Any]:
        doubled = _doubled(c)
        return trace(doubled, type(model)(doubled.model))

    if mesh.shape.get(PIPELINE_AXIS, 1) == 1:
        return prove(trace, mesh, larger=larger)
    others = {axis: n for axis, n in mesh.shape.items() if axis != PIPELINE_AXIS}
    kinds = tuple(kind for kind, axis in zip(mesh.axis_types, mesh.axis_names, strict=True) if axis != PIPELINE_AXIS)
    alone = AbstractMesh(tuple(others.values()), tuple(others), axis_types=kinds)
    return [*prove(trace, alone, larger=larger), *prove(trace, mesh, (PIPELINE_AXIS,), larger)]


def _doubled(c: Config) -> Config:
    """The configuration with twice the size of each dim that is sharded, and of a head."""
    double = lambda of, names: dataclasses.replace(of, **{n: 2 * getattr(of, n) for n in names if hasattr(of, n)})
    model = double(c.model, {*c.model.sharded, "d_head"})
    return dataclasses.replace(c, model=model, training=double(c.training, ("batch_size", "seq_len")))
