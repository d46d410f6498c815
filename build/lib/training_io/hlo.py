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

RENDER_TIMEOUT_S = 60.0


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


def render_svg(graph: Path) -> str:
    """Draws a graph with Graphviz's `dot`, at the lowest priority. The picture, beside the graph, replaces it.

    Returns a line for the user: where the picture is, or why there is none and how to get it.
    """
    picture, partial = graph.with_suffix(".svg"), graph.with_suffix(".svg.tmp")
    by_hand, dot = f"dot -Tsvg {graph} -o {picture}", shutil.which("dot")
    if dot is None:
        return f"HLO graph: {graph} (no dot here; for the picture: apt install graphviz && {by_hand})"
    try:
        command = ["nice", "-n", "19", dot, "-Tsvg", str(graph), "-o", str(partial)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=RENDER_TIMEOUT_S)
        if done.returncode == 0 and partial.is_file():
            partial.rename(picture)
            graph.unlink()
            return f"HLO picture: {picture}"
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        why = f"dot failed: {errors[-1] if errors else f'exit code {done.returncode}'}"
    except subprocess.TimeoutExpired:
        why = f"dot was stopped after {RENDER_TIMEOUT_S:g} s"
    except OSError as error:
        why = f"dot cannot be started: {error}"
    partial.unlink(missing_ok=True)
    return f"HLO graph: {graph} ({why}; for the picture: {by_hand})"


def start_rendering(graph: Path) -> concurrent.futures.Future[str]:
    """Starts `render_svg` on a background thread. The future gives its line."""
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="render_svg")
    rendering = executor.submit(render_svg, graph)
    executor.shutdown(wait=False)
    return rendering
