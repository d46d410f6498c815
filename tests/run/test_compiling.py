"""The files of the compiled step, its source lines with the compilation cache, and its profile."""

import gzip
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.inspect.examine import draw_step
from shardwright.program.compiling import compile_step
from shardwright.program.flops import PeakFlops, Speed
from shardwright.run.listeners import profile
from shardwright.run.metrics import RunLog
from tests.support.simulated import without_cache, xla_flags

ROOT = Path(__file__).parents[2]


def lower():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))

    def step(w, x):
        return jax.lax.psum(jnp.tanh(x @ w), "d")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    w = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    return mesh, jax.jit(mapped).lower(w, x)


def test_the_text_is_kept_and_drawn(tmp_path):
    mesh, lowered = lower()
    with jax.set_mesh(mesh):
        compiled, text = compile_step(lowered, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == [text]
    assert re.fullmatch(r"training_step_optimized_hlo_[\d_]{19}\.txt", text.name)
    assert text.read_text() == f"// mesh d=8\n{compiled.as_text()}"
    assert compiled.as_text() == lowered.compile().as_text()
    picture = text.with_suffix(".svg")
    assert draw_step(text) == f"picture    {picture}"
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    table = json.loads(text.with_suffix(".json").read_text())
    (row,) = [row for row in table["rows"] if row["kind"] == "collective"]
    assert (row["what"], row["axes"], row["size"]) == ("all-reduce", "d", 2 * 8 * 32 * 4 * 7 // 8)
    assert table["source"][row["line"]] == 'return jax.lax.psum(jnp.tanh(x @ w), "d")'


def test_texts_and_pictures_of_earlier_starts_are_removed(tmp_path):
    mesh, lowered = lower()
    earlier = "training_step_optimized_hlo_2020_01_01_00_00_00"
    others = {"training_step_optimized_hlo_mine.txt", "notes_2001_01_01_00_00_00.txt"}
    for file in [*others, *(earlier + suffix for suffix in (".txt", ".json", ".svg"))]:
        (tmp_path / file).write_text("")
    with jax.set_mesh(mesh):
        _, text = compile_step(lowered, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others | {text.name}


STEP = """import sys
from pathlib import Path
import jax, jax.numpy as jnp
from shardwright.inspect.compiled.hlo import parse
from shardwright.program.compiling import compile_step
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
def step(x):
    return jnp.tanh(x @ x)
mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
with jax.set_mesh(mesh):
    _, text = compile_step(jax.jit(step).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)), Path(sys.argv[2]))
program = parse(text.read_text())
lines = {frame.line for c in program.computations.values() for i in c.instructions.values() for frame in i.frames}
print(len(hits), sorted(lines & {11, 12}), jax.config.jax_compilation_cache_include_metadata_in_key)
"""


@pytest.mark.long
def test_a_step_from_the_cache_has_the_lines_of_now(tmp_path):
    """The same program twice, then with a comment above the step."""
    program, found = tmp_path / "program.py", []
    env = without_cache() | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(1)}
    env |= {"JAX_PLATFORMS": "cpu"}
    for i, text in enumerate((STEP, STEP, STEP.replace("def step", "# a comment\ndef step"))):
        program.write_text(text)
        command = [sys.executable, program, tmp_path / "cache", tmp_path / f"run{i}"]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["0 [11] False", "1 [11] False", "0 [12] False"]


SPEED = Speed(100, 1e6, PeakFlops(1e9, "the source of the peak"))


@jax.jit
def profiled_step(x):
    return jnp.tanh(x @ x) / 8


@pytest.mark.long
def test_the_third_to_the_sixth_step_are_traced_and_the_time_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "MODULE", "jit_profiled_step")
    x = jax.block_until_ready(profiled_step(jnp.ones((64, 64))))
    with RunLog(tmp_path, total_steps=18, start_step=10, speed=SPEED) as log:
        run: Any = SimpleNamespace(log=log, directory=tmp_path, start=10, end_step=18, hlo=None)
        run.settle = lambda: None
        profiler = profile.Profile()
        profiler.begin(run)
        for i in range(8):
            profiler.before(10 + i, None, None)
            time.sleep(0.2)
            with jax.profiler.TraceAnnotation(f"this is step {i}"):
                x = profiled_step(x)
            profiler.after(10 + i, None, x)
        profiler.close()
    (trace,) = tmp_path.glob("plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    steps = {name for name in names if name.startswith("this is step")}
    assert steps == {f"this is step {i}" for i in (2, 3, 4, 5)}
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    about = found["event"], found["step"], found["steps"], found["devices"]
    assert about == ("step_bubble", 16, 4, 1)
    assert 0.2 <= found["gap_seconds"] < min(0.6, found["step_seconds"])
    assert found["step_bubble"] == pytest.approx(found["gap_seconds"] / found["step_seconds"])
