"""Where the processes of a run are, and whether one of them is dead, has failed or has stalled."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

# What fails in one process fails in the others too, mostly: within so many seconds each shows its own error.
_GRACE_S = 3.0


class Limits(NamedTuple):
    """Seconds, each more than 0."""

    heartbeat: float
    """A process that is not heard of for so long is dead, or stopped."""
    stall: float
    """A process that stays so long at one place of a step has stalled."""
    pause: float
    """The same, where it may take longer: start, compilation, first step, checkpoints, validation."""


class Place(NamedTuple):
    """Where the main thread of a process is."""

    marks: int = 0
    """Places it came to before. All processes come to the same places in the same order, so fewer are behind."""
    what: str = "starting"
    step: int | None = None
    paused: bool = True
    """Whether Limits.pause holds here."""

    def __str__(self) -> str:
        return self.what if self.step is None else f"{self.what}, at step {self.step}"


@dataclasses.dataclass
class Peer:
    """What is known of a process. Times are those of time.monotonic()."""

    id: int
    host: str
    heard: float
    moved: float
    """When it came to its place."""
    place: Place = dataclasses.field(default_factory=Place)
    lost: bool = False
    """Its connection broke off."""
    done: bool = False
    failed: str | None = None
    """The exception that it ended with."""
    failed_at: float = math.inf
    by_runtime: bool = False
    """That is an exception of JAX's runtime, as a collective raises when another process dies."""

    def __str__(self) -> str:
        return f"process {self.id} on {self.host}"


def culprits(peers: Sequence[Peer], now: float, limits: Limits) -> tuple[list[int], str] | None:
    """The processes because of which the others have to end, and what is wrong with them; None if all is well."""
    running = [peer for peer in peers if not peer.done]
    for peer in running:
        if peer.lost and peer.failed is None:
            return [peer.id], (
                f"{peer} is gone: it was killed, or it crashed ({peer.place}, when last heard of). Its own output may "
                "say why."
            )
        if peer.failed is None and now - peer.heard > limits.heartbeat:
            return [peer.id], (
                f"{peer} is silent for {now - peer.heard:.0f} s ({peer.place}, when last heard of): it was stopped, or "
                f"its host or network is gone. The limit is distributed.heartbeat_timeout={limits.heartbeat:g}."
            )
    failed = sorted((peer for peer in running if peer.failed is not None), key=lambda peer: peer.failed_at)
    if failed and len(failed) < len(peers):
        own = [peer for peer in failed if not peer.by_runtime]
        # An error of the runtime is mostly the consequence of another process's end, which may be heard of later.
        first, patience = (own[0], _GRACE_S) if own else (failed[0], limits.heartbeat + _GRACE_S)
        if now - first.failed_at > patience or len(failed) == len(running):
            return [first.id], f"{first} failed ({first.place}): {first.failed}"
    waiting = [peer for peer in running if peer.failed is None]
    least = min((peer.place.marks for peer in waiting), default=0)
    behind = [peer for peer in waiting if peer.place.marks == least]
    limit = lambda peer: limits.pause if peer.place.paused else limits.stall
    stalled = [peer for peer in behind if now - peer.moved > limit(peer)]
    if not stalled or failed:
        return None
    first = stalled[0]
    setting = "pause_timeout" if first.place.paused else "stall_timeout"
    rule = f"The limit is distributed.{setting}={limit(first):g}."
    if len(behind) == len(running) > 1:
        return [peer.id for peer in stalled], (
            f"all {len(behind)} processes have stalled ({first.place}), none behind the others: their devices or the "
            f"network hang, or they wait for something that all need. {rule}"
        )
    names = ", ".join(map(str, stalled))
    return [peer.id for peer in stalled], (
        f"{names} stalled for {now - first.moved:.0f} s ({first.place}), while the others went on and now wait. {rule}"
    )


_place = Place()
"""A process has one main thread, and so one place."""


def restart() -> None:
    """Begins to count places anew, as each run does."""
    global _place
    _place = Place()


def place() -> Place:
    """Where the main thread is."""
    return _place


def mark(what: str, step: int | None = None, *, paused: bool = False) -> None:
    """Says that the main thread has come to a place. Every process of the run makes the same calls in the same order.

    Args:
        what: where, in words.
        step: index of the step, counted from 0; None: the same as before.
        paused: whether this may take longer than a step: Limits.pause instead of Limits.stall.
    """
    global _place
    _place = Place(_place.marks + 1, what, _place.step if step is None else step, paused)


@contextlib.contextmanager
def pause(what: str) -> Iterator[None]:
    """Marks `what` as a place that may take longer than a step, and afterwards the place before it again."""
    before = _place
    mark(what, paused=True)
    yield
    mark(before.what, paused=before.paused)


def watched_batches(batches: Iterator[T], start: int) -> Iterator[T]:
    """The same batches, of the steps from `start`; asking for one and getting it are marked.

    The first step may take longer, since devices and networks are set up in it.
    """
    for step in itertools.count(start):
        mark("waiting for a batch", step, paused=step == start)
        try:
            batch = next(batches)
        except StopIteration:
            return
        mark("in the training step", paused=step == start)
        yield batch
