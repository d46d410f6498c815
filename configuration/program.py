"""What the tools have in common as programs: settings by Hydra, and errors a user can read."""

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
    """Calls `run`, a function of the program's main module, with the settings of the command line.

    A ValueError, which is what a user can get wrong, is shown as its message alone; HYDRA_FULL_ERROR=1 shows where it
    came from too. Other exceptions are shown with their traceback. Either way the exit status is 1.

    Args:
        name: of the file in tools/configs/ that is read unless --config-name says another.
        schema: the dataclass of the settings; the config names it as `<name>_schema`.
    """

    # Hydra looks for the configs beside the file of the function that is wrapped.
    @functools.wraps(run)
    def job(config: Any) -> None:
        try:
            if missing := sorted(OmegaConf.missing_keys(config)):
                raise ValueError(f"{', '.join(missing)} must be given, as {missing[0]}=<value>.")
            run(OmegaConf.to_object(config))
        except ValueError as e:
            raise CompactHydraException(f"Error: {e}") from e

    ConfigStore.instance().store(f"{name}_schema", schema)
    # A program that is a folder has its configs beside the folder.
    configs = "../configs" if Path(inspect.getfile(run)).name == "__main__.py" else "configs"
    hydra.main(version_base=None, config_path=configs, config_name=name)(job)()
