"""Programs: settings from Hydra, and errors that a user can read."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configuration.foreign import shown
from configuration.frames import is_raised_on_purpose


def refusal(error: Exception) -> str | None:
    """What a user is told of `error` instead of its traceback; None if the traceback is needed.

    That is the message of a ValueError or OSError with which this project, a model or the configuration refuses what it
    was given. One that Python or a library raises is a bug. Of an error in code that shardlib checks, the message
    begins with its place there. With HYDRA_FULL_ERROR=1 every error needs its traceback. What a terminal would obey in
    a message, which may quote data, is left out.
    """
    refuses = isinstance(error, OmegaConfBaseException) or (
        isinstance(error, ValueError | OSError) and is_raised_on_purpose(error)
    )
    if not refuses or os.environ.get("HYDRA_FULL_ERROR") == "1":
        return None
    if getattr(error, "place", ""):
        return f"{shown(error)}\n  HYDRA_FULL_ERROR=1 shows the calls that lead there."
    return f"Error: {shown(error)}"


@contextlib.contextmanager
def refusals_shown() -> Iterator[None]:
    """Context around what Hydra calls: a refusal ends the program with its message and status 1, without a traceback.

    In one of several jobs it becomes a CompactHydraException with the message, which ends the job.
    """
    try:
        yield
    except Exception as error:
        if (message := refusal(error)) is None:
            raise
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise CompactHydraException(message) from error
        sys.exit(message)


def run_program(name: str, schema: type, run: Callable[[Any], None]) -> None:
    """Calls `run` with the settings of the command line.

    Of what a user caused, only the message is shown, as `refusal` says. The exit status of any error is 1.

    Args:
        name: name of the file in tools/configs/ that is read where --config-name is not given.
        schema: dataclass of the settings. The config names it as `<name>_schema`.
        run: function of the program's main module, called with a `schema`.
    """

    # functools.wraps: Hydra looks for the configs beside the file of the wrapped function.
    @functools.wraps(run)
    def job(config: Any) -> None:
        with refusals_shown():
            if missing := sorted(OmegaConf.missing_keys(config)):
                raise ValueError(f"{', '.join(missing)} must be given, as {missing[0]}=<value>.")
            run(OmegaConf.to_object(config))

    ConfigStore.instance().store(f"{name}_schema", schema)
    # The configs of a program that is a folder are beside the folder.
    configs = "../configs" if Path(inspect.getfile(run)).name == "__main__.py" else "configs"
    hydra.main(version_base=None, config_path=configs, config_name=name)(job)()
