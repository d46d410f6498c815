"""The tools as programs: settings from Hydra, and errors that a user can read."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf


def run_program(name: str, schema: type, run: Callable[[Any], None]) -> None:
    """Calls `run` with the settings of the command line.

    Of a ValueError, which a user caused, only the message is shown; HYDRA_FULL_ERROR=1 shows the traceback too. Other
    exceptions are shown with their traceback. The exit status is 1 for both.

    Args:
        name: name of the file in tools/configs/ that is read where --config-name is not given.
        schema: dataclass of the settings. The config names it as `<name>_schema`.
        run: function of the program's main module, called with a `schema`.
    """

    # functools.wraps: Hydra looks for the configs beside the file of the wrapped function.
    @functools.wraps(run)
    def job(config: Any) -> None:
        try:
            if missing := sorted(OmegaConf.missing_keys(config)):
                raise ValueError(f"{', '.join(missing)} must be given, as {missing[0]}=<value>.")
            run(OmegaConf.to_object(config))
        except ValueError as e:
            raise CompactHydraException(f"Error: {e}") from e

    ConfigStore.instance().store(f"{name}_schema", schema)
    # The configs of a program that is a folder are beside the folder.
    configs = "../configs" if Path(inspect.getfile(run)).name == "__main__.py" else "configs"
    hydra.main(version_base=None, config_path=configs, config_name=name)(job)()
