"""The optimized HLO of the training step, as a picture."""

import concurrent.futures
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from cluster.devices import compile_program
from cluster.watch import now_at


def compile_with_hlo_dump(
    lowered: jax.stages.Lowered, directory: str | os.PathLike, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, Path | None]:
    """Compiles, and keeps the optimized HLO as a graph for Graphviz.

    Args:
        lowered: the lowered training step.
        directory: where `training_step_optimized_hlo_<date>.dot` goes.
        options: for the compiler.

    Returns:
        The compiled step, and the path of the graph: None where XLA wrote none (the step came from JAX's compilation
        cache), and on processes other than 0, which compile without it.
    """
    now_at("compiling the training step", paused=True)
    if jax.process_index() != 0:
        return compile_program(lowered, options), None
    with tempfile.TemporaryDirectory() as dump:
        compiled = compile_program(lowered, {**(options or {}), "xla_dump_to": dump, "xla_dump_hlo_as_dot": True})
        # Autotuning may compile small modules of its own on the way.
        graphs = sorted(Path(dump).glob("*after_optimizations*.dot"), key=lambda path: path.stat().st_size)
        if not graphs:
            return compiled, None
        kept = Path(directory) / f"training_step_optimized_hlo_{time.strftime('%Y_%m_%d_%H_%M_%S')}.dot"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(graphs[-1], kept)
    return compiled, kept


def render_svg(dot_path: str | os.PathLike, svg_path: str | os.PathLike, timeout_s: float) -> str:
    """Draws a graph with Graphviz's `dot`, at the lowest priority, for at most `timeout_s` seconds.

    Returns:
        One line for people: where the picture is, or why there is none and how to get it. The graph is removed when
        the picture is there, and kept otherwise; a failure raises nothing.
    """
    dot_path, svg_path = Path(dot_path), Path(svg_path)
    partial = svg_path.with_name(svg_path.name + ".tmp")
    command = ["dot", "-Tsvg", str(dot_path), "-o", str(partial)]
    by_hand = f"dot -Tsvg {dot_path} -o {svg_path}"
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            return f"HLO graph: {dot_path} (dot cannot be started: {error}; for the picture: {by_hand})"
        return f"HLO graph: {dot_path} (no dot here; for the picture: apt install graphviz && {by_hand})"
    with process:
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, 19)
            errors = process.communicate(timeout=timeout_s)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            partial.unlink(missing_ok=True)
            return f"HLO graph: {dot_path} (dot was stopped after {timeout_s:g} s; for the picture: {by_hand})"
    if process.returncode != 0 or not partial.is_file():
        partial.unlink(missing_ok=True)
        reason = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return f"HLO graph: {dot_path} (dot failed: {reason[0]}; for the picture: {by_hand})"
    partial.rename(svg_path)
    dot_path.unlink()
    return f"HLO picture: {svg_path}"


def start_rendering(dot_path: str | os.PathLike, *, timeout_s: float = 60.0) -> "concurrent.futures.Future[str]":
    """`render_svg` beside the graph, on a background thread; the future's result is its line.

    Started after the profiled steps, it takes nothing from their time.
    """
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="render_svg")
    rendering = executor.submit(render_svg, dot_path, Path(dot_path).with_suffix(".svg"), timeout_s)
    executor.shutdown(wait=False)
    return rendering
