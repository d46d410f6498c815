"""Finds where two runs diverge: the first step whose metrics differ, and the first tensor that differs.

Each run is replayed with its own saved source, in a separate process.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwright.data.loader import TokenBatch
from shardwright.data.untrusted import refused
from shardwright.inspect.statistics.collect import Statistics
from shardwright.inspect.statistics.measures import bits
from shardwright.run.checkpoint_arrays import named_leaves
from shardwright.run.files import read_config
from shardwright.run.provenance import ROOT, source_of
from shardwright.tools.replay.documents import on_host
from shardwright.tools.replay.session import Session, Write, checkpoints_of, kept_by, logged, metrics_of, opened


def first_step(a: str, b: str) -> tuple[int | None, int]:
    """Returns the first step whose logged loss or grad_norm differs (None: none), and the number of common steps."""
    logs = [metrics_of(run) for run in (a, b)]
    common = sorted(logs[0].keys() & logs[1].keys())
    for step in common:
        pairs = ([logged(log[step], name) for log in logs] for name in ("loss", "grad_norm"))
        if any(x is not None and y is not None and x.tobytes() != y.tobytes() for x, y in pairs):
            return step, len(common)
    return None, len(common)


Value = tuple[str, str, np.ndarray]
"""Name and source line of a value, and a fingerprint that is equal if the value is."""


def of_batch(batch: TokenBatch) -> list[Value]:
    """Returns the fingerprints of a batch, by sequence."""
    host = on_host(batch)
    arrays = {field.name: getattr(host, field.name) for field in dataclasses.fields(host)}
    return [
        (f"the batch, {name}", "", np.array([zlib.crc32(row.tobytes()) for row in x], np.uint32))
        for name, x in arrays.items()
        if x is not None
    ]


def recorded(session: Session, last: int) -> dict[int, list[Value]]:
    """Fingerprints the steps from the session's to `last`: batch, saved activations, gradients, updates.

    Those of the first step begin with the state, weights first.
    """
    step = session.without_stages()
    state = step.state(session.state)
    with jax.set_mesh(step.mesh):
        of_state = jax.jit(lambda state: jax.tree.map(bits, state))(state)
    found = {session.step: [(f"the state, {name}", "", np.asarray(x)) for name, x in named_leaves(of_state).items()]}
    c = None
    while True:
        if c is not session.config:  # at first, and whenever settings change
            c = session.config
            step = session.without_stages()
            look = Statistics(step.program, session.model.table, bits)
            program = jax.jit(look, compiler_options=session.options)
        batch = session.batch()
        values = found.setdefault(session.step, [])
        values += of_batch(batch)
        with step.arguments(session.state, batch, np.int32(session.step), *session.reference) as arguments:
            values += look.fingerprints(program(*arguments))
        if session.step == last:
            return found
        session.advance()


def compared(a: dict[int, list[Value]], b: dict[int, list[Value]]) -> tuple[int, str] | None:
    """Returns the first step with a value that differs, and a description of the value; None if all are equal.

    Values are matched by name, since their lines may have moved. A value that only one run has is named if no other
    value differs.
    """
    for step in sorted(a.keys() & b.keys()):
        ours, theirs = ({name: (place, x) for name, place, x in of[step]} for of in (a, b))
        for name, (place, x) in ours.items():
            other, y = theirs.get(name, (place, x))
            if not np.array_equal(x, y):
                where = f", {place}" * bool(place) + f" ({other} in the other run)" * (other != place)
                return step, name + where + _part(name, x, y)
        if alone := [name for name in (*ours, *theirs) if (name in ours) != (name in theirs)]:
            return step, f"{alone[0]}, which only one run has"
    return None


def _part(name: str, x: np.ndarray, y: np.ndarray) -> str:
    """Names the first sequence of a batch, or layer of a weight, in which a value differs."""
    if x.shape != y.shape:
        return ", in its shape"
    if len(x) == 1 or " in layer " in name:
        return ""
    return f", {'sequence' if name.startswith('the batch') else 'layer'} {int(np.flatnonzero(x != y)[0])}"


def rebuilt(run: str, step: int, directory: Path, trust: bool) -> Path:
    """Returns the root of the source with which a run did a step: this program's, or one unpacked in `directory`.

    Raises:
        ValueError: the source differs from this program's, and it is not trusted or the run did not save it.
    """
    found = kept_by(run, step)
    if found is None or found[1]["source"] == source_of():
        return ROOT
    kept, about = found
    if not trust:
        raise ValueError(
            f"{run} was made by other source, kept in {kept}: give trust=true to run that code, if it is yours or you "
            "have read it."
        )
    remedy = "Check out the commit in provenance.json there, and replay each run with its own."
    with refused(f"{kept / 'source.zip'} cannot be read", remedy), zipfile.ZipFile(kept / "source.zip") as archive:
        archive.extractall(directory)
    for path in kept.glob("*.py"):
        if path.name in about["source"] and not (directory / path.name).exists():
            shutil.copyfile(path, directory / path.name)
    return directory


def compare_runs(config: Any, write: Write) -> dict[str, Any]:
    """Shows the first step and the first tensor in which two runs differ.

    Each run is replayed with its own source, in a separate process, both on the same mesh.
    """
    runs = config.run, config.against
    step, common = first_step(*runs)
    if step is None:
        write(f"metrics     bit-identical in all {common} steps that both runs logged")
        return {"step": None, "first": None}
    write(f"metrics     differ first in step {step}")
    chosen = {axis: size for axis, size in dataclasses.asdict(config.mesh).items() if size is not None}
    mesh = chosen or read_config(Path(config.run) / "config.yaml").get("mesh", {})
    settings = {"trust": config.trust, "other_source": config.other_source}
    settings |= {f"mesh.{axis}": size for axis, size in mesh.items()}
    # Before the step at which the metrics differ, because the update of an earlier step may have caused it.
    start = max(done for done in _saved(runs[0]) & _saved(runs[1]) if done <= max(step - 2, 0))
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for i, run in enumerate(runs):
            root = rebuilt(run, step - 1, Path(directory) / f"source of {i}", config.trust)
            by = ", with its saved source" * (root != ROOT)
            write(f"replaying   {run} from step {start + 1} to {step}{by}")
            of = {"run": str(Path(run).absolute()), "step": step - 1, "since": start, "out": f"{directory}/{i}.json"}
            found.append(recorded_by(root, **of, **settings))
    first = compared(*found)
    if first is None:
        write(
            f"tensors     bit-identical up to step {step}, each with its own source, on the same mesh: the cause is "
            "the mesh, a package or the hardware"
        )
    else:
        first = first[0] + 1, first[1]
        write(f"tensors     in step {first[0]} the first that differs is {first[1]}")
    return {"step": step, "first": first}


def _saved(run: str) -> set[int]:
    """Returns the steps of the checkpoints, and 0 for the beginning."""
    with checkpoints_of(run) as checkpoints:
        return {0, *checkpoints.steps()}


def recorded_by(root: Path, **settings: Any) -> dict[int, list[Value]]:
    """Returns the fingerprints from a process that runs the source in `root` with these settings.

    Raises:
        ValueError: the process failed; the message has its last line.
    """
    # -P: imports nothing from the working directory, which stays the same because paths of data are relative to it.
    module = "shardwright.tools.replay" if (root / "shardwright/tools").is_dir() else "tools.replay"  # of older runs
    command = [sys.executable, "-P", "-m", module, *(f"{name}={json.dumps(x)}" for name, x in settings.items())]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ValueError(f"{settings['run']} cannot be replayed with its own source: {why}")
    recorded = json.loads(Path(settings["out"]).read_text())
    return {
        int(step): [
            (name, place.removeprefix(f"{root}/"), np.array(numbers, np.uint32)) for name, place, numbers in values
        ]
        for step, values in recorded["steps"].items()
    }


def record(config: Any, write: Write) -> dict[str, Any]:
    """Returns the fingerprints of the steps from config.since to config.step, for JSON."""
    with opened(config.run, config.since, config.mesh, config.trust, config.other_source, write) as session:
        steps = recorded(session, config.step)
    return {
        "steps": {
            step: [(name, place, x.reshape(-1).tolist()) for name, place, x in values] for step, values in steps.items()
        }
    }
