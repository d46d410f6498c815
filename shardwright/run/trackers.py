"""Experiment trackers: copies of the metrics of a run for TensorBoard, Weights & Biases, ClearML.

metrics.jsonl stays the record of a run. A tracker gets the same numbers, by the same names. It is imported only where
a run uses it, and where it is kept is its own default: its environment variables choose another place or a server.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import queue
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from hydra.core.hydra_config import HydraConfig

from shardwright.run.best_effort import best_effort
from shardwright.run.files import write_whole
from shardwright.settings.differences import flat
from shardwright.settings.words import say
from shardwright_data.checks import check_choice
from shardwright_data.untrusted import read_object

FILE = "trackers.json"
"""File in a run's directory with the name of the run in each tracker, by which a resumed run goes on there."""
TIMEOUT_S = 60.0
"""Time that a run waits at its start and at its end for its trackers."""
_SETTINGS = "settings"
"""Section of a task of ClearML with the settings of the run, and the name of what they were before edits."""


@dataclasses.dataclass
class TrackersConfig:
    """Settings of experiment trackers (docs/trackers.md)."""

    names: list[str] = dataclasses.field(default_factory=list)
    """Trackers that get the metrics: any of tensorboard, wandb, clearml."""
    project: str = "shardwright"
    """Project, or experiment, of the run in the trackers."""
    queue: str | None = None
    """Queue of ClearML, in which the run is put in place of running here; an agent of ClearML runs it. Needs clearml
    among the names."""


def check_trackers(c: TrackersConfig) -> None:
    """Raises ValueError for an unknown tracker, or a queue without ClearML."""
    for name in c.names:
        check_choice("trackers.names", name, tuple(TRACKERS))
    if c.queue is not None and "clearml" not in c.names:
        raise ValueError(
            f"trackers.queue is {c.queue!r}, a queue of ClearML, but trackers.names is {c.names}. Add clearml to it."
        )


class Facts(NamedTuple):
    """What a tracker is told of a run before its first step, which is step `start`.

    `settings` are by dotted names. `known` is the name of the run in the tracker, if it was there before.
    """

    name: str
    directory: Path
    project: str
    start: int
    settings: dict[str, Any]
    known: str | None


class Opened(NamedTuple):
    """A run in a tracker: its name there, and functions that take numbers by name and their step, and that close it."""

    id: str
    log: Callable[[dict[str, float], int], Any]
    close: Callable[[], Any]


# ---- the trackers -----------------------------------------------------------------------------------------------


def _tensorboard(tensorboardx: Any, run: Facts) -> Opened:
    # Beside plugins/profile, so that TensorBoard shows both. purge_step hides what a killed run had after the start.
    suffix = f".{run.start}"  # two starts within a second would have one file
    writer = tensorboardx.SummaryWriter(str(run.directory), purge_step=run.start or None, filename_suffix=suffix)
    writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in run.settings.items()))
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # it warns of each NaN, which the run tells

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Opened(str(run.directory), log, writer.close)


def _wandb(wandb: Any, run: Facts) -> Opened:
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False):
        mode = "offline"
        say(f"tracker    wandb: no login here, so it writes files: wandb sync {run.directory}/wandb/offline-*")
    opened = wandb.init(
        mode=mode,
        project=run.project,
        name=run.name,
        id=run.known,
        resume="allow",
        dir=str(run.directory),
        config=run.settings,
        reinit="create_new",  # a sweep has several runs in one process
        settings=wandb.Settings(console="off", silent=True, login_timeout=30),
    )
    # Its own counter of steps only grows; a step that a resumed run repeats has a step of its own.
    opened.define_metric("*", step_metric="step")
    return Opened(opened.id, lambda values, step: opened.log({"step": step} | values), opened.finish)


def _clearml(clearml: object, run: Facts) -> Opened:
    task = _clearml_task(clearml, run.project, run.name, run.known, run.settings)
    task.set_initial_iteration(0)  # or the steps of a resumed run would be counted behind its last one

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):  # ClearML would show 0
                task.get_logger().report_scalar(title, series or title, value, step)

    def close() -> None:
        task.flush(wait_for_uploads=True)
        task.close()

    return Opened(task.id, log, close)


TRACKERS = {
    "tensorboard": ("tensorboardX", _tensorboard),
    "wandb": ("wandb", _wandb),
    "clearml": ("clearml", _clearml),
}
"""By their names in trackers.names: the package to import and to install, and a function of the package and Facts that
opens a run."""


# ---- the queue of ClearML ---------------------------------------------------------------------------------------


def _clearml_task(clearml: Any, project: str, name: str, known: str | None, settings: Mapping[str, Any]) -> Any:
    # Or ClearML forks this process, in which JAX has threads, and hangs.
    overrides = {"sdk": {"development": {"report_use_subprocess": False}}}
    importlib.import_module("clearml.config").config_obj.set_overrides(overrides)
    if task := clearml.Task.current_task():
        return task
    clearml.Task.force_requirements_env_freeze()  # or ClearML would read all source, and name packages of the tests
    task = clearml.Task.init(
        project_name=project,
        task_name=name,
        continue_last_task=known or False,
        reuse_last_task_id=False,
        auto_connect_arg_parser=False,
        auto_connect_frameworks=False,
        auto_connect_streams=False,
        auto_resource_monitoring=False,
    )
    if clearml.Task.running_locally():  # what an agent runs has them, as its user left them
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
        task.connect(texts, name=_SETTINGS)
        task.set_configuration_object(_SETTINGS, config_text=json.dumps(texts, indent=1))
        task.set_packages(_packages())  # which waits for what ClearML finds of the source by itself
        if HydraConfig.initialized():  # of `-m train` it finds train.py, without arguments
            task.set_script(entry_point=shlex.join(_command()))
    return task


def _packages() -> list[str]:
    """The installed packages with their versions, but those that came from a directory, as this project does."""
    found = list(importlib.metadata.distributions())  # such a package has an egg-info in its directory, too
    local = {x.name for x in found if x.read_text("direct_url.json") is not None}
    return sorted({f"{x.name}=={x.version}" for x in found if x.name not in local})


def _command() -> list[str]:
    """Arguments of Python that start this run, or this job of a sweep."""
    hydra = HydraConfig.get()
    flags = [text for text in sys.argv[1:] if text.startswith(("--config-dir=", "--config-path="))]
    return ["-m", "train", *flags, f"--config-name={hydra.job.config_name}", *hydra.overrides.task]


def with_edits(arguments: list[str]) -> list[str]:
    """A command line, with the settings that were edited in the task of ClearML that this process runs, if it does."""
    if not os.environ.get("CLEARML_TASK_ID"):
        return arguments
    task = importlib.import_module("clearml").Task.get_task(task_id=os.environ["CLEARML_TASK_ID"])
    before = json.loads(task.get_configuration_object(_SETTINGS) or "null")
    if before is None:  # a task of something else
        return arguments
    section = f"{_SETTINGS}/"
    found = {key[len(section) :]: x for key, x in task.get_parameters().items() if key.startswith(section)}
    edits = {key: value for key, value in found.items() if before.get(key) != value}
    kept = [text for text in arguments if text.partition("=")[0].lstrip("+") not in edits]
    # A setting may be one that the command line had added, with a plus.
    return kept + [f"{'++' if key in before else ''}{key}={value}" for key, value in edits.items()]


def check_or_enqueue(c: TrackersConfig, name: str, settings: Mapping[str, Any]) -> None:
    """Puts the program into trackers.queue, and ends it. An agent's run of the program goes on here.

    Args:
        c: which trackers and queue.
        name: of the run.
        settings: all settings of the run, as nested dicts.

    Raises:
        ValueError: a tracker is not installed.
    """
    for which in c.names:
        package, _ = TRACKERS[which]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"trackers.names has {which}, whose package is not installed: pip install {package}")
    if c.queue is not None:
        clearml = importlib.import_module("clearml")
        task = _clearml_task(clearml, c.project, name, None, flat(dict(settings)))
        task.execute_remotely(queue_name=c.queue)


# ---- sending ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracked(
    c: TrackersConfig, directory: Path, name: str, start: int, settings: Mapping[str, Any]
) -> Iterator[Callable]:
    """Opens the trackers of a run until the context ends, on process 0. Gives the function that takes lines of metrics.

    It takes each line of metrics.jsonl as a dict, from any thread, and waits for nothing: each tracker has a thread of
    its own. One that fails is told in a line, and left; training goes on.

    Args:
        c: which trackers.
        directory: of the run.
        name: of the run.
        start: number of steps done before.
        settings: all settings of the run, as nested dicts.
    """
    followed: list[_Followed] = []
    if jax.process_index() == 0 and c.names:
        known = _known(directory / FILE)
        for which in dict.fromkeys(c.names):
            facts = Facts(name, directory, c.project, start, flat(dict(settings)), known.get(which))
            followed.append(_Followed(which, facts))
            # Python 3.11 parses source in one thread at a time: else the proof may fail by what a tracker imports.
            followed[-1].opened.wait(TIMEOUT_S)
            known |= {which: followed[-1].id} if followed[-1].id else {}
        with best_effort(str(directory / FILE)):
            write_whole(directory / FILE, json.dumps(known) + "\n")
    try:
        yield lambda record: [each.lines.put(record) for each in followed if each.thread.is_alive()]
    finally:
        for each in followed:
            each.lines.put(None)
        for each in followed:
            each.thread.join(TIMEOUT_S)
            if each.thread.is_alive():
                _leave(
                    each.thread.name, f"it was not done within {TIMEOUT_S:g} s of the end; its last lines may be lost"
                )


class _Followed:
    """A tracker, which is opened and gets lines in a thread of its own, until one of them is None."""

    def __init__(self, name: str, facts: Facts):
        self.id, self.opened = None, threading.Event()
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=[name, facts], name=name, daemon=True)
        self.thread.start()

    def _run(self, name: str, facts: Facts) -> None:
        package, open_run = TRACKERS[name]
        try:
            run = open_run(importlib.import_module(package), facts)
            self.id = run.id
            self.opened.set()
            try:
                for record in iter(self.lines.get, None):
                    step, values = numbers(record)
                    run.log(values, step)
            finally:
                run.close()
        except BaseException as error:  # SystemExit too: a tracker never stops a run
            _leave(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self.opened.set()


def _leave(name: str, why: str) -> None:
    say(f"WARNING: the tracker {name} is left: {why}. The run goes on, and metrics.jsonl has its metrics.")


def numbers(record: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step and the numbers of a line of metrics.jsonl, by name; numbers of an event as `event/name`.

    Entries of lists and dicts have names with `/`; a dict in a list has that of its entry `name`. What is not finite is
    NaN or an infinity. Texts are left out.
    """
    event = record.get("event")
    found: dict[str, float] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                add(f"{name}/{item['name'] if isinstance(item, Mapping) and 'name' in item else i}", item)
        elif isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
            found[name] = float(value)

    for name, value in record.items():
        if name not in ("step", "event"):
            add(f"{event}/{name}" if event else name, value)
    return record["step"], found


def _known(path: Path) -> dict[str, str]:
    """The names of a run in its trackers, which an earlier start kept."""
    try:
        return read_object(path, {str: str}, 2**16) if path.exists() else {}
    except (OSError, ValueError) as error:
        say(f"WARNING: {path} is not readable: {error}. The trackers begin new runs.")
        return {}
