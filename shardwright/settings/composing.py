"""Checks the command line of a program, and turns Hydra's composition errors into one message."""

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardlib.parsing import did_you_mean
from shardlib.places import shown_path
from shardwright.data.untrusted import first_line
from shardwright.settings.settings import UnknownSetting, is_open, kind_of, wrong_setting
from shardwright.settings.written import check_setting, in_its_section, override_as_written

QUOTES = "Write name=value; put a value with characters such as , [ { ( ' in both kinds of quotes: 'name=\"value\"'."
FLAGS = "--config-name -cn --config-dir -cd --config-path -cp --multirun -m --run -r --cfg -c --package -p --info -i "
FLAGS += "--resolve --help -h --hydra-help --version --shell-completion -sc --experimental-rerun"
UNNAMED = "(unnamed)"
"""Name of the configuration of a program that needs --config-name, without it."""


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


def by_name(program: Program, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replaces paths, as a shell completes them, by what Hydra takes. Also returns directories of configurations.

    --config-name=configs/x.yaml becomes x, in that directory; without one, a project's configs/ come first, after the
    directory of --config-dir. runs/x, run=x and x become run=runs/x if the program reads a run and runs/x exists.
    Raises ValueError for a flag without its value, and a file or directory that does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd", type=os.path.expanduser)
    try:
        flags, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name} lacks its value. Write --config-name=<configuration>.") from None
    given, own = os.path.expanduser(flags.config_name or ""), Path("configs")
    path = Path(f"{given.removesuffix('.yaml')}.yaml")
    if os.sep in given and (path.is_file() or path.is_absolute() or given.endswith(".yaml")):
        own, flags.config_name = path.parent, path.stem
        if not path.is_file():
            raise ValueError(f"--config-name is {given}, and there is no file {path}.{_near(path.stem, [own])}")
    elif program.config_name is not None:  # the configurations of a tool are not those of runs
        own = program.configs
    directories = [flags.config_dir] if flags.config_dir else []
    if directories and not Path(flags.config_dir).is_dir():
        raise ValueError(f"--config-dir is {flags.config_dir}, which is not a directory. Correct the path.")
    if own.is_dir() and not own.samefile(program.configs):
        directories.append(str(own))
        flags.config_dir = directories[0]
    found = [f"--{name.replace('_', '-')}={value}" for name, value in vars(flags).items() if value is not None]
    if _reads_runs(program):
        runs = {text: run for text in others if (run := _directory_of(text.removeprefix("run=")))}
        several = f"[{','.join(runs.values())}]" if len(runs) > 1 else "".join(runs.values())
        others = [*(text for text in others if text not in runs), *([f"run={several}"] if runs else [])]
    return sorted([*found, *others], key=is_setting), directories


def _reads_runs(program: Program) -> bool:
    return "run" in (field.name for field in dataclasses.fields(program.schema))


def _directory_of(run: str) -> str | None:
    """Returns the directory of a run, quoted for Hydra; None if there is none of this name, also not in runs/."""
    places = os.path.expanduser(run), f"runs/{run}"
    found = next((path for path in places if "=" not in path and Path(path).is_dir()), None)
    return found and f'"{found}"'


def _near(name: str, folders: Iterable[Path]) -> str:
    """Asks for the configuration in `folders` closest to `name`, after a space; empty if none is close."""
    return did_you_mean(name, [path.stem for folder in folders for path in folder.glob("*.yaml") if path.is_file()])


def check_flags(program: Program, arguments: Sequence[str]) -> None:
    """Raises ValueError for a flag that does not exist."""
    known = FLAGS.split()
    for flag in (text.partition("=")[0] for text in arguments if text.startswith("-")):
        if flag not in known:
            meant: str | None = flag.lstrip("-").replace("-", "_")
            try:
                kind_of(program.schema, meant)
            except UnknownSetting as error:
                meant = error.meant
            longer = [f" Did you mean {other}?" for other in known if other.startswith(flag) and flag[2:]]
            near = f" A setting has no dashes: {meant}=<value>." if meant else did_you_mean(flag, known)
            remedy = [*longer, near or f" `{program.command} --help` lists the settings."][0]
            raise ValueError(f"there is no flag {flag}.{remedy}")


def read_overrides(program: Program, directories: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Writes the settings of a command line as Hydra takes them; its other words stay.

    Raises ValueError for a setting that does not exist, and for a value that does not have its type.
    """
    is_sweep = any(text in ("--multirun", "-m") or text.startswith("hydra.mode=") for text in arguments)
    folders = [Path(folder) for folder in (*directories, program.configs)]
    return [_read_override(program, folders, text, is_sweep) if is_setting(text) else text for text in arguments]


def _read_override(program: Program, folders: Sequence[Path], argument: str, is_sweep: bool) -> str:
    name, _, value = argument.lstrip("+~").partition("=")
    if (flag := name.lstrip("\N{EM DASH}\N{EN DASH}")) in ("config-name", "config-dir", "config-path"):
        raise ValueError(f"{argument} is not a setting. Did you mean --{flag}={value}?")
    text = override_as_written(program.schema, argument)
    try:
        override = OverridesParser.create().parse_override(text)
        if not name:
            raise HydraException
    except HydraException:
        raise ValueError(f"cannot read {argument}. {QUOTES}".replace("\n", "\\n")) from None
    if override.is_sweep_override() and not is_sweep:
        raise ValueError(
            f"{name} has several values: {value}. Give {name}=[{value}] for a list, or --multirun for a sweep."
        )
    files = sorted({path.stem for folder in folders for path in folder.joinpath(name).glob("*.yaml")})
    choice = None if override.is_sweep_override() else override.value()
    if files and not isinstance(choice, dict):  # a group of configurations
        if not (override.is_sweep_override() or override.is_delete() or isinstance(choice, str | list)):
            raise ValueError(f"{name}={value} names no file of {name}/. Choose one: {name}=<{', '.join(files)}>.")
        return text.removeprefix("++")
    if name.startswith("hydra/"):
        return text
    kind_of(program.schema, name)
    if name.startswith("hydra."):
        return text
    if override.is_delete():
        if not is_open(program.schema, name):
            raise ValueError(f"{name} cannot be deleted: every run has it. Give its value: {name}=<value>.")
        return text
    if override.is_sweep_override():
        for each in override.sweep_string_iterator() if override.is_discrete_sweep() else ():
            _read_override(program, folders, f"{name}={each}", is_sweep)
        return text if is_open(program.schema, name) else text.lstrip("+")
    check_setting(program.schema, name, choice)
    return in_its_section(program.schema, text)


# ---- errors -------------------------------------------------------------------------------------------------------


def is_of_composing(error: Exception) -> bool:
    """Returns whether `error` is one of Hydra or OmegaConf, which have no error of their own if a section is null."""
    modules = [str(frame.f_globals["__name__"]) for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_circle = isinstance(error, RecursionError) and "hydra._internal.defaults_list" in modules
    is_theirs = is_circle or modules[-1].startswith(("omegaconf.", "hydra."))
    return is_theirs or isinstance(error, HydraException | OmegaConfBaseException)


def explained(program: Program, error: Exception, directories: Sequence[str], arguments: Sequence[str]) -> str:
    """Writes the message for an error of Hydra's composition: what is wrong, with its value, and what to do."""
    folders = [Path(folder) for folder in (*directories, program.configs)]
    if isinstance(error, OverrideParseException):
        return _not_a_setting(program, folders, error.override)
    if isinstance(error, MissingConfigException):
        return _missing_config(program, folders, error, arguments)
    if isinstance(error, RecursionError):
        return "a configuration includes itself, perhaps through others. Correct their lists `defaults`."
    overrides = ", ".join(filter(is_setting, arguments))
    if isinstance(error, AttributeError | AssertionError):
        return f"a setting is in a section that is null ({overrides}). Leave out what sets the section to null."
    for cause in _causes(error):
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return wrong_setting(program.schema, cause)
    reason = first_line(error)
    if reason.startswith("Could not override") and reason.endswith("No match in the defaults list"):
        return f"{reason}: {overrides}. Give a group that the configuration does not have with a plus: +mesh=fsdp."
    if reason.startswith("Multiple values for") and overrides:
        return f"{reason.partition('.')[0]}: {overrides}. Give a group that the configuration has without a plus."
    given = f" ({overrides})" if overrides else ""
    return f"{reason}{given}. Correct the setting; `{program.command} --help` lists the settings."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _not_a_setting(program: Program, folders: Sequence[Path], word: str) -> str:
    """Writes the message for a word that is neither a flag nor a setting."""
    try:
        kind_of(program.schema, word)
    except UnknownSetting:
        if _reads_runs(program):
            return f"there is no directory {word}. Give that of a run: run=runs/<run>."
        near = _near(Path(word).stem, folders).replace("mean ", "mean --config-name=")
        paths = [field.name for field in dataclasses.fields(program.schema) if "path" in field.metadata]
        if paths and not paths[0].startswith("out") and os.path.exists(word):
            near = f" Did you mean {paths[0]}={word}?"
        return f"{word} is not a setting.{near or f' {QUOTES}'}"
    return f"{word} has no value. Write {word}=<value>."


def _missing_config(
    program: Program, folders: Sequence[Path], error: MissingConfigException, arguments: Sequence[str]
) -> str:
    missing = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, choice = missing.rpartition("/")
    if not choice:
        return " ".join(str(error).split())
    if choice == UNNAMED:
        return f"name a run: --config-name=<file in configs/>. `{program.command} --help` lists them."
    if "submitit" in choice:
        return f"{group} is {choice}, which needs hydra-submitit-launcher: pip install -e '.[slurm]'"
    if group and (options := list(error.options or [])):
        return f"{group} is {choice}; choose one of {', '.join(options)}.{did_you_mean(choice, options)}"
    where = " or ".join(f"{shown_path(str(folder))}/" for folder in folders)
    is_named = f"--config-name={missing}" in (text.removesuffix(".yaml") for text in arguments)
    what = "--config-name" if is_named else "an entry of `defaults` in a configuration"
    remedy = f"{_near(choice, folders)} `{program.command} --help` lists the configurations."
    return f"{what} is {missing}, and {where} has no {missing}.yaml.{remedy}"
