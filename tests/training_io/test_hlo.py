import os
import re
import shutil
import stat
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training_io.hlo import compile_with_hlo_dump, render_svg, start_rendering

from training_io import hlo

ROOT = Path(__file__).parents[2]
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
    path = tmp_path / "run" / "hlo.dot.tmp"
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
    assert dot.name.endswith(".dot.tmp")
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
    svg = graph.with_name("hlo.svg")
    assert line == f"HLO picture: {svg}"
    assert xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert list(graph.parent.iterdir()) == [svg]


def test_without_dot_the_graph_stays_and_the_line_says_how_to_get_it(graph, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = render_svg(graph)
    kept = graph.with_name("hlo.dot")
    command = f"dot -Tsvg {kept} -o {graph.with_name('hlo.svg')}"
    assert line == f"HLO graph: {kept} (no dot here; for the picture: apt install graphviz && {command})"
    assert list(graph.parent.iterdir()) == [kept]


def test_a_slow_dot_is_stopped(graph, monkeypatch, tmp_path):
    program(tmp_path, "dot", f'echo $$ > {tmp_path}/pid; echo half > "$4"; exec sleep 20')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    start = time.monotonic()
    monkeypatch.setattr(hlo, "RENDER_TIMEOUT_S", 0.5)
    line = render_svg(graph)
    assert time.monotonic() - start < 10
    kept = graph.with_name("hlo.dot")
    assert f"HLO graph: {kept} (dot was stopped after 0.5 s; for the picture: dot -Tsvg" in line
    assert list(graph.parent.iterdir()) == [kept]
    pid = (tmp_path / "pid").read_text().strip()
    assert subprocess.run(["ps", "-p", pid], stdout=subprocess.DEVNULL, check=False).returncode == 1


def test_a_failing_dot_is_told(graph, monkeypatch, tmp_path):
    program(tmp_path, "dot", 'echo "syntax error in line 3" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "(dot failed: syntax error in line 3; for the picture:" in render_svg(graph)
    graph.with_name("hlo.dot").rename(graph)
    program(tmp_path, "dot", "exit 0")
    assert "(dot failed: exit code 0; for the picture:" in render_svg(graph)
    assert list(graph.parent.iterdir()) == [graph.with_name("hlo.dot")]


@pytest.mark.long
def test_a_dot_whose_run_was_killed_ends_within_its_time(graph, tmp_path):
    program(tmp_path, "dot", f"echo $$ > {tmp_path}/pid; while :; do :; done")
    source = f"from training_io import hlo; hlo.RENDER_TIMEOUT_S = 1.5; hlo.render_svg(hlo.Path({str(graph)!r}))"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", source], env=env)
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, "dot still runs"
        time.sleep(0.1)


def test_a_graph_that_cannot_be_written_is_told_and_the_step_compiles(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").write_text("in the way")
    _, lowered = lower()
    compiled, graph = compile_with_hlo_dump(lowered, tmp_path / "run")
    assert graph is None
    assert compiled.as_text()
    assert re.fullmatch(r"HLO graph: none, .*\.dot\.tmp cannot be written: File exists\n", capsys.readouterr().out)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    compiled, graph = compile_with_hlo_dump(lowered, tmp_path)
    assert graph is None
    assert compiled.as_text()
    expected = "HLO graph: none, as there is no directory for temporary files: No such file or directory\n"
    assert capsys.readouterr().out == expected
    missing = tmp_path / "gone" / "hlo.dot.tmp"
    assert render_svg(missing).startswith(f"HLO graph: none, as {missing.with_suffix('')} cannot be drawn or kept: ")
