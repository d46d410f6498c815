"""Runs sweeps (`--multirun`): gives each job a directory, and lists failed jobs at the end."""

import atexit
import functools
import gc
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from shardwright.program.directory import check_place, find_place
from shardwright.settings.exits import STOPPED
from shardwright.settings.output import override, quoted
from shardwright.settings.program import Refused, refusals_shown


class Job:
    """A function of the configuration whose rejections of settings are printed without a traceback.

    This also works in the processes of a launcher, because a Job is pickled by reference, as the
    attribute `job` of a program with this module and name.
    """

    __wrapped__: Callable
    __name__: str

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)

    def __call__(self, config: object) -> Any:
        with refusals_shown():
            return self.__wrapped__(config)

    def __reduce__(self):
        return _job_of, (self.__module__, self.__name__)


def _job_of(module: str, name: str) -> Job:
    return getattr(importlib.import_module(module), name).job


class Sweep(Callback):
    """Hydra callbacks around a sweep and its jobs, registered in configs/base.yaml.

    A sweep has the directory `<root_working_dir>/<paths.model_name>`, by default named after
    configuration and time, like a run. Inside, the run of each job is named only by the swept
    settings. So if you repeat a sweep with another value of a setting that all jobs share, such as
    a larger training.steps, it finds the same runs and resumes them.

    Hydra turns errors raised here into warnings, so an invalid sweep ends the program (SystemExit).
    """

    def __init__(self):
        self._name, self._jobs = "its name", 0
        self._done: list[str] = []
        self._failed: list[str] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Adds the directory of each job to its overrides, which reach it through any launcher."""
        parsed = OverridesParser.create().parse_overrides([*config.hydra.overrides.task])
        swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
        shared = sorted(
            {override.key_or_group for override in parsed} - swept | {"paths.model_name"}
        )
        root, name = config.paths.root_working_dir, config.paths.model_name
        try:
            _check_swept(swept, config)
            check_place(root, name)
            name, directory = find_place(root, name, config.hydra.job.config_name)
        except ValueError as error:
            sys.exit(f"Error: {error}")
        # Hydra does not interpolate quoted text, so the interpolation follows after the quoted
        # part.
        run = quoted(f"{name}/")[:-1] + '${hydra:job.override_dirname}"' if swept else quoted(name)
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(directory)
            config.hydra.overrides.hydra += [
                f"hydra.sweep.dir={quoted(config.hydra.sweep.dir)}",
                f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(quoted, shared))}]",
            ]
            # Each job resolves its own interpolations: optimizer.schedule_steps=${training.steps}
            # may follow a sweep.
            task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            task = [text for text in task if not text.startswith("paths.model_name=")]
            config.hydra.overrides.task = [*task, f"paths.model_name={run}"]
        self._name = name
        atexit.register(self._end, directory)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Prints immediately why a job failed. Hydra shows only the first failure, at the end."""
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        self._jobs += 1
        if job_return.status == JobStatus.COMPLETED:
            if job_return.return_value is not None:  # the signal that stopped the run
                print(
                    f"{job_return.return_value}: the sweep stops here. Jobs that are done:",
                    file=sys.stderr,
                )
                print("".join(f"  {job}\n" for job in self._done), end="", file=sys.stderr)
                print(
                    f"To resume: the same command, with {override('paths.model_name', self._name)}",
                    file=sys.stderr,
                )
                sys.exit(STOPPED.code)
            self._done.append(config.hydra.job.override_dirname)
            return
        try:
            _ = job_return.return_value  # raises it, and prints the job's overrides before
        except Exception as error:
            said = str(error)
            if isinstance(error, Refused):
                print(f"{said}\n", file=sys.stderr)
            else:
                traceback.print_exception(error)
                said = f"{type(error).__name__}: {said}"
            self._failed.append(
                f"{config.hydra.job.override_dirname}: {said.splitlines()[0][:160]}"
            )
            # Free the failed job's state, which its frames hold, for the next job.
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__cause__ or error.__context__
            gc.collect()
            if jax.distributed.is_initialized() and config.hydra.launcher._target_.endswith(
                ".BasicLauncher"
            ):
                sys.exit("The sweep stops here: an error ends all processes of a run.")

    def _end(self, directory: Path) -> None:
        if self._failed:
            print(
                f"\n{len(self._failed)} of {self._jobs} jobs of the sweep {directory} failed:",
                file=sys.stderr,
            )
            print("".join(f"  {line}\n" for line in self._failed), end="", file=sys.stderr)


def _check_swept(swept: set[str], config: DictConfig) -> None:
    if "paths.model_name" in swept:
        raise ValueError(
            "paths.model_name cannot be swept: it names the whole sweep, and its jobs are named by "
            "the other swept settings. Give one name."
        )
    fixed = sorted(key for key in swept if key.split(".")[0] in ("hardware", "distributed"))
    if fixed and config.hydra.launcher.get("_target_", "").endswith(".BasicLauncher"):
        raise ValueError(
            f"{', '.join(fixed)} cannot be swept in one process, whose devices start once. Give "
            f"each job its own process (hydra/launcher=submitit_slurm or submitit_local), or start "
            f"the jobs separately."
        )
    if config.paths.model_name is None and (config.distributed.auto or config.distributed.count):
        raise ValueError(
            "give the sweep a paths.model_name: distributed sets up several processes."
        )
