"""The command line of a program: its flags, the configuration that Hydra composes, and its errors in one message."""

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardlib.parsing import did_you_mean
from shardwright.settings.settings import is_section, kind_of, settings_of, words_for

MOST_VALUES = 100
"""Values of a setting in a sweep that are composed before the first run."""
QUOTES = "Write name=value, and a value with signs such as , = [ { in quotes of both kinds: 'name=\"value\"'."
CONFIG_FLAGS = {
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--config-path": "config_path",
    "-cp": "config_path",
}
"""The flags that say what is composed, with the fields of Given."""
HYDRA_FLAGS = ("--multirun", "-m", "--cfg", "-c", "--package", "-p", "--info", "-i", "--resolve", "--hydra-help")
HYDRA_FLAGS += ("--version", "--shell-completion", "-sc", "--experimental-rerun")
"""The flags with which Hydra does more than to compose one configuration."""
FLAGS = (*CONFIG_FLAGS, *HYDRA_FLAGS, "--run", "-r", "--help", "-h")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with settings.

    Attributes:
        command: how it is started: python -m <module>.
        configs: directory of its configurations.
        config_name: configuration that is read where --config-name is not given; None: none.
        schema: dataclass of its settings.
        doc: its docstring.
    """

    command: str
    configs: Path
    config_name: str | None
    schema: type
    doc: str = ""

    @property
    def remedy(self) -> str:
        """Where all settings are listed."""
        return f"`{self.command} --help` lists the settings."


@dataclasses.dataclass
class Given:
    """A command line.

    Attributes:
        overrides: the settings.
        flags: the flags, without their values.
        config_name: what is composed; None: what the program reads by itself.
        config_dir: directory of further configurations.
        config_path: directory in place of the program's.
    """

    overrides: list[str]
    flags: set[str]
    config_name: str | None = None
    config_dir: str | None = None
    config_path: str | None = None

    @property
    def is_hydras(self) -> bool:
        """Whether Hydra does more than to compose one configuration."""
        return not self.flags.isdisjoint(HYDRA_FLAGS) or "://" in (self.config_path or "")


def readable(argument: str) -> str:
    """An argument as Hydra reads it: with quotes around a value such as `~/runs` or `première`."""
    name, _, value = argument.partition("=")
    plain = re.fullmatch(r"\+*[\w.@/]+", name) and re.fullmatch(r"[^'\"\\,=(){}\[\]$]+", value)
    return f'{name}="{value}"' if plain and (value.startswith("~") or not value.isascii()) else argument


def parse_arguments(program: Program, arguments: Sequence[str]) -> Given:
    """The flags and overrides of a command line. Raises ValueError for a flag that Hydra does not know."""
    given, waiting = Given([], set()), [*arguments]
    while waiting:
        text = waiting.pop(0)
        name, equals, value = text.partition("=")
        if not text.startswith("-") or text == "--":
            given.overrides += [text] * (text != "--")
        elif name not in FLAGS:
            setting = f" A setting has no dashes: {text.lstrip('-')}." if re.match(r"-+[\w.]+=", text) else ""
            raise ValueError(f"there is no flag {name}.{did_you_mean(name, FLAGS) or setting or f' {program.remedy}'}")
        else:
            given.flags.add(name)
            if name in CONFIG_FLAGS:
                if not equals and not waiting:
                    raise ValueError(f"{name} has no value. Write {name}=<value>.")
                setattr(given, CONFIG_FLAGS[name], value if equals else waiting.pop(0))
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


def composed(program: Program, given: Given) -> Any:
    """The configuration that Hydra composes, with Hydra's own section. Raises ValueError with one message.

    Of a sweep jobs are composed that together have the first values of each setting, and the last is returned.
    """
    for name in ("config_dir", "config_path"):
        value = getattr(given, name)
        if value is not None and not Path(value).is_dir():
            raise ValueError(f"--{name.replace('_', '-')} is {value!r}, which is no directory. Correct the path.")
    name = given.config_name or program.config_name
    if name is None:
        raise ValueError(f"name a run: --config-name=<file in configs/>. `{program.command} --help` lists them.")
    is_sweep, overrides = not given.flags.isdisjoint(("--multirun", "-m")), given.overrides
    with _loading(Path(given.config_path or program.configs), given.config_dir):
        try:
            for overrides in _jobs(given.overrides) if is_sweep else [given.overrides]:
                found = compose(name, overrides=overrides, return_hydra_config=True)
            return found
        except Exception as error:  # Hydra and OmegaConf raise whatever their code meets
            raise ValueError(_explained(program, given, error, overrides)) from error


def check_given(config: Any) -> None:
    """Raises ValueError for a setting that must be given, and is not."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, as {missing[0]}=<value>.")


def _jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Overrides of runs that together have up to MOST_VALUES values of each setting of a sweep, but no interval."""
    values, parser = [], OverridesParser.create(GlobalHydra.instance().config_loader())
    for override in parser.parse_overrides([*overrides]):
        texts = [override.input_line]
        if override.is_interval_sweep():
            continue
        if override.is_sweep_override():
            key = override.get_key_element()
            texts = [f"{key}={x}" for x in itertools.islice(override.sweep_string_iterator(), MOST_VALUES)]
            if not texts:
                raise ValueError(f"{override.input_line} has no values. Give some, as name=a,b.")
        values.append(texts)
    for number in range(max(map(len, values), default=1)):
        yield [texts[number % len(texts)] for texts in values]


# ---- errors -------------------------------------------------------------------------------------------------------


def _explained(program: Program, given: Given, error: Exception, overrides: Sequence[str]) -> str:
    """The message for an error of Hydra's composition: what is wrong, with its value, and what to do."""
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}. {QUOTES}".replace("\n", "\\n")
    if isinstance(error, MissingConfigException):
        return _missing_config(program, given, error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    where = re.match(r"In '(.+?)'", str(error))
    place = f"{where[1]}.yaml: " if where else ""
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if found := re.match(r"(?:Could not (?:override|append to|delete)|Ambiguous value for argument) '(.+?)'", reason):
        key, _, value = found[1].lstrip("+~").partition("=")
        kind_of(program.schema, key)  # raises ValueError for a name that does not exist
        if value:
            return f"{key} has several values: {value}. Give {key}=[{value}] for a list, or --multirun for a sweep."
    if cause is not None and (cause.full_key or "") in {setting.name for setting in settings_of(program.schema)}:
        return place + wrong_setting(program.schema, cause, overrides)
    if isinstance(error, AttributeError) and "NoneType" in reason:
        reason = f"a setting is given of a section that is null ({', '.join(overrides)})"
    elif cause is not None and cause is not error:
        reason = f"{reason}: {str(cause).splitlines()[0].rstrip('.')}"
    elif where is None:
        reason = f"{reason} ({', '.join(overrides)})"
    return f"{place}{reason}. Correct the setting; {program.remedy}"


def _missing_config(program: Program, given: Given, error: MissingConfigException) -> str:
    name = given.config_name or program.config_name
    missing = (error.missing_cfg_file or name).removesuffix(".yaml")
    if missing == name:
        places = [Path(place) for place in (given.config_path or program.configs, given.config_dir) if place]
        known = [path.stem for place in places for path in place.glob("*.yaml")]
        return (
            f"--config-name is {name}, and {' and '.join(f'{place.name}/' for place in places)} has no {name}.yaml."
            f"{did_you_mean(name, known)} `{program.command} --help` lists the configurations."
        )
    group, _, choice = missing.rpartition("/")
    if "submitit" in choice:
        return f"{group} is {choice}, which needs hydra-submitit-launcher: pip install -e '.[slurm]'"
    options = list(error.options or [])
    return f"{group} is {choice}; choose one of {', '.join(options)}.{did_you_mean(choice, options)}"


def wrong_setting(schema: type, error: OmegaConfBaseException, overrides: Sequence[str] = (), prefix: str = "") -> str:
    """The message for a setting that OmegaConf does not take. `prefix` is the section of `schema`, with a dot."""
    key = re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or "")).strip(".")
    first = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    name = f"{prefix}{error.full_key}"
    try:
        kind = kind_of(schema, key)
    except ValueError as unknown:
        said = str(unknown).replace(f"setting {key}", f"setting {prefix}{key}").replace("mean ", f"mean {prefix}")
        return said.replace("There are ", f"The section {prefix.rstrip('.')} has ") if prefix else str(unknown)
    if "not in struct" in first and not is_section(kind):
        return f"there is no {name}. Write + before the setting, to add it: +{name}=<value>."
    if kind is Any or "not in struct" in first or "nterpolation" in type(error).__name__:
        return f"{name}: {first}. Correct its value, or give the section as a whole."
    said = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in overrides}
    match = re.match(r"Value '(.*?)'(?: of type| is not|\()", first)
    value = said.get(name) or (match[1] if match else None)
    allowed = words_for(kind)
    near = did_you_mean(value, allowed.removeprefix("one of ").split(", ")) if allowed.startswith("one of ") else ""
    return f"{name} is {value}; it must be {allowed}.{near}" if value else f"{name}: {first}; it must be {allowed}."
