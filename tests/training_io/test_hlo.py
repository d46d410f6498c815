import shutil
import stat
import subprocess
import time
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from training_io import hlo
from training_io.hlo import compile_with_hlo_dump, render_svg, start_rendering

GRAPH = 'digraph G { a [label="one & two"]; a -> b; }'


def lower():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))

    def step(w, x):
        return jax.lax.psum(jnp.tanh(x @ w), "d")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    w = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    return mesh, jax.jit(mapped).lower(w, x)


def program(directory, name, text):
    path = directory / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "run" / "hlo.dot"
    path.parent.mkdir()
    path.write_text(GRAPH)
    return path


def test_the_optimized_graph_is_kept_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    mesh, lowered = lower()
    compiled, dot = compile_with_hlo_dump(lowered, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == [dot]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert dot.name.startswith("training_step_optimized_hlo_")
    assert dot.suffix == ".dot"
    text = dot.read_text()
    assert "after_optimizations" in text
    assert "all-reduce" in text
    w = jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, P()))
    x = jax.device_put(jnp.ones((64, 16)), NamedSharding(mesh, P("d")))
    assert compiled(w, x).shape == (8, 32)
    assert compiled.as_text() == lowered.compile().as_text()


def test_the_picture_replaces_the_graph(graph):
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")
    line = start_rendering(graph).result()
    svg = graph.with_suffix(".svg")
    assert line == f"HLO picture: {svg}"
    assert xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert list(graph.parent.iterdir()) == [svg]


def test_without_dot_the_graph_stays_and_the_line_says_how_to_get_it(graph, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = render_svg(graph)
    command = f"dot -Tsvg {graph} -o {graph.with_suffix('.svg')}"
    assert line == f"HLO graph: {graph} (no dot here; for the picture: apt install graphviz && {command})"
    assert list(graph.parent.iterdir()) == [graph]


def test_a_slow_dot_is_stopped(graph, monkeypatch, tmp_path):
    program(tmp_path, "dot", f'echo $$ > {tmp_path}/pid; echo half > "$4"; exec sleep 20')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    start = time.monotonic()
    monkeypatch.setattr(hlo, "RENDER_TIMEOUT_S", 0.5)
    line = render_svg(graph)
    assert time.monotonic() - start < 10
    assert f"HLO graph: {graph} (dot was stopped after 0.5 s; for the picture: dot -Tsvg" in line
    assert list(graph.parent.iterdir()) == [graph]
    pid = (tmp_path / "pid").read_text().strip()
    assert subprocess.run(["ps", "-p", pid], stdout=subprocess.DEVNULL, check=False).returncode == 1


def test_a_failing_dot_is_told(graph, monkeypatch, tmp_path):
    program(tmp_path, "dot", 'echo "syntax error in line 3" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "(dot failed: syntax error in line 3; for the picture:" in render_svg(graph)
    program(tmp_path, "dot", "exit 0")
    assert "(dot failed: exit code 0; for the picture:" in render_svg(graph)
    assert list(graph.parent.iterdir()) == [graph]
