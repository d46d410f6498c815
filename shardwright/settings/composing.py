"""Checks the command line of a program, and turns Hydra's composition errors into one message."""

import argparse
import dataclasses
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardlib.parsing import did_you_mean
from shardlib.places import shown_path
from shardwright.data.untrusted import first_line
from shardwright.settings.settings import UnknownSetting, is_section, kind_of, words_for

QUOTES = "Write name=value; put a value with characters such as , = [ { ~ é in both kinds of quotes: 'name=\"value\"'."
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
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    flags, others = parser.parse_known_args(arguments)
    path, own = Path(flags.config_name or ""), Path("configs")
    if path.suffix == ".yaml" and (path.is_file() or path.parent.name == "configs"):
        flags.config_name = path.stem
        own = path.parent
    elif program.config_name is not None:  # the configurations of a tool are not those of runs
        own = program.configs
    directories = [flags.config_dir] if flags.config_dir else []
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
    found = next((path for path in (run, f"runs/{run}") if "=" not in path and Path(path).is_dir()), None)
    return found and f'"{found}"'


def check_flags(program: Program, arguments: Sequence[str]) -> None:
    """Raises ValueError for a flag, or an added setting, that does not exist."""
    for name in (text.lstrip("+").partition("=")[0] for text in arguments if text.startswith("+")):
        if "." in name:  # Hydra would add any
            kind_of(program.schema, name)
    for flag in (text.partition("=")[0] for text in arguments if text.startswith("-")):
        if flag not in FLAGS.split():
            meant: str | None = flag.lstrip("-").replace("-", "_")
            try:
                kind_of(program.schema, meant)
            except UnknownSetting as error:
                meant = error.meant
            near = f" A setting has no dashes: {meant}=<value>." if meant else did_you_mean(flag, FLAGS.split())
            raise ValueError(f"there is no flag {flag}.{near or f' `{program.command} --help` lists the settings.'}")


# ---- errors -------------------------------------------------------------------------------------------------------


def is_of_composing(error: Exception) -> bool:
    """Returns whether `error` is one of Hydra or OmegaConf, which have no error of their own if a section is null."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_theirs = str(frame.f_globals["__name__"]).startswith(("omegaconf.", "hydra."))
    return is_theirs or isinstance(error, HydraException | OmegaConfBaseException | yaml.MarkedYAMLError)


def explained(program: Program, error: Exception, arguments: Sequence[str]) -> str:
    """Writes the message for an error of Hydra's composition: what is wrong, with its value, and what to do."""
    if isinstance(error, OverrideParseException) and "=" not in error.override and _reads_runs(program):
        return f"there is no directory {error.override}. Give that of a run: run=runs/<run>."
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}. {QUOTES}".replace("\n", "\\n")
    if isinstance(error, MissingConfigException):
        return _missing_config(program, error)
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"{shown_path(mark.name)}:{mark.line + 1}: {error.problem}. Correct the file."
    overrides = [text for text in arguments if is_setting(text)]
    if isinstance(error, AttributeError | AssertionError) and (section := _null_section(program, overrides)):
        return section
    reason = first_line(error)
    if reason.startswith("Config group override must be") and (found := _group_without_file(program, overrides)):
        return found
    if found := re.match(r"(?:Could not (?:override|append to|delete)|Ambiguous value for argument) '(.+?)'", reason):
        key, _, value = found[1].lstrip("+~").partition("=")
        try:
            kind_of(program.schema, key)
        except UnknownSetting as unknown:
            return str(unknown)
        if value:
            return f"{key} has several values: {value}. Give {key}=[{value}] for a list, or --multirun for a sweep."
    cause = next((each for each in _causes(error) if isinstance(each, OmegaConfBaseException)), None)
    sections = {field.name for field in dataclasses.fields(program.schema)}
    if cause is not None and re.split(r"[.\[]", cause.full_key or "")[0] in sections:
        where = re.match(r"In '(.+?)'", str(error))
        return (f"{where[1]}.yaml: " if where else "") + wrong_setting(program.schema, cause, overrides=overrides)
    more = first_line(cause) if cause not in (None, error) else ", ".join(overrides)
    return f"{reason} ({more}). Correct the setting; `{program.command} --help` lists the settings."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _null_section(program: Program, overrides: Sequence[str]) -> str | None:
    """Writes the message for a setting in a section that is null, which only a file can fill; None if there is none."""
    for name in (text.lstrip("+~").partition("=")[0] for text in overrides):
        group, section = [*name.split("."), ""][:2]
        files = sorted((program.configs / group).glob("*.yaml"))
        if having := [f"{group}={path.stem}" for path in files if f"\n{section}:\n" in path.read_text()]:
            return (
                f"{name} cannot be set: {group}.{section} is null here. Also choose a configuration with this section, "
                f"{' or '.join(having)}, or write one in {shown_path(str(program.configs / group))}/."
            )
    return None


def _group_without_file(program: Program, overrides: Sequence[str]) -> str | None:
    """Writes the message for an override such as data=null, which names no file of its group; None if there is none."""
    for name, value in (text.lstrip("+~").split("=", 1) for text in overrides if "=" in text):
        files = sorted(path.stem for path in (program.configs / name).glob("*.yaml"))
        if files and value not in files and "." not in name:
            return f"{name}={value} names no file of {name}/. Choose one: {name}=<{', '.join(files)}>."
    return None


def _missing_config(program: Program, error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    if choice == UNNAMED:
        return f"name a run: --config-name=<file in configs/>. `{program.command} --help` lists them."
    if "submitit" in choice:
        return f"{group} is {choice}, which needs hydra-submitit-launcher: pip install -e '.[slurm]'"
    if group and (options := list(error.options or [])):
        return f"{group} is {choice}; choose one of {', '.join(options)}.{did_you_mean(choice, options)}"
    near = did_you_mean(choice, [path.stem for path in program.configs.glob("*.yaml")])
    return (
        f"--config-name is {choice}, and {shown_path(str(program.configs))}/ has no {choice}.yaml.{near} "
        f"`{program.command} --help` lists the configurations."
    )


def wrong_setting(schema: type, error: OmegaConfBaseException, prefix: str = "", overrides: Sequence[str] = ()) -> str:
    """Writes the message for a setting that OmegaConf rejects. `prefix` is the section of `schema`, with a dot."""
    name, reason = f"{prefix}{error.full_key}", first_line(error)
    try:
        kind = kind_of(schema, re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or "")).strip("."), prefix)
    except UnknownSetting as unknown:
        return str(unknown)
    if kind is Any or is_section(kind) or "not in struct" in reason or "nterpolation" in reason:
        return f"{name}: {reason}. Correct its value, or add an entry with a plus: +{name}=<value>."
    given = (text.partition("=")[2] for text in overrides if text.lstrip("+").startswith(f"{name}="))
    value = next(given, None) if error.value is None else error.value
    return f"{name}{f': {reason}' if value is None else f' is {value}'}; it must be {words_for(kind)}."
