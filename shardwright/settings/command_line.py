"""Reads the command line of a program, before Hydra does: its flags, its configuration, and the
names of settings.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardlib.parsing import did_you_mean
from shardwright.settings.output import listed, quoted
from shardwright.settings.settings import kind_of

QUOTES = "Put a value with characters such as , [ { ( ' in both kinds of quotes: 'name=\"value\"'."
OURS = ("overrides", "config_name", "config_dir", "config_path", "help")
"""Arguments that Hydra gets in another form than the user gave, or not at all."""


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
    """Lets configurations write ${shipped:name}: `name` where a program starts if it is there, else
    that of SHIPPED.
    """

    def found(name):
        return (
            name
            if Path(name).exists()
            else str(SHIPPED / name).removeprefix(f"{os.getcwd()}{os.sep}")
        )

    OmegaConf.register_new_resolver("shipped", found, replace=True)


def parse(program: Program, arguments: Sequence[str]) -> CommandLine:
    """Reads the arguments of a program.

    Raises ValueError for a flag, setting or directory that does not exist.

    --config-name may be a file, such as configs/x.yaml. runs/x, run=x and x become run=runs/x if
    the program reads a run and runs/x exists.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(
            f"{message}. `{program.command} --help` lists flags, and settings, which are "
            "name=value."
        )

    parser.error = refuse
    found = parser.parse_intermixed_args(arguments)
    directories = [
        Path(os.path.expanduser(given)) for given in (found.config_dir, found.config_path) if given
    ]
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(
                f"--config-dir is {directory}, which is not a directory. Correct the path."
            )
    own = Path("configs")  # of a project; the configurations of a tool are not those of runs
    if program.config_name is None and own.is_dir() and not own.samefile(program.configs):
        directories.append(own)
    name = os.path.expanduser(found.config_name or "")
    if Path(name).is_file():
        directories.insert(0, Path(name).parent)
        name = Path(name).name
    name = name.removesuffix(".yaml") or program.config_name
    flags = {key: value for key, value in vars(found).items() if value and key not in OURS}
    flags |= {"config_dir": str(directories[0])} if directories else {}
    words = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
        for key, value in flags.items()
    ]
    words += read_overrides(program, found.overrides)
    if not (name or found.help or found.hydra_help or found.shell_completion):
        raise ValueError(
            f"name a run: --config-name=<file in configs/>. `{program.command} --help` lists them."
        )
    return CommandLine(words, name, directories, found.help)


_TEXTS = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![^\[,])[^][(){}'",$\\]+(?=[\],]|\Z)"""
)
"""Quoted texts; and values, also in a list or of a sweep, that have no quotes, functions or
interpolations."""
_PLAIN = re.compile(r"(?!(?:true|false|inf|nan)\Z)[a-z_/][\w./:+-]*", re.ASCII | re.IGNORECASE)
"""Texts that Hydra reads as they are, and null."""


def read_overrides(program: Program, words: Sequence[str]) -> list[str]:
    """Writes settings as Hydra takes them.

    Raises ValueError for a word that is none, or whose section is unknown.
    """
    has_run = "run" in (field.name for field in dataclasses.fields(program.schema))
    read = []
    for word in _with_runs(words) if has_run else words:
        name, equals, value = word.lstrip("+~").partition("=")
        if not (equals or word.startswith("~")):
            configs = (
                []
                if program.config_name
                else [path.stem for path in program.configs.glob("*.yaml")]
            )
            near = did_you_mean(Path(word).stem, configs).replace("mean ", "mean --config-name=")
            other = ", or the directory of a run" if has_run else ""
            raise ValueError(
                f"{word} is not a setting with its value. Write name=value{other}.{near}"
            )
        if value == "null" and (program.configs / name).is_dir():
            raise ValueError(
                f"{name} is null; give the name of a file in configs/{name}/, or leave it out."
            )
        kind = Any if name.startswith("hydra") else kind_of(program.schema, name)
        if kind in (str, list[str]):
            word = word.removesuffix(value) + _TEXTS.sub(_quoted, value)
        read.append(word)
    return read


def _quoted(found: re.Match) -> str:
    """Quotes a text that Hydra could not read, or would take for a number."""
    text = found[0].strip()
    return text if text[:1] in ("'", '"', "") or _PLAIN.fullmatch(text) else quoted(text)


def _with_runs(words: Sequence[str]) -> list[str]:
    """Replaces the names of runs by one setting, `run`, quoted for Hydra."""
    runs = {}
    for word in words:
        run = word.removeprefix("run=")
        places = os.path.expanduser(run), f"runs/{run}"
        if path := next((path for path in places if "=" not in path and Path(path).is_dir()), None):
            runs[word] = quoted(path)
    several = f"[{','.join(runs.values())}]" if len(runs) > 1 else "".join(runs.values())
    return [*(word for word in words if word not in runs), *([f"run={several}"] if runs else [])]


class _SearchPath(SearchPathPlugin):
    directories: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in self.directories:
            # a project's files win
            search_path.prepend("command-line", str(directory.absolute()), "main")


def search_first(directories: Sequence[Path]) -> None:
    """Makes Hydra look for configurations in these directories, before those of the program."""
    _SearchPath.directories = directories
    Plugins.instance().register(_SearchPath)


def explained(program: Program, directories: Sequence[Path], error: Exception) -> str | None:
    """Writes the message for an error of Hydra's composition, in one line; None for another
    error.
    """
    if isinstance(error, MissingConfigException):
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = [*(error.options or ())]
        if not options:
            group = "--config-name"
            folders = [*directories, program.configs]
            options = sorted(path.stem for folder in folders for path in folder.glob("*.yaml"))
        return (
            f"{group} is {choice}; choose one of "
            f"{listed(options, 12)}.{did_you_mean(choice, options)}"
        )
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}. {QUOTES}".replace("\n", "\\n")
    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        reason = " ".join(str(error if str(error) else error.__cause__).split()).rstrip(".")
        return (
            f"{reason}. Correct it; `{program.command} --help` lists the configurations and "
            "settings."
        )
    return None
