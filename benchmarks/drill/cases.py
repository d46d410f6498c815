"""Cases of the drill, what came of them, and how one is repeated alone."""

import dataclasses
import random
from collections.abc import Callable, Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of a case.

    Attributes:
        what: the faults that were planted, in words.
        wrong: each broken promise, in words; empty if all were kept.
        faults: number of faults that were planted.
        outcomes: how the faults ended, for the counts of the table.
    """

    what: str
    wrong: tuple[str, ...] = ()
    faults: int = 1
    outcomes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Field:
    """Where the cases of one kind take place.

    Attributes:
        kind: name of the kind of fault.
        seed: of all that is drawn.
        count: number of faults that are asked for.
        scratch: directory of this kind, which is removed afterwards.
    """

    kind: str
    seed: int
    count: int
    scratch: Path

    def random(self, case: int) -> random.Random:
        """Generator of the case, the same each time."""
        return random.Random(f"{self.seed} {self.kind} {case}")

    def directory(self, name: str) -> Path:
        """A new directory of the case or start with this name."""
        path = self.scratch / name
        path.mkdir(parents=True)
        return path

    def repetition(self, case: int) -> str:
        """The command that repeats a case alone."""
        return f"python -m benchmarks.drill --only {self.kind} --count {self.count} --seed {self.seed} --case {case}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: as in --only.
        short: number of faults without --full.
        full: number of faults with --full.
        checked: the promise, as the table says it.
        cases: gives the number of cases that together have so many faults.
        play: plants the faults of a case and checks what became of them.
        missing: gives the reason why the kind cannot be played here, or None.
    """

    name: str
    short: int
    full: int
    checked: str
    play: Callable[[Field, int], Finding]
    cases: Callable[[int], int] = lambda count: count
    missing: Callable[[], str | None] = lambda: None


def selection(of: int, count: int) -> Iterable[int]:
    """`count` of the numbers below `of`, spread evenly."""
    return [i * of // count for i in range(min(count, of))]
