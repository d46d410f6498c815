"""A run that is stopped, killed, moved, changed and damaged has the losses, tokens and batches of
one that was not.

The program is of integers (tests/support/exact_step.py), so numpy says what each step's loss is, to
the bit.
"""

import copy
import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as some
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import TokenBatch
from shardwright.data.loader.order import permute
from shardwright.run import export, run
from shardwright.run.listeners import checkpoints
from tests.support import exact_step, tiny
from tests.support.crashes import Crashed, Disk

FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Memory, where syncing takes no time."""
MESHES = ("one device", "d=4 t=2", "r=2 d=2 t=2")
TOKENS, DOCUMENT = 1_610, 10
"""Sequences are none of them whole at the end, and an epoch ends within the run."""
CHANGES = [{"training.batch_size": 16, "training.microbatches": 2, "optimizer.learning_rate": 1e-3}]
CHANGES += [{"training.seq_len": 32}, {"training.batch_size": 8, "training.seq_len": 16}]


def token_at(places):
    return (places * 40503 >> 4) % 61


def batches(c, steps: int):
    """The batch and the learning rate of each step, sliced out of the dataset: after a change from
    where it was.
    """
    t = c.training
    now = {"batch_size": t.batch_size, "seq_len": t.seq_len}
    now["learning_rate"] = c.optimizer.learning_rate
    epoch, number = 0, 0  # of the next sequence
    for step in range(steps):
        before = now["seq_len"]
        for change in t.changes:
            if change["step"] == step:
                now |= {name.partition(".")[2]: x for name, x in change.items()}
        length = now["seq_len"]
        whole = TOKENS // length
        number = min(-(-number * before // length), whole)
        epochs, index = np.divmod(np.arange(number, number + now["batch_size"]), whole)
        if c.data.shuffle:
            index = permute(index, whole, c.data.seed, epoch + epochs)
        passed, number = divmod(number + now["batch_size"], whole)
        epoch += passed
        places = index[:, None] * length + np.arange(length)
        tokens, starts = token_at(places).astype(np.uint32), places % DOCUMENT == 0
        yield TokenBatch(tokens, starts, np.ones(places.shape, bool)), now["learning_rate"]


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in directory.glob("checkpoints/[0-9]*/zarr.json"))


def make_export(module, run, output, *_, **options):
    Path(output.partition("=")[2].strip('"')).mkdir(parents=True)


meshes = some.sampled_from(MESHES)
more_steps = some.integers(1, 5)
moments = some.one_of(
    some.tuples(some.integers(1, most), some.just(on))
    for on, most in [("", 250), ("metrics", 12), ("zarr.json", 30)]
)
"""When the disk fails: after how many operations on what."""
indices = some.integers(0, 10**6)
"""Which of what there is, modulo how many there are.

Files are written by threads, so what there is can differ when hypothesis repeats an example: draws
must not depend on it.
"""


class Machine(RuleBasedStateMachine):
    """A run, and what may befall it."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(checkpoints, "AGAIN_S", 0.0)
        self.patch.setattr(export, "run_beside", make_export)
        self.patch.setattr(run, "save_config", lambda *_: None)  # it takes longer than all else
        exact_step.use(self.patch)
        self.scratch = Path(tempfile.mkdtemp(dir=FAST))
        self.directory = self.scratch / "run"

    def teardown(self):
        self.patch.undo()
        shutil.rmtree(self.scratch)

    @initialize(
        shuffle=some.booleans(),
        interval=some.integers(1, 3),
        keep=some.sampled_from([None, 1, 2]),
        exports_each=some.sampled_from([None, 2, 3]),
    )
    def begin(self, shuffle, interval, keep, exports_each):
        intervals = {"checkpoint_interval": interval, "export_interval": exports_each}
        intervals["keep_checkpoints"] = keep
        c = tiny.config(tiny.model(layers=2), eval_batches=0, seed=5, **intervals)
        c.paths.model_name = "run"
        c.data.filespec, c.data.shuffle = str(self.scratch / "data.zarr"), shuffle
        with Writer(c.data.filespec, "train") as writer:
            writer.append(
                token_at(np.arange(TOKENS)).astype(np.uint32), np.full(TOKENS // DOCUMENT, DOCUMENT)
            )
        self.c = self.logged = c
        self.disk = Disk(self.directory, self.patch)
        self.damaged: set[int] = set()
        self.resumed_from: dict[int, int | None] = {}

    # ---- what is there ---------------------------------------------------------------------------

    @property
    def whole(self) -> list[int]:
        """The checkpoints that nothing damaged."""
        return [step for step in steps_in(self.directory) if step not in self.damaged]

    def lines(self) -> list[dict]:
        path = self.directory / "metrics.jsonl"
        text = path.read_text() if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def check(self) -> int:
        """Each step that was logged, was logged once, with the loss and tokens of a run that
        nothing befell.
        """
        done = [line for line in self.lines() if "event" not in line]
        given = [*batches(self.logged, len(done))]
        assert [x["step"] for x in done] == [*range(1, len(done) + 1)]
        assert [x["loss"] for x in done] == [*exact_step.expected(self.c.training.seed, given)]
        sizes = [batch.targets.size for batch, _ in given]
        assert [x["tokens"] for x in done] == np.cumsum(sizes).tolist()
        assert len(done) >= max(steps_in(self.directory), default=0), (
            "a checkpoint has the metrics of its steps"
        )
        return len(done)

    def due(self, last, interval):
        return {*range(0, last, interval)} if interval is not None else set()

    # ---- what befalls it -------------------------------------------------------------------------

    def start(self, more, mesh, error=None, moment=(), stop=None):
        """Starts the run, for so many steps more than it resumes from.

        Returns the error that ended it.
        """
        saved, damaged, c = steps_in(self.directory), self.damaged, copy.deepcopy(self.c)
        first, wanted = max(self.whole, default=0), c.training.resume_step
        if wanted is not None and self.resumed_from.get(first) != wanted:
            first = wanted
        c.training.steps = first + more
        exact_step.Bare.began.clear()
        self.patch.setattr(exact_step.Stopping, "at", None if stop is None else first + stop)
        self.disk.fail(error, *moment)
        raised = ended = None
        try:
            ended = exact_step.train_on(mesh, c, self.directory)
        except (Crashed, OSError) as caught:
            raised = caught
        self.disk.fail(None)
        now = steps_in(self.directory)
        self.damaged = self.damaged & {*now}
        self.resumed_from |= {step: wanted for step in now if step > first or step not in saved}
        if began := exact_step.Bare.began:
            assert began[0] == first, "it resumes from the newest whole checkpoint"
            events = [x for x in self.lines() if x.get("event") == "damaged_checkpoint"]
            told = {line["damaged_step"] for line in events}
            is_told = wanted is None and not isinstance(error, Crashed)
            assert not is_told or told >= {step for step in damaged if step > first}
            self.logged = c
            self.damaged = {step for step in self.damaged if step <= first}  # others are set aside
        if raised is None:
            last = first + (more if stop is None else min(stop + 1, more))
            stopped = None if stop is None or stop >= more else "SIGTERM"
            assert ended == stopped or last == first + more, (
                "after the last step a signal only stops exports"
            )
            assert self.check() == last
            changed = {change["step"] for change in c.training.changes}
            ends = {last, *(step for step in changed if step < last)}
            exported = ends | self.due(last, c.training.export_interval)
            due = exported | self.due(last, c.training.checkpoint_interval)
            saves = {step for step in due if step > first} | {x for x in saved if x <= first}
            if c.training.export_interval and error is None and ended is None:
                made = {int(path.name) for path in self.directory.glob("exports/[0-9]*")}
                assert made >= exported & {*now}, "each export is made once its checkpoint is there"
            assert last in now
            assert {*now} <= saves
            # exports hold some
            is_exact = error is None and (ended is None or c.training.export_interval is None)
            assert not is_exact or now == sorted(saves)[-(c.training.keep_checkpoints or 0) :]
        else:
            self.check()
        return raised

    @rule(more=more_steps, mesh=meshes, stop=some.none() | some.integers(0, 4))
    def trains(self, more, mesh, stop):
        assert self.start(more, mesh, stop=stop) is None

    @rule(more=more_steps, mesh=meshes, moment=moments, power=some.booleans())
    def crashes(self, more, mesh, moment, power):
        self.start(more, mesh, Crashed("crashed"), moment)
        committed = self.disk.committed[-1:]
        if power:
            self.disk.lose_power()
            self.check()
        assert all((path / "zarr.json").exists() for path in committed), (
            "a complete checkpoint stays"
        )

    @rule(more=more_steps, mesh=meshes, moment=moments)
    def cannot_write(self, more, mesh, moment):
        raised = self.start(more, mesh, OSError(errno.ENOSPC, "No space left on device"), moment)
        assert raised is None or not self.disk.failed.startswith("write 0"), (
            "an unsaved checkpoint ends no run"
        )

    @rule(which=indices, after=some.integers(0, 3))
    def changes_settings(self, which, after):
        if len(self.c.training.changes) == 3:
            return
        begun = [change["step"] for change in self.c.training.changes]
        step = max([1, *(x + 1 for x in begun), max(steps_in(self.directory), default=0) + after])
        self.c = copy.deepcopy(self.c)
        self.c.training.changes.append({"step": step, **CHANGES[which % len(CHANGES)]})

    @rule(
        which=indices,
        which_file=indices,
        which_byte=indices,
        how=some.sampled_from(["flip", "cut", "grow", "remove", "older", "other", "no manifest"]),
    )
    def damages(self, which, which_file, which_byte, how):
        if len(self.whole) < 2:
            return
        oldest, *later = self.whole
        step = later[which % len(later)]
        directory = self.directory / f"checkpoints/{step:010}"
        if how == "no manifest":  # as one that is removed: it is a leftover
            (directory / "zarr.json").unlink()
            return
        files = [path for path in directory.glob("**/c/**/*") if path.is_file()]
        paths = sorted([*files, *([] if how == "remove" else [directory / "zarr.json"])])
        path = paths[which_file % len(paths)]
        content = bytearray(path.read_bytes())
        older = self.directory / f"checkpoints/{oldest:010}" / path.relative_to(directory)
        half = len(content) // 2
        at = half + which_byte % (len(content) - 2 - half)
        if how == "remove":
            path.unlink()
        else:
            content[at] ^= 1
            text = {"flip": content, "cut": content[:at], "grow": content + b"x"}
            text["older"] = older.read_bytes()
            text["other"] = next(x for x in files if x != path).read_bytes()
            path.write_bytes(text[how])
        self.damaged.add(step)

    @rule(which=indices, more=more_steps, mesh=meshes, again=some.booleans())
    def goes_back(self, which, more, mesh, again):
        if not self.whole:
            return
        self.c = copy.deepcopy(self.c)
        self.c.training.resume_step = self.whole[which % len(self.whole)]
        for _ in range(1 + again):
            assert self.start(more, mesh) is None
        self.c.training.resume_step = None


@pytest.mark.long
def test_whatever_befalls_a_run_it_ends_as_if_nothing_had():
    options = {"deadline": None, "database": None, "derandomize": True}
    options["phases"] = [hypothesis.Phase.generate]
    settings = hypothesis.settings(max_examples=25, stateful_step_count=8, **options)
    run_state_machine_as_test(Machine, settings=settings)
