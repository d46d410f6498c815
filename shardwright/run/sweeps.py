"""Sweeps (`--multirun`): a directory for each job, and a list of the failed jobs at the end."""

import atexit
import functools
import gc
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from shardwright.run.directory import check_place, make_default, place, quoted
from shardwright.settings.program import refusals_shown


class PickledByName:
    """Decorator, below hydra.main: what it refuses is shown without a traceback, in any process.

    Launchers send it to other processes. Pickling a function of `__main__` by value, with all that it refers to, fails.
    So the other process imports the function from its module.
    """

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        with refusals_shown():
            return self.__wrapped__(*args)

    def __reduce__(self):
        module = self.__module__
        if module == "__main__":
            spec = sys.modules["__main__"].__spec__
            module = spec.name if spec else Path(self.__wrapped__.__code__.co_filename).stem
        return _function_of, (module, self.__name__)


def _function_of(module: str, name: str) -> Callable:
    return PickledByName(inspect.unwrap(getattr(importlib.import_module(module), name)))


class Sweep(Callback):
    """Callbacks of Hydra around a sweep and its jobs, named in configs/base.yaml.

    A sweep has the directory `<root_working_dir>/<paths.model_name>`, named by default as a run is, by configuration
    and time. In it the run of each job is named only by the settings that are swept. So a sweep with another value of a
    setting that all jobs share, such as a longer training.steps, finds the same runs and resumes them.

    Hydra turns an error that is raised here into a warning, so a wrong sweep ends the program (SystemExit).
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Adds the directory of each job to its overrides, which reach it with any launcher, in any process."""
        params = OmegaConf.select(config, "hydra.sweeper.params") or {}
        overrides = [f"{key}={value}" for key, value in params.items()] + list(config.hydra.overrides.task)
        parsed = OverridesParser.create().parse_overrides(overrides)
        swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
        shared = sorted({override.key_or_group for override in parsed} - swept | {"paths.model_name"})
        _check_swept(swept, config.hydra.launcher.get("_target_", ""))

        root, name = config.paths.root_working_dir, config.paths.model_name
        if name is None and (config.distributed.auto or config.distributed.count):
            sys.exit("Error: distributed says that there are several processes; give the sweep a paths.model_name.")
        try:
            check_place(root, name)
            if name is None:
                name, directory, _ = make_default(root, config.hydra.job.config_name)
            else:
                directory = place(root, name)
        except ValueError as error:
            sys.exit(f"Error: {error}")
        run = f"{name}/${{hydra:job.override_dirname}}" if swept else name
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(directory)
            config.hydra.overrides.hydra += [
                f"hydra.sweep.dir={quoted(config.hydra.sweep.dir)}",
                f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(quoted, shared))}]",
            ]
            task = [text for text in config.hydra.overrides.task if not text.startswith("paths.model_name=")]
            config.hydra.overrides.task = [*task, f"paths.model_name={quoted(run)}"]
        self._name, self._jobs = name, 0
        self._failed: list[str] = []
        atexit.register(self._end, directory)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Prints at once why a job failed. Hydra itself shows only the first failure, at the end."""
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        self._jobs = getattr(self, "_jobs", 0) + 1
        if job_return.status == JobStatus.COMPLETED:
            if job_return.return_value is not None:  # the signal that stopped the run
                sys.exit(
                    f"{job_return.return_value}: the sweep stops here. To resume it: its command again, "
                    f"with paths.model_name={getattr(self, '_name', None) or 'its name'}"
                )
            return
        try:
            _ = job_return.return_value  # raises it, and prints the job's overrides before
        except Exception as error:
            if isinstance(error, CompactHydraException):
                print(f"{error}\n", file=sys.stderr)
            else:
                traceback.print_exception(error)
            if hasattr(self, "_failed"):
                self._failed.append(f"{config.hydra.job.override_dirname}: {_first_line(error)}")
            # The frames of the failed job hold its state, whose memory the next job needs.
            _forget_locals(error)
            if jax.distributed.is_initialized() and config.hydra.launcher._target_.endswith(".BasicLauncher"):
                sys.exit("The sweep stops here: after an error all processes of a run end.")

    def _end(self, directory: Path) -> None:
        if self._failed:
            print(f"\n{len(self._failed)} of {self._jobs} jobs of the sweep {directory} failed:", file=sys.stderr)
            print("".join(f"  {line}\n" for line in self._failed), end="", file=sys.stderr)


def _check_swept(swept: set[str], launcher: str) -> None:
    if "paths.model_name" in swept:
        sys.exit(
            "Error: paths.model_name is swept, but it names the whole sweep; its jobs are named by what else is swept. "
            "Give one name."
        )
    fixed = sorted(key for key in swept if key.split(".")[0] in ("hardware", "distributed"))
    if fixed and launcher.endswith(".BasicLauncher"):
        sys.exit(
            f"Error: {', '.join(fixed)} cannot be swept in one process, whose devices start once. "
            "Give each job its own, with hydra/launcher=submitit_slurm or submitit_local, or start it by itself."
        )


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0]
    line = line if isinstance(error, CompactHydraException) else f"{type(error).__name__}: {line}"
    return line if len(line) <= 160 else line[:159] + "…"


def _forget_locals(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
