"""The command line of a program: its arguments, and what is wrong with them in one message.

Hydra composes the configuration. Before it does, the same is done here once, so that its errors become messages that
name the setting, its value and what to do.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardlib.parsing import did_you_mean
from shardwright.settings.settings import is_section, kind_of, without_null, words_for

MOST_JOBS = 1_000
"""Largest number of runs of a sweep. Hydra composes them all before the first."""
QUOTES = "Write name=value, and a value with signs such as , = [ { in quotes of both kinds: 'name=\"value\"'."


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with settings.

    Attributes:
        command: how it is started: python -m <module>.
        configs: directory of its configurations.
        config_name: configuration that is read where --config-name is not given; None: none.
        schema: dataclass of its settings.
        doc: its docstring.
        sweeps: whether it can be started with --multirun.
    """

    command: str
    configs: Path
    config_name: str | None
    schema: type
    doc: str = ""
    sweeps: bool = True

    @property
    def remedy(self) -> str:
        """Where all settings are listed."""
        return f"`{self.command} --help` lists the settings."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(f"{message}. Write a flag as --flag=value.")


def readable(argument: str) -> str:
    """An argument as Hydra reads it: with quotes around a value such as `~/runs` or `première`."""
    name, _, value = argument.partition("=")
    plain = re.fullmatch(r"\+*[\w.@/]+", name) and re.fullmatch(r"[^'\"\\,=(){}\[\]$]+", value)
    return f'{name}="{value}"' if plain and (value.startswith("~") or not value.isascii()) else argument


def parse_arguments(program: Program, arguments: Sequence[str]) -> argparse.Namespace:
    """The flags and overrides of a command line: those of Hydra. Raises ValueError for a flag that it does not know."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--experimental-rerun")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    for flag in ("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m"):
        parser.add_argument(*flag.split(), action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    given, rest = parser.parse_known_args(arguments)
    flags = [text for action in parser._actions for text in action.option_strings]
    for text in rest:
        if text.startswith("-") and text != "--":
            name = text.partition("=")[0]
            setting = f" A setting has no dashes: {text.lstrip('-')}." if re.match(r"-+[\w.]+=", text) else ""
            near = did_you_mean(name, flags) or setting or f" {program.remedy}"
            raise ValueError(f"there is no flag {name}.{near}")
    infos = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    if given.info is not None and given.info not in infos:
        if "=" not in given.info:
            raise ValueError(f"--info is {given.info!r}; choose one of {', '.join(infos)}.")
        rest.append(given.info)
        given.info = "all"
    given.overrides = [text for text in rest if text != "--"]
    if given.multirun and not program.sweeps:
        raise ValueError(f"--multirun is given. {_once(program)}")
    if given.resolve and not given.cfg:
        raise ValueError("--resolve is given without --cfg; give --cfg=job too.")
    modes = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if getattr(given, name) not in (None, False)]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)} are given; give one of them.")
    return given


class _ConfigDir(SearchPathPlugin):
    """Puts the directory of --config-dir on the search path of `compose`, at the place where hydra.main puts it."""

    directory: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.directory is not None:
            search_path.append("command-line", f"file://{self.directory}")


@contextlib.contextmanager
def _loading(directory: Path, config_dir: str | None) -> Iterator[None]:
    """Context in which `compose` finds the configurations in `directory` and in --config-dir."""
    Plugins.instance().register(_ConfigDir)
    _ConfigDir.directory = config_dir and os.path.abspath(config_dir)
    try:
        with initialize_config_dir(str(directory.absolute()), version_base="1.3"):
            yield
    finally:
        _ConfigDir.directory = None


def check_command(program: Program, given: argparse.Namespace) -> None:
    """Raises ValueError, with one message, for what Hydra could not compose."""
    if "://" in (given.config_path or ""):  # Hydra loads it, from a package
        return
    for name in ("config_dir", "config_path"):
        value = getattr(given, name)
        if value is not None and not Path(value).is_dir():
            raise ValueError(f"--{name.replace('_', '-')} is {value!r}, which is no directory. Correct the path.")
    directory = Path(given.config_path or program.configs)
    with _loading(directory, given.config_dir):
        parsed = _parsed(given.overrides)
        if given.config_name is not None and not given.config_name.strip():
            raise ValueError(f"--config-name is empty; give the name of a file in {directory.name}/.")
        name = given.config_name or program.config_name
        if name is None and not given.info:
            raise ValueError(f"name a run: --config-name=<file in configs/>. `{program.command} --help` lists them.")
        if name is None:
            return
        for override in parsed:
            _check_override(program, override)
        composed = None
        for overrides in _jobs(program, parsed, given.multirun):
            try:
                composed = compose(name, overrides=overrides, return_hydra_config=True)
            except MissingConfigException as error:
                raise _missing_config(program, name, given, error) from error
            except Exception as error:  # Hydra and OmegaConf raise whatever their code meets
                raise ValueError(_composition(program, name, error, overrides)) from error
        if given.multirun and program.config_name is not None:  # a run says more of what it lacks
            check_given(OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"]))
        if not program.sweeps and composed.hydra.mode is RunMode.MULTIRUN:
            raise ValueError(f"hydra.mode is MULTIRUN. {_once(program)}")
        if not composed.hydra.sweeper.get("_target_", "").endswith(".BasicSweeper"):
            return
        if (jobs := math.prod(len(_values(override)) for override in parsed if _is_listed(override))) > MOST_JOBS:
            raise ValueError(f"the sweep has {jobs:,} runs; it must have at most {MOST_JOBS:,}. Sweep fewer values.")
        if intervals := [override for override in parsed if override.is_interval_sweep()]:
            key = intervals[0].key_or_group
            raise ValueError(
                f"{key} is {_text(intervals[0])}, which only a sweeper that chooses values reads, and hydra/sweeper is "
                f"basic. Write the values: {key}=1,2, or choose another hydra/sweeper."
            )


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parsed = []
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    for text in overrides:
        if re.match(r"[+~]*=", text):
            raise ValueError(f"{text} has no name before the sign =. Write name=value.")
        if re.fullmatch(r"[\w./@-]+", text) and not text.startswith(("~", "-")):
            raise ValueError(f"{text} is no setting with a value. Write {text}=<value>.")
        try:
            parsed += parser.parse_overrides([text])
        except (OverrideParseException, HydraException) as error:
            reason = str(getattr(error, "message", error)).splitlines()
            why = next((line for line in reason if line and not line.startswith(("Error parsing", "See http"))), "")
            of_parser = re.match(r"\w+Exception\b|mismatched|extraneous|no viable", why)
            why = "" if of_parser else f": {why}"
            shown = text.replace("\n", "\\n")
            raise ValueError(f"cannot read {shown}{why}. {QUOTES}") from error
        for override in parsed[-1:]:
            _check_range(override)
    return parsed


def check_given(config: Any) -> None:
    """Raises ValueError for a setting that must be given, and is not."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, as {missing[0]}=<value>.")


def _once(program: Program) -> str:
    return f"`{program.command}` runs once for a command: give one value for each setting, and a command for each run."


def _is_listed(override: Override) -> bool:
    """Whether an override lists the values of a sweep."""
    return override.is_sweep_override() and not override.is_interval_sweep()


def _check_range(override: Override) -> None:
    """Raises ValueError for a range of more values than a sweep has, or one that never ends."""
    swept = override.value()
    if not isinstance(swept, RangeSweep):
        return
    key, text = override.key_or_group, _text(override)
    try:
        count = sum(1 for _ in itertools.islice(swept.range(), MOST_JOBS + 1))
    except (ValueError, ArithmeticError, HydraException) as error:
        raise ValueError(f"{key} is {text}: {error}. Write {key}=range(<first>,<end>,<step>).") from error
    if count > MOST_JOBS:
        raise ValueError(f"{key} is {text}; a sweep must have at most {MOST_JOBS:,} values. Give a shorter range.")


def _jobs(program: Program, parsed: list[Override], is_sweep: bool) -> Iterator[list[str]]:
    """Overrides of runs that together have every value of a sweep; those of one run, if there is no sweep.

    Of a range only the first and the last value.

    A setting with an interval is in none: its values are known to the sweeper alone.
    """
    swept = []
    for override in parsed:
        key, value = override.key_or_group, _text(override)
        if not override.is_sweep_override():
            swept.append([override.input_line])
        elif not is_sweep:
            each = "--multirun for a run with each, " if program.sweeps else ""
            raise ValueError(
                f"{key} has several values: {value}. Give {each}{key}=[{value}] for a list, or "
                f"'{key}=\"{value}\"' for a text."
            )
        elif not override.is_interval_sweep():
            swept.append([f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()])
            if isinstance(override.value(), RangeSweep):
                swept[-1] = [*swept[-1][:1], *swept[-1][1:][-1:]]
            if not swept[-1]:
                raise ValueError(f"{key} is {value}, which has no values. Give the values of the sweep: {key}=<a>,<b>.")
    for number in range(max(map(len, swept), default=1)):
        yield [values[number % len(values)] for values in swept]


def _values(override: Override) -> list[Any]:
    """The values of an override, as texts where it is a sweep; none for an interval."""
    if override.is_interval_sweep():
        return []
    if override.is_sweep_override():
        return [text.strip("'\"") for text in override.sweep_string_iterator()]
    return [override.value()]


def _check_override(program: Program, override: Override) -> None:
    """Raises ValueError for an override of what does not exist."""
    key, loader = override.key_or_group, GlobalHydra.instance().config_loader()
    if key.startswith(("hydra.", "hydra/")) or key == "hydra":
        return
    values, options = _values(override), loader.get_group_options(key, ObjectType.CONFIG)
    if options:
        for value in values:
            if isinstance(value, str) and value not in options and "/" not in value:
                given = value or "empty"
                raise ValueError(f"{key} is {given}; choose one of {', '.join(options)}.{did_you_mean(value, options)}")
            if value is None and not override.is_delete():
                raise ValueError(f"{key} is null; choose one of {', '.join(options)}.")
            if not isinstance(value, str) and value is not None and not isinstance(value, dict):
                raise ValueError(f"{key} is {_text(override)}; choose one of {', '.join(options)}.")
        if all(isinstance(value, str) for value in values):
            return
    if "/" in key or override.package is not None:
        groups = loader.list_groups("")
        near = did_you_mean(key.partition("@")[0], groups) or f" There are {', '.join(groups)}."
        raise ValueError(f"there is no group {override.get_key_element()} of configurations.{near}")
    try:
        kind = kind_of(program.schema, key)
    except ValueError as error:
        groups = [group for group in loader.list_groups("") if group != "hydra"]
        near = "" if "." in key or "Did you mean" in str(error) else did_you_mean(key, groups)
        raise ValueError(f"{str(error).partition(' There are')[0]}{near}" if near else str(error)) from None
    if override.is_delete():
        raise ValueError(f"~{key} would remove a setting, and each must be there. Set {key}=<value> instead.")
    for value in values:
        if is_section(kind) and not isinstance(value, dict) and (value is not None or without_null(kind) is kind):
            first = dataclasses.fields(without_null(kind))[0].name
            raise ValueError(f"{key} is {_text(override)}; it is a section: set its settings, such as {key}.{first}=…")
        is_bool = isinstance(value, bool) or str(value).lower() in ("true", "false", "???")
        if kind is bool and not is_bool and "${" not in str(value):
            raise ValueError(f"{key} is {_text(override)}; it must be true or false.")


def _text(override: Override) -> str:
    return override.input_line.partition("=")[2]


def _missing_config(
    program: Program, name: str | None, given: argparse.Namespace, error: MissingConfigException
) -> ValueError:
    missing = (error.missing_cfg_file or name or "").removesuffix(".yaml")
    if missing == name or name is None:
        places = [Path(place) for place in (given.config_path or program.configs, given.config_dir) if place]
        known = [path.stem for place in places for path in place.glob("*.yaml")]
        near = did_you_mean(name, known) or _starting_with(name or "", known)
        return ValueError(
            f"--config-name is {name}, and {' and '.join(f'{place.name}/' for place in places)} has no {name}.yaml."
            f"{near} `{program.command} --help` lists the configurations."
        )
    group, _, choice = missing.rpartition("/")
    if "submitit" in choice:
        return ValueError(f"{group} is {choice}, which needs hydra-submitit-launcher: pip install -e '.[slurm]'")
    options = list(error.options or [])
    known = f" Choose one of {', '.join(options)}." if options else ""
    return ValueError(
        f"the configuration {name} names {missing}, which does not exist.{known}{did_you_mean(choice, options)} "
        f"Correct {name}.yaml, or put {missing}.yaml into {program.configs.name}/."
    )


def _starting_with(name: str, known: list[str]) -> str:
    near = sorted(other for other in known if name and (other.startswith(name) or name in other))
    return f" Did you mean {near[0]}?" if near else ""


def _composition(program: Program, name: str | None, error: Exception, overrides: Sequence[str]) -> str:
    """The message for an error of Hydra's composition."""
    cause = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    where = re.match(r"In '(.+?)'", str(error))
    place = f"{where[1]}.yaml: " if where else ""
    culprit = _culprit(name, overrides) if where is None else None
    key = culprit.partition("=")[0].lstrip("+~") if culprit else ""
    if cause is not None and cause.full_key:
        before, within, _ = f"{key}.".partition(f".{cause.full_key}.")
        if within and typing.get_origin(kind_of(program.schema, before)) is dict:  # a new entry of a mapping
            return _no_entry(program.schema, before, cause.full_key)
        return place + wrong_setting(program.schema, cause, overrides)
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if culprit and culprit.startswith("+") and "Multiple values" in reason:
        return f"cannot set {culprit}: {key} has a value. Leave the + out: {culprit.lstrip('+')}."
    if culprit:
        reason = "it is null, and only a configuration makes a section of it" if "NoneType" in reason else reason
        return f"cannot set {culprit}: {reason}. Write {key} into a configuration, or choose a group that sets it."
    return f"{place}{reason}. Correct the setting, or the configuration; {program.remedy}"


def _no_entry(schema: type, path: str, entry: str) -> str:
    """The message for a setting of an entry that the mapping `path` does not have."""
    kind = kind_of(schema, f"{path}.{entry}")
    if not is_section(kind):
        return f"{path} has no entry {entry}. Write + before the setting, to add it: +{path}.{entry}=<value>."
    fields = ", ".join(f"{field.name}: …" for field in dataclasses.fields(without_null(kind)))
    return f"{path} has no entry {entry}. Give the entry as a whole: '+{path}={{{entry}: {{{fields}}}}}'."


def _culprit(name: str | None, overrides: Sequence[str]) -> str | None:
    """The first override that cannot be composed with those before it; None if each can."""
    for number, override in enumerate(overrides, 1):
        try:
            compose(name, overrides=[*overrides[:number]])
        except Exception:
            return override
    return None


def wrong_setting(schema: type, error: OmegaConfBaseException, overrides: Sequence[str] = (), prefix: str = "") -> str:
    """The message for a setting that OmegaConf does not take. `prefix` is the section of `schema`, with a dot."""
    key = re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or "")).strip(".")
    first = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    if key.startswith("hydra."):
        return f"{key}: {first}. Correct its value."
    try:
        kind = kind_of(schema, key)
    except ValueError as unknown:
        said = str(unknown).replace(f"setting {key}", f"setting {prefix}{key}").replace("mean ", f"mean {prefix}")
        return said.replace("There are ", f"The section {prefix.rstrip('.')} has ") if prefix else str(unknown)
    said = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in overrides}
    name = f"{prefix}{error.full_key}"
    if "nterpolation" in type(error).__name__:
        return f"{name}: {first}. Correct the name in ${{...}}, or write the value itself."
    if "not in struct" in first:
        path, _, entry = name.rpartition(".")
        if not path:
            return f"the configuration has no {entry}: it is part of one. Choose another --config-name."
        return _no_entry(schema, path.removeprefix(prefix), entry)
    value = said.get(name)
    if value is None:
        match = re.match(r"Value '(.*?)'(?: of type| is not|\()", first)
        value = match[1] if match else None
    if kind is Any:
        return f"{name}: {first}. Correct its value."
    allowed = words_for(kind)
    near = did_you_mean(value, allowed.removeprefix("one of ").split(", ")) if allowed.startswith("one of ") else ""
    return f"{name} is {value}; it must be {allowed}.{near}" if value else f"{name}: {first}; it must be {allowed}."
