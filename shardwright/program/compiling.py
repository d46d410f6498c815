"""Compiles the training step and keeps its optimized HLO text."""

import contextlib
import ctypes
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress, TextColumn

from shardwright.cluster.watch import pause
from shardwright.program.directory import remove_older
from shardwright.program.files import write_whole
from shardwright.program.step import Step
from shardwright.settings.output import say


@pause("compiling the training step")
def compile_step(
    lowered: jax.stages.Lowered | Step, directory: Path, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, Path | None]:
    """Compiles a step for the current mesh and writes its optimized HLO text.

    Prints why if it cannot write it.

    Removes the texts, tables and pictures of earlier starts.

    Args:
        lowered: the training step, as a Step or lowered.
        directory: where `training_step_optimized_hlo_<date>.txt` is written.
        options: compiler options.

    Returns:
        The compiled step and the path of the text, with current source lines. The path is None if
        the text cannot be written, and on processes other than 0.
    """
    # Otherwise a program from JAX's compilation cache would have the source lines of the time it
    # was compiled.
    in_key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, in_key)
    jax.config.update(in_key, True)
    free_kept_memory()  # before the peak of most runs' host memory
    try:
        compiled = lowered.compile(compiler_options=options)
    finally:
        jax.config.update(in_key, before)
    text = _keep_hlo(compiled, directory) if jax.process_index() == 0 else None
    free_kept_memory()
    return compiled, text


@contextlib.contextmanager
def seconds_shown(what: str) -> Iterator[None]:
    """Shows `what`, such as "compiling", during its context, on process 0; on a terminal with the
    seconds so far.
    """
    if jax.process_index() != 0:
        yield
    elif not (console := Console()).is_terminal:
        say(f"{what} …", flush=True)
        yield
    else:
        line = TextColumn(what + " … {task.elapsed:.0f} s", markup=False)
        with Progress(line, console=console, transient=True) as progress:
            progress.add_task("")
            yield


def free_kept_memory() -> None:
    """Makes glibc return freed memory to the system: compiling leaves hundreds of MiB.

    Does nothing without glibc.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _keep_hlo(compiled: jax.stages.Compiled, directory: Path) -> Path | None:
    path = directory / f"training_step_optimized_hlo_{time.strftime('%Y_%m_%d_%H_%M_%S')}.txt"
    try:
        text = compiled.as_text()
        if text is None:
            raise NotImplementedError("the compiler provides none")
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, with_mesh(text, jax.sharding.get_mesh().shape))
        remove_older(path, "training_step_optimized_hlo_20*")
    except (OSError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        say(
            f"HLO text: none, {path} cannot be written: {getattr(error, 'strerror', None) or error}"
        )
        return None
    return path


def with_mesh(text: str, mesh: Mapping[str, int]) -> str:
    """Prefixes the text of a program with a comment that names the mesh it was compiled for."""
    return f"// mesh {' '.join(f'{axis}={size}' for axis, size in mesh.items())}\n{text}"
