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
from cluster.watch import pause


@pause("compiling the training step")
def compile_with_hlo_dump(
    lowered: jax.stages.Lowered, directory: str | os.PathLike, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, Path | None]:
    """Compiles a step, and keeps its optimized HLO as a graph for Graphviz.

    Args:
        lowered: the lowered training step.
        directory: where `training_step_optimized_hlo_<date>.dot` is written.
        options: of the compiler.

    Returns:
        The compiled step and the path of the graph. The path is None where the step came from JAX's compilation cache,
        so that XLA wrote no graph, and on processes other than 0.
    """
    if jax.process_index() != 0:
        return compile_program(lowered, options), None
    with tempfile.TemporaryDirectory() as dump:
        compiled = compile_program(lowered, {**(options or {}), "xla_dump_to": dump, "xla_dump_hlo_as_dot": True})
        # The largest: autotuning may compile small modules of its own too.
        graphs = sorted(Path(dump).glob("*after_optimizations*.dot"), key=lambda path: path.stat().st_size)
        if not graphs:
            return compiled, None
        kept = Path(directory) / f"training_step_optimized_hlo_{time.strftime('%Y_%m_%d_%H_%M_%S')}.dot"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(graphs[-1], kept)
    return compiled, kept


def render_svg(dot_path: str | os.PathLike, svg_path: str | os.PathLike, timeout_s: float) -> str:
    """Draws a graph with Graphviz's `dot`, at the lowest priority, for at most `timeout_s` seconds.

    Removes the graph when the picture is there. A failure raises nothing.

    Returns:
        A line for the user: where the picture is, or why there is none and how to get it.
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
    """Starts `render_svg` on a background thread, with the picture beside the graph. The future gives its line."""
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="render_svg")
    rendering = executor.submit(render_svg, dot_path, Path(dot_path).with_suffix(".svg"), timeout_s)
    executor.shutdown(wait=False)
    return rendering
