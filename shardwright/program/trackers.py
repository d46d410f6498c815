"""Sends the metrics of a run to experiment trackers: TensorBoard, Weights & Biases, ClearML.

metrics.jsonl remains the record of a run; trackers get the same numbers by the same names. A
tracker is imported only if a run uses it. Its own environment variables choose where it stores
runs, such as a server.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import queue
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shardlib.parsing import OWN, named
from shardwright.data.checks import check_choice
from shardwright.data.untrusted import read_object
from shardwright.program.best_effort import best_effort
from shardwright.program.differences import flat
from shardwright.program.files import write_whole
from shardwright.settings.output import say
from shardwright.settings.program import has_package

FILE = "trackers.json"
"""File in a run's directory with the run's id in each tracker, by which a resumed run continues its
record there."""
TIMEOUT_S = 60.0
"""Longest time, in seconds, that a run waits for each tracker at its start and at its end."""


@dataclasses.dataclass
class TrackersConfig:
    """Settings of experiment trackers (docs/report.md)."""

    names: list[str] = dataclasses.field(default_factory=list)
    """Trackers to send metrics to: any of tensorboard, wandb, clearml, and module:function of your
    own."""
    project: str = "shardwright"
    """Project, or experiment, of the run in the trackers."""


def check_trackers(c: TrackersConfig) -> None:
    """Raises ValueError for an unknown tracker."""
    for name in c.names:
        if not OWN.fullmatch(name):
            # which is imported where the run starts: a configuration may be a stranger's
            check_choice("trackers.names", name, tuple(TRACKERS))


class Facts(NamedTuple):
    """Facts about a run that a tracker gets before its first step, when `start` steps are done.

    `settings` have dotted names. `known` is the run's id in the tracker, if it was there before.
    """

    name: str
    directory: Path
    project: str
    start: int
    settings: dict[str, Any]
    known: str | None


class Opened(NamedTuple):
    """A run opened in a tracker: its id, a function to log numbers by name at a step, and one to
    close it.
    """

    id: str
    log: Callable[[dict[str, float], int], Any]
    close: Callable[[], Any]


# ---- the trackers --------------------------------------------------------------------------------


def _tensorboard(tensorboardx: Any, run: Facts) -> Opened:
    # Next to plugins/profile, so that TensorBoard shows both. purge_step hides what a killed run
    # logged after start.
    suffix = f".{run.start}"  # or two starts within a second would share a file
    writer = tensorboardx.SummaryWriter(
        str(run.directory), purge_step=run.start + 1 if run.start else None, filename_suffix=suffix
    )
    writer.add_text(
        "settings", "\n".join(f"    {name}: {value}" for name, value in run.settings.items())
    )
    # no warning per NaN: the run reports them
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Opened(str(run.directory), log, writer.close)


def _wandb(wandb: Any, run: Facts) -> Opened:
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False):
        mode = "offline"
        files = f"{shlex.quote(str(run.directory))}/wandb/offline-*"
        say(f"tracker    wandb: not logged in, so it writes files; upload: wandb sync {files}")
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
    # W&B's step counter cannot go back when a resumed run repeats steps, so the step is logged as a
    # metric.
    opened.define_metric("*", step_metric="step")
    return Opened(
        opened.id, lambda values, step: opened.log({"step": step} | values), opened.finish
    )


def _clearml(clearml: Any, run: Facts) -> Opened:
    # Otherwise ClearML forks this process, which hangs because of JAX's threads.
    overrides = {"sdk": {"development": {"report_use_subprocess": False}}}
    importlib.import_module("clearml.config").config_obj.set_overrides(overrides)
    # or ClearML would scan all source, including the tests, for packages
    clearml.Task.force_requirements_env_freeze()
    task = clearml.Task.init(
        project_name=run.project,
        task_name=run.name,
        continue_last_task=run.known or False,
        reuse_last_task_id=False,
        auto_connect_arg_parser=False,
        auto_connect_frameworks=False,
        auto_connect_streams=False,
        auto_resource_monitoring=False,
    )
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in run.settings.items()
    }
    task.connect(texts, name="settings")
    # or ClearML would add its last step to the steps of a resumed run
    task.set_initial_iteration(0)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):  # ClearML would show others as 0
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
"""Maps a name in trackers.names to the package to import and install, and a function of package and
Facts that opens a run."""


def tracker_of(name: str) -> tuple[str, Callable[[Any, Facts], Opened]]:
    """Returns a tracker's package and the function that opens a run, from TRACKERS or the user's
    module:function.
    """
    return (
        TRACKERS[name]
        if name in TRACKERS
        else (name.partition(":")[0], named("tracker", name, {}, "package, run"))
    )


def check_installed(c: TrackersConfig) -> None:
    """Raises ValueError for a tracker that is not installed, or a function that is not there."""
    for which in c.names:
        package, _ = tracker_of(which)
        if not has_package(package):
            raise ValueError(
                f"trackers.names has {which}, which is not installed. Run: pip install {package}"
            )


# ---- sending -------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracked(
    c: TrackersConfig, directory: Path, name: str, start: int, settings: Mapping[str, Any]
) -> Iterator[Callable]:
    """Opens the trackers of a run for the context, on process 0.

    Yields a function that sends lines of metrics.

    It takes a line of metrics.jsonl as a dict, may be called from any thread, and does not block,
    because each tracker has its own thread. If a tracker fails, a warning is printed and training
    continues without it.

    Args:
        c: which trackers to use.
        directory: the run's directory.
        name: the run's name.
        start: number of steps done before this start.
        settings: all settings of the run, as nested dicts.
    """
    followed: list[_Followed] = []
    if jax.process_index() == 0 and c.names:
        known = _known(directory / FILE)
        for which in dict.fromkeys(c.names):
            facts = Facts(name, directory, c.project, start, flat(dict(settings)), known.get(which))
            followed.append(_Followed(which, facts))
            # Python 3.11 parses source in one thread at a time: verification could fail while a
            # tracker imports.
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
                    each.thread.name,
                    f"it did not finish within {TIMEOUT_S:g} s; its last lines may be lost",
                )


class _Followed:
    """Opens a tracker and sends it lines, in its own thread, until a line is None."""

    def __init__(self, name: str, facts: Facts):
        self.id = None
        self.opened = threading.Event()
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=[name, facts], name=name, daemon=True)
        self.thread.start()

    def _run(self, name: str, facts: Facts) -> None:
        try:
            package, open_run = tracker_of(name)
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
    say(
        f"WARNING: the tracker {name} failed: {why}. Training continues; metrics.jsonl has all "
        "metrics."
    )


def numbers(record: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Extracts the step and the numbers, by name, from a line of metrics.jsonl, such as
    `validation/loss` of an event.

    `/` also joins the names of nested entries: key of a dict, index in a list, or `name` of a dict
    in a list. The strings for NaN and the infinities become floats; other texts are dropped.
    """
    event = record.get("event")
    found: dict[str, float] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                add(
                    f"{name}/{item['name'] if isinstance(item, Mapping) and 'name' in item else i}",
                    item,
                )
        elif isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
            found[name] = float(value)

    for name, value in record.items():
        if name not in ("step", "event", "unix_time"):
            add(f"{event}/{name}" if event else name, value)
    return record["step"], found


def _known(path: Path) -> dict[str, str]:
    """Reads the run's id in each tracker, which an earlier start saved; {} if there are none."""
    try:
        return read_object(path, {str: str}, 2**16) if path.exists() else {}
    except (OSError, ValueError) as error:
        say(f"WARNING: {path} cannot be read: {error}. The trackers start new runs.")
        return {}
