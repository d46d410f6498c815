"""Reads the command line of a program, before Hydra does: its flags, its configuration, and its settings."""

import argparse
import dataclasses
import functools
import os
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardlib.parsing import did_you_mean
from shardlib.places import shown_path
from shardwright.settings.settings import UnknownSetting, kind_of, shown_value, typed, without_null

FLAGS = ("--config-name", "--config-dir", "--multirun")
QUOTES = "Write name=value; put a value with characters such as , [ { ( ' in both kinds of quotes: 'name=\"value\"'."


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with settings.

    Attributes:
        command: the command that starts it: python -m <module>.
        configs: directory of its configurations.
        config_name: default of --config-name; None: it must be given.
        schema: dataclass of its settings.
        doc: its docstring.
    """

    command: str
    configs: Path
    config_name: str | None
    schema: type
    doc: str = ""


class CommandLine(NamedTuple):
    """A command line, as `parse` read it."""

    words: list[str]
    """Flags and settings for Hydra."""
    config_name: str | None
    directories: list[Path]
    """Directories of configurations, before those of the program."""
    help: bool


SHIPPED = Path(__file__).parents[1] / "shipped"
"""Data that is installed with the package."""


def register_shipped() -> None:
    """Lets configurations write ${shipped:name}: `name` where a program starts if it is there, else that of SHIPPED."""

    def found(name):
        return name if Path(name).exists() else str(SHIPPED / name).removeprefix(f"{os.getcwd()}{os.sep}")

    OmegaConf.register_new_resolver("shipped", found, replace=True)


def command_of(module: str) -> str:
    """The command that starts a program: `python -m tools.plan` where it was started so, else `shardwright plan`."""
    started = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    by_module = started.partition(".")[0] in ("train", "tools")
    return f"python -m {module}" if by_module else f"shardwright {module.removeprefix('tools.')}"


def is_setting(argument: str) -> bool:
    """Returns whether an argument sets or removes a setting; others are flags and their values."""
    return argument.startswith(("+", "~")) or ("=" in argument and not argument.startswith("-"))


def parse(program: Program, arguments: Sequence[str]) -> CommandLine:
    """Reads the arguments of a program. Raises ValueError for a flag, setting, value or file that does not exist.

    --config-name may be a file, such as configs/x.yaml. runs/x, run=x and x become run=runs/x if the program reads a
    run and runs/x exists.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}. `{program.command} --help` lists the flags.")

    parser.error = refuse
    found, unknown = parser.parse_known_intermixed_args(arguments)
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("-")):
        near = did_you_mean(flag, FLAGS) or " Settings have no dashes: name=value."
        raise ValueError(f"there is no flag {flag}.{near} `{program.command} --help` lists both.")
    name, directories = os.path.expanduser(found.config_name or ""), _directories(program, found)
    if Path(name).is_file():
        name, directories = Path(name).name, [Path(name).parent, *directories]
    name = name.removesuffix(".yaml") or program.config_name
    words = read_overrides(program, directories, found.overrides)
    if not (found.help or found.hydra_help or found.shell_completion):
        _check_config(program, [*directories, program.configs], name)
    found.config_dir = str(directories[0]) if directories else None
    ours = ("overrides", "config_name", "config_path", "help")
    flags = {f"--{key.replace('_', '-')}": value for key, value in vars(found).items() if value and key not in ours}
    flags = [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]
    return CommandLine([*flags, *words], name, directories, found.help)


def _directories(program: Program, flags: argparse.Namespace) -> list[Path]:
    """The directory of --config-dir, and configs/ of a project; the configurations of a tool are not those of runs."""
    directories = [Path(os.path.expanduser(given)) for given in (flags.config_dir, flags.config_path) if given]
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(f"--config-dir is {directory}, which is not a directory. Correct the path.")
    own = Path("configs")
    is_of_project = program.config_name is None and own.is_dir() and not own.samefile(program.configs)
    return [*directories, own] if is_of_project else directories


def _check_config(program: Program, folders: Sequence[Path], name: str | None) -> None:
    """Raises ValueError unless there is a configuration of this name, with a list `defaults`."""
    if name is None:
        raise ValueError(f"name a run: --config-name=<file in configs/>. `{program.command} --help` lists them.")
    if not (paths := [path for folder in folders if (path := folder / f"{name}.yaml").is_file()]):
        where = " or ".join(f"{shown_path(str(folder))}/" for folder in folders)
        remedy = f"{_near(Path(name).name, folders)} `{program.command} --help` lists the configurations."
        raise ValueError(f"--config-name is {name}, and {where} has no {name}.yaml.{remedy}")
    if b"defaults:" not in paths[0].read_bytes() and program.config_name is None:
        raise ValueError(f"{shown_path(str(paths[0]))} has no `defaults`. Begin it with `defaults: [base, _self_]`.")


def _near(name: str, folders: Iterable[Path]) -> str:
    """Asks for the configuration in `folders` closest to `name`, after a space; empty if none is close."""
    return did_you_mean(name, [path.stem for folder in folders for path in folder.glob("*.yaml")])


def _reads_runs(program: Program) -> bool:
    return "run" in (field.name for field in dataclasses.fields(program.schema))


def _with_runs(words: Sequence[str]) -> list[str]:
    """Replaces the names of runs by one setting, `run`, quoted for Hydra."""
    runs = {}
    for word in words:
        run = word.removeprefix("run=")
        places = os.path.expanduser(run), f"runs/{run}"
        if path := next((path for path in places if "=" not in path and Path(path).is_dir()), None):
            runs[word] = f'"{path}"'
    several = f"[{','.join(runs.values())}]" if len(runs) > 1 else "".join(runs.values())
    return [*(word for word in words if word not in runs), *([f"run={several}"] if runs else [])]


# ---- settings -----------------------------------------------------------------------------------------------------


def read_overrides(program: Program, directories: Sequence[Path], words: Sequence[str]) -> list[str]:
    """Writes settings as Hydra takes them. Raises ValueError for one that does not exist, and for a wrong value."""
    folders = [*directories, program.configs]
    words = _with_runs(words) if _reads_runs(program) else words
    return [_read_override(program, folders, word) for word in words]


def _read_override(program: Program, folders: Sequence[Path], word: str) -> str:
    if not is_setting(word):
        raise ValueError(_not_a_setting(program, folders, word))
    name = word.lstrip("+~").partition("=")[0]
    text = with_texts_quoted(program.schema, word)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise ValueError(f"cannot read {word}. {QUOTES}".replace("\n", "\\n")) from None
    several = override.is_sweep_override()
    value = None if several else override.value()
    files = sorted({path.stem for folder in folders for path in folder.joinpath(name).glob("*.yaml")})
    if files and not isinstance(value, dict):  # a group of configurations
        if not (several or override.is_delete() or isinstance(value, str | list)):
            raise ValueError(f"{name} is {shown_value(value)}; choose one of {', '.join(files)}.")
        return text
    if name.startswith("hydra/"):
        return text
    kind_of(program.schema, name)
    if name.startswith("hydra.") or override.is_delete():
        return text
    if override.is_discrete_sweep():
        for each in override.sweep_string_iterator():
            _read_override(program, folders, f"{name}={each}")
    elif not several:
        typed(program.schema, functools.reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), value))
    return text


def _not_a_setting(program: Program, folders: Sequence[Path], word: str) -> str:
    """Writes the message for a word that is neither a flag nor a setting."""
    try:
        kind_of(program.schema, word)
    except UnknownSetting:
        if _reads_runs(program):
            return f"there is no directory {word}. Give that of a run: run=runs/<run>."
        near = "" if program.config_name else _near(Path(word).stem, folders).replace("mean ", "mean --config-name=")
        return f"{word} is not a setting.{near or f' {QUOTES}'}"
    return f"{word} has no value. Write {word}=<value>."


_TEXTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![^\[,])[^][(){}'",$\\]+(?=[\],]|\Z)""")
"""Quoted texts; and values, also in a list or of a sweep, that have no quotes, functions or interpolations."""


def with_texts_quoted(schema: type, override: str) -> str:
    """Quotes what Hydra would take for a number, or could not read, in an override of a setting that is a text."""
    name, equals, value = override.partition("=")
    try:
        kind = without_null(kind_of(schema, name.lstrip("+~")))
    except UnknownSetting:
        return override
    kind = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    return f"{name}{equals}{_TEXTS.sub(_quoted, value)}" if kind is str else override


def _quoted(found: re.Match) -> str:
    text = found[0].strip()
    if text[:1] in ("'", '"', ""):
        return text
    try:
        value = OverridesParser.create().parse_override(f"a={text}").value()
    except HydraException:
        value = 0
    return text if value is None or isinstance(value, str) else f"'{text}'"


# ---- composition --------------------------------------------------------------------------------------------------


class _SearchPath(SearchPathPlugin):
    directories: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in self.directories:
            search_path.prepend("command-line", str(directory.absolute()), "main")  # a project's files win


def search_first(directories: Sequence[Path]) -> None:
    """Makes Hydra look for configurations in these directories, before those of the program."""
    _SearchPath.directories = directories
    Plugins.instance().register(_SearchPath)


def explained(program: Program, error: Exception) -> str | None:
    """Writes the message for an error of Hydra's composition, in one line; None for another error."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options)
        return f"{group} is {choice}; choose one of {', '.join(options)}.{did_you_mean(choice, options)}"
    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        reason = " ".join(str(error if str(error) else error.__cause__).split()).rstrip(".")
        return f"{reason}. Correct it; `{program.command} --help` lists the configurations and settings."
    return None
