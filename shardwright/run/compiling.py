"""The compiled training step, and the file of its optimized HLO text."""

import ctypes
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from shardwright.cluster.watch import pause
from shardwright.run.directory import remove_older
from shardwright.run.files import write_whole
from shardwright.settings.words import say


@pause("compiling the training step")
def compile_step(
    lowered: jax.stages.Lowered, directory: Path, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, Path | None]:
    """Compiles a step for the current mesh, and keeps its optimized HLO text. Prints why, if it keeps none.

    The texts, tables and pictures of earlier starts are removed.

    Args:
        lowered: the lowered training step.
        directory: where `training_step_optimized_hlo_<date>.txt` is written.
        options: of the compiler.

    Returns:
        The compiled step and the path of the text, which has the source lines of now. The path is None where the text
        cannot be written, and on processes other than 0.
    """
    # So that a program from JAX's compilation cache has the source lines of now, not those of its time.
    in_key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, in_key)
    jax.config.update(in_key, True)
    try:
        compiled = lowered.compile(compiler_options=options)
    finally:
        jax.config.update(in_key, before)
    text = _keep_hlo(compiled, directory) if jax.process_index() == 0 else None
    free_kept_memory()
    return compiled, text


def free_kept_memory() -> None:
    """Gives the system what glibc keeps of freed memory: a compiler leaves hundreds of MiB. Nothing without glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _keep_hlo(compiled: jax.stages.Compiled, directory: Path) -> Path | None:
    path = directory / f"training_step_optimized_hlo_{time.strftime('%Y_%m_%d_%H_%M_%S')}.txt"
    try:
        text = compiled.as_text()
        if text is None:
            raise NotImplementedError("the compiler gives none")
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, with_mesh(text, jax.sharding.get_mesh().shape))
        remove_older(path, "training_step_optimized_hlo_20*")
    except (OSError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        say(f"HLO text: none, {path} cannot be written: {getattr(error, 'strerror', None) or error}")
        return None
    return path


def with_mesh(text: str, mesh: Mapping[str, int]) -> str:
    """The text of a program, after a comment with the mesh that it was compiled for."""
    return f"// mesh {' '.join(f'{axis}={size}' for axis, size in mesh.items())}\n{text}"
