"""Starts a run: composes its configuration with Hydra, starts the devices, loads the model."""

import contextlib
import dataclasses
import functools
import gc
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from shardwright.cluster.devices import check_chip, make_mesh, start_devices
from shardwright.cluster.stopping import Stopped, StopRequest
from shardwright.cluster.watch import watched, write_hosts
from shardwright.data import flat_tokens
from shardwright.data.checks import check_range, check_ranges
from shardwright.modeling.model import LanguageModel, load_model, module_of
from shardwright.program.changes import config_at, firsts
from shardwright.program.checks import register_schema, to_config
from shardwright.program.config import Config, check_divides
from shardwright.program.directory import check_place, run_directory
from shardwright.program.printing import log
from shardwright.program.trackers import check_installed
from shardwright.run.sweeps import Job
from shardwright.settings.command_line import Program, read_overrides, search_first
from shardwright.settings.exits import STOPPED
from shardwright.settings.program import is_sweep, refusals_shown, start
from shardwright.settings.settings import made, untyped

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()


def program(run: Callable[[Config, LanguageModel, Path], str | None]) -> Callable[[], None]:
    """Turns `run` into a program, as a decorator.

    `launched` makes its arguments from configs/ and the command line.

    `run` returns None, or the name of the signal that stopped it. After a signal the exit code is
    STOPPED.code.
    """

    @functools.wraps(run)
    def job(config: object) -> Any:
        try:
            with launched(config) as given:
                stopped_by = run(*given)
        except Stopped as error:
            stopped_by = str(error)
            log(f"{stopped_by}: stopped before the first step, so there is nothing to save.")
        if stopped_by and not is_sweep():
            sys.exit(STOPPED.code)
        return stopped_by

    @functools.wraps(run)
    def main() -> None:
        gc.freeze()  # or each collection would traverse all modules, in the training loop too
        register_schema()
        about = Program(
            "python -m train", CONFIGS, None, Config, inspect.getmodule(run).__doc__ or ""
        )
        start(about, sent, _sections)

    sent = Job(job)
    main.job = sent  # pyright: ignore[reportAttributeAccessIssue] (Job says who takes it from here)
    return main


def composed(name: str, *overrides: str, own: str | Path | None = None) -> Config:
    """Composes <name>.yaml with overrides such as `training.steps=10`, as on the command line.

    Raises as to_config.

    The file is in CONFIGS, or in the directory `own`, where a project has its configurations.
    """
    register_schema()
    folders = [Path(own)] if own and Path(own).is_dir() else []
    search_first(folders)
    read = read_overrides(Program("train", CONFIGS, None, Config), overrides)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose(name, read))


def _sections() -> dict[str, type]:
    """Returns the settings of the model named on the command line (model.module), for --help."""
    named = [text.partition("=")[2] for text in sys.argv if text.startswith("model.module=")]
    return {"model": module_of(named[-1] if named else "train").ModelConfig}


def start_with_section(
    name: str,
    schema: type,
    job: Callable[[Config, Any], Any],
    doc: str,
    command: str | None = None,
) -> None:
    """Starts the program tools.<name>, whose configuration is that of a run plus a section <name>.

    Args:
        name: name of the section.
        schema: a subclass of Config with a field <name>, whose type is the dataclass of the
            section.
        job: function of the configuration and of the section. Its ValueErrors are printed as one
            line.
        doc: docstring of the program.
        command: name of the program; None: that of the section.
    """

    def composed(config: Any) -> None:
        with refusals_shown():
            settings = made(kind, config[name], name)
            check_ranges(name, settings)
            with open_dict(config):
                del config[name]
                config.paths.model_name = config.paths.model_name or name
            job(to_config(config), settings)

    kind = typing.get_type_hints(schema)[name]
    register_schema()
    known = ConfigStore.instance().load("config_schema.yaml").node
    with open_dict(known):
        known[name] = untyped(kind)
    ConfigStore.instance().store(name="config_schema", node=known)
    about = Program(f"python -m tools.{command or name}", CONFIGS, None, schema, doc)
    start(about, composed, _sections)


def take_recorded_bos_id(c: Config, given: int | None) -> None:
    """Sets model.bos_id to what the datasets of `c` record, unless it is `given`.

    Raises ValueError if a dataset records another one.
    """
    for data in (config_at(c, first).data for first in firsts(c)):
        for filespec in filter(
            None, (data.filespec, *(source.filespec for source in data.mixture.values()))
        ):
            recorded = flat_tokens.bos_id_of(filespec)
            given = recorded if given is None else given
            if recorded not in (None, given):
                raise ValueError(
                    f"{filespec} records bos_id {recorded}, but model.bos_id is {given}. Give "
                    f"model.bos_id={recorded}, or choose a dataset that was written for this model."
                )
    if given is not None:
        c.model.bos_id = given
        check_range("model.bos_id", given, 0, c.model.vocab)


@contextlib.contextmanager
def launched(composed: Any) -> Iterator[tuple[Config, LanguageModel, Path]]:
    """Returns a context in which the mesh of a run is set, and the run is watched for hangs.

    Yields the configuration, model and directory of the run. Raises ValueError for a setting that
    is missing, unknown or out of range, before anything is computed.
    """
    c = to_config(composed)
    take_recorded_bos_id(c, composed.model.get("bos_id"))
    check_place(c.paths.root_working_dir, c.paths.model_name)
    check_installed(c.trackers)
    start_devices(c.distributed, c.hardware)
    check_chip(c.hardware)
    in_time = StopRequest(at_once=True)
    with (
        in_time,
        watched(c.distributed),
        jax.set_mesh(make_mesh(jax.devices(), **dataclasses.asdict(c.mesh))),
    ):
        for first in firsts(c):
            check_divides(config_at(c, first), jax.sharding.get_mesh().shape)
        model = load_model(c.model)
        # else process 0 alone writes in the directory
        is_shared = "://" not in (c.paths.checkpoints or "")
        config = HydraConfig.get().job.config_name or ""
        with run_directory(c.paths.root_working_dir, c.paths.model_name, config, is_shared) as (
            name,
            directory,
        ):
            c.paths = dataclasses.replace(c.paths, model_name=name)
            write_hosts(directory / "hosts.txt")
            yield c, model, directory
