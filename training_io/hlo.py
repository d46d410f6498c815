"""The optimized HLO of the training step, as a picture."""

import concurrent.futures
import contextlib
import math
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
    """Compiles a step, and keeps its optimized HLO as a graph for Graphviz. Prints why, if it keeps none.

    Args:
        lowered: the lowered training step.
        directory: where `training_step_optimized_hlo_<date>.dot.tmp` is written.
        options: of the compiler.

    Returns:
        The compiled step and the path of the graph. The path is None where the step came from JAX's compilation cache,
        so that XLA wrote no graph, where it cannot be written, and on processes other than 0.
    """
    if jax.process_index() != 0:
        return compile_program(lowered, options), None
    with contextlib.ExitStack() as cleanup:
        try:
            dump = cleanup.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        except OSError as error:
            print(f"HLO graph: none, as there is no directory for temporary files: {error.strerror}")
            return compile_program(lowered, options), None
        compiled = compile_program(lowered, {**(options or {}), "xla_dump_to": dump, "xla_dump_hlo_as_dot": True})
        # The largest: autotuning may compile small modules of its own too.
        graphs = sorted(Path(dump).glob("*after_optimizations*.dot"), key=lambda path: path.stat().st_size)
        if not graphs:
            print(
                "HLO graph: none, the step is from the compile cache; with hardware.compilation_cache=null there is one"
            )
            return compiled, None
        kept = Path(directory) / f"training_step_optimized_hlo_{time.strftime('%Y_%m_%d_%H_%M_%S')}.dot.tmp"
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(graphs[-1], kept)
        except OSError as error:
            with contextlib.suppress(OSError):
                kept.unlink()
            print(f"HLO graph: none, {kept} cannot be written: {error.strerror}")
            return compiled, None
    return compiled, kept


def render_svg(unfinished: Path) -> str:
    """Draws the graph `<name>.dot.tmp` with Graphviz's `dot`, at the lowest priority, as `<name>.svg`.

    The picture replaces the graph. Without a picture the graph becomes `<name>.dot`. The time of `dot` is limited even
    if this process is killed.

    Returns a line for the user: where the picture is, or why there is none and how to get it.
    """
    graph = unfinished.with_suffix("")
    picture, partial = graph.with_suffix(".svg"), graph.with_suffix(".svg.tmp")
    by_hand, dot = f"dot -Tsvg {graph} -o {picture}", shutil.which("dot")
    try:
        if dot is None:
            unfinished.rename(graph)
            return f"HLO graph: {graph} (no dot here; for the picture: apt install graphviz && {by_hand})"
        command = ["nice", "-n", "19", dot, "-Tsvg", str(unfinished), "-o", str(partial)]
        command = ["/bin/sh", "-c", f'ulimit -t {math.ceil(RENDER_TIMEOUT_S)}; exec "$@"', "sh", *command]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=RENDER_TIMEOUT_S)
            if done.returncode == 0 and partial.is_file():
                partial.rename(picture)
                unfinished.unlink()
                return f"HLO picture: {picture}"
            errors = done.stderr.decode(errors="replace").strip().splitlines()
            why = f"dot failed: {errors[-1] if errors else f'exit code {done.returncode}'}"
        except subprocess.TimeoutExpired:
            why = f"dot was stopped after {RENDER_TIMEOUT_S:g} s"
        partial.unlink(missing_ok=True)
        unfinished.rename(graph)
    except OSError as error:
        return f"HLO graph: none, as {graph} cannot be drawn or kept: {error.strerror}"
    return f"HLO graph: {graph} ({why}; for the picture: {by_hand})"


def start_rendering(graph: Path) -> concurrent.futures.Future[str]:
    """Starts `render_svg` on a background thread. The future gives its line."""
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="render_svg")
    rendering = executor.submit(render_svg, graph)
    executor.shutdown(wait=False)
    return rendering
