"""Search for the fastest mesh, number of microbatches, schedule and saved values of a configuration that fit."""

import contextlib
import itertools
import math
import operator
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from shardlib.axes import AXES
from shardwright.cluster.chips import Chip
from shardwright.inspect.plan.plan import Plan
from shardwright.inspect.planning import SAVED, Change, Settings, mesh_sizes, planned_change
from shardwright.inspect.tables import in_bytes, in_seconds
from shardwright.run.config import Config

SCHEDULES = (("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("gpipe", 1))
"""Schedules of stages, each with a number of virtual stages."""
KEPT = 4
"""Number of the fastest settings that are varied."""
PATIENCE = 2
"""Numbers of stages, one after the other, that make no step faster before larger ones are left out."""
LONG = 16384
"""Tokens of a sequence from which on it is also cut, over c."""
_OF_STAGES = ("pipeline.schedule", "pipeline.virtual_stages")


def search(
    c: Config, devices: int, chip: Chip, seconds: float = 60.0, tell: Callable[[str], object] = lambda text: None
) -> list[Change]:
    """The settings that were planned and fit, the fastest first.

    Begins with the settings of the configuration, where its mesh is of so many devices, and a mesh for each number of
    stages p and size t, while more of them make the step faster. Then it varies the fastest, by one setting at a time,
    until all near the KEPT fastest are planned, or the time is over.

    Args:
        c: the configuration. Its batch and its model stay as they are.
        devices: number of devices.
        chip: their kind.
        seconds: of the processor, to search for at most.
        tell: gets a line after each plan: how many there are, and the best.

    Raises:
        ValueError: nothing that was planned fits.
    """
    plans = _Plans(c, devices, chip, tell)
    with contextlib.suppress(ValueError):  # its mesh may be of other devices
        plans.cost(_own_settings(c, mesh_sizes(c, devices)))
    plans.end = time.process_time() + seconds
    plans.try_meshes()
    plans.vary()
    if not (best := plans.ranked()):
        raise ValueError(f"no mesh of {devices} devices can be planned: {plans.refused}")
    if not best[0].plan.fits:
        raise ValueError(
            f"nothing fits on {devices} devices: {best[0]} needs least, {in_bytes(best[0].plan.step.peak)} of "
            f"{in_bytes(chip.memory_bytes)}. Take more devices, or a smaller training.batch_size."
        )
    return [change for change in best if change.plan.fits]


class _Plans:
    """What a search has planned, each of the settings once.

    Attributes:
        end: time of the processor after which nothing is planned.
        refused: why the last settings that cannot be planned are refused.
    """

    def __init__(self, c: Config, devices: int, chip: Chip, tell: Callable[[str], object]):
        self.end = math.inf
        self.refused = "none divides the sizes"
        self._c, self._devices, self._chip, self._tell = c, devices, chip, tell
        self._planned: dict[tuple, Change | None] = {}

    def ranked(self) -> list[Change]:
        """What was planned, the best first."""
        return sorted(filter(None, self._planned.values()), key=lambda change: self.cost(change.settings))

    def cost(self, settings: Settings) -> tuple[int, float]:
        """Sort key of plans: step time if the plan fits, otherwise peak memory."""
        if _key(settings) not in self._planned and time.process_time() < self.end:
            self._plan(settings)
        if (change := self._planned.get(_key(settings))) is None:
            return 2, 0.0
        return (0, change.plan.seconds) if change.plan.fits else (1, change.plan.step.peak)

    def _plan(self, settings: Settings) -> None:
        self._planned[_key(settings)] = None
        try:
            plan = planned_change(self._c, dict.fromkeys(AXES, 1), self._chip, settings)
            self._planned[_key(settings)] = Change(settings, plan)
            changes = self.ranked()
            best = changes[0]
            way = f"{in_seconds(best.plan.seconds)} a step with {named(self._c, best.settings)}"
            way = way if best.plan.fits else "does not fit yet"
            self._tell(f"{self._devices} x {self._chip.name}: {len(changes)} planned, best {way}")
        except ValueError as error:
            self.refused = str(error)

    def try_meshes(self) -> None:
        """Plans a mesh for each number of stages and size t, while more of them make the step faster."""
        best_of_p = []
        for p in _divisors(self._devices):
            of_t = []
            for settings in _seeds(self._c, self._devices, self._chip, p):
                of_t.append(self.cost(settings))
                if of_t[-1] > min(of_t):
                    break
            best_of_p += [min(of_t)] if of_t else []
            if len(best_of_p) > PATIENCE and min(best_of_p[-PATIENCE:]) > min(best_of_p):
                break

    def vary(self) -> None:
        """Plans all that differs by one setting from the KEPT fastest."""
        varied = set()
        while time.process_time() < self.end:
            todo = [x for x in self.ranked()[:KEPT] if _key(x.settings) not in varied]
            if not todo:
                return
            varied.add(_key(todo[0].settings))
            for settings in _varied(self._c, todo[0], self._chip):
                self.cost(settings)


def _key(settings: Settings) -> tuple:
    return tuple(settings.items())


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Context of searches that shows on stderr what they tell: a terminal's last line, or a line every 10 seconds."""
    console = Console(stderr=True, highlight=False, markup=False)
    last = time.monotonic()
    with console.status("planning") as status:

        def tell(text: str) -> None:
            nonlocal last
            if console.is_terminal:
                status.update(text[: console.width - 3])
            elif time.monotonic() - last > 10:
                last = time.monotonic()
                console.print(text, soft_wrap=True)

        yield tell


def changes_of(c: Config, settings: Settings) -> list[str]:
    """The settings that differ from those of the configuration, as on the command line."""
    return [f"{name}={'null' if x is None else x}" for name, x in settings.items() if operator.attrgetter(name)(c) != x]


def named(c: Config, settings: Settings) -> str:
    """The same in words."""
    return " ".join(changes_of(c, settings)) or "its own settings"


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _own_settings(c: Config, sizes: Mapping[str, int]) -> Settings:
    """The settings of the configuration that a search may change."""
    own = {f"mesh.{axis}": size for axis, size in sizes.items()}
    own |= {"training.microbatches": c.training.microbatches, "training.save": c.training.save}
    stages = (c.pipeline.schedule, c.pipeline.virtual_stages)
    return own | (dict(zip(_OF_STAGES, stages, strict=True)) if sizes["p"] > 1 else {})


def _seeds(c: Config, devices: int, chip: Chip, p: int) -> Iterator[Settings]:
    """For each size of t a mesh of p stages, whose d is of near devices where they are enough."""
    for t in (t for t in _divisors(devices // p) if t <= chip.near):
        rest = devices // (p * t)
        batch = c.training.batch_size
        d = max(d for d in _divisors(rest) if d * t <= chip.near)
        if parts := [m for m in _divisors(batch) if batch % (rest * m) == 0]:
            wanted = c.training.microbatches if p == 1 else 4 * p
            m = min(parts, key=lambda m: abs(math.log(m / wanted)))
            mesh = dict.fromkeys(AXES, 1) | {"p": p, "r": rest // d, "d": d, "t": t}
            yield from _with(c, mesh, m, c.training.save, SCHEDULES[0])


def _with(c: Config, mesh: Mapping[str, int], m: int, save: str, schedule: tuple[str, int]) -> Iterator[Settings]:
    """These settings, if they divide the sizes."""
    stages = mesh["p"] * schedule[1] if mesh["p"] > 1 else 1
    if c.model.layers % stages == 0 and c.training.batch_size % (mesh["r"] * mesh["d"] * mesh["e"] * m) == 0:
        settings = {f"mesh.{axis}": size for axis, size in mesh.items()}
        settings |= {"training.microbatches": m, "training.save": save}
        yield settings | (dict(zip(_OF_STAGES, schedule, strict=True)) if mesh["p"] > 1 else {})


def _varied(c: Config, change: Change, chip: Chip) -> Iterator[Settings]:
    """Settings that differ in one thing. More is kept only where memory is left, and less only where it is not."""
    settings, plan = change
    mesh = plan.step.mesh
    m = settings["training.microbatches"]
    save = settings["training.save"]
    schedule = tuple(settings.get(key, value) for key, value in zip(_OF_STAGES, SCHEDULES[0], strict=True))
    for n in (2, 3, 5):
        yield from _with(c, mesh, m * n, save, schedule)
        if m % n == 0:
            yield from _with(c, mesh, m // n, save, schedule)
        for a, b in itertools.permutations(_axes(c, mesh), 2):
            if mesh[a] % n == 0 and (b != "t" or mesh["t"] * n <= chip.near):
                yield from _with(c, {**mesh, a: mesh[a] // n, b: mesh[b] * n}, m, save, schedule)
    if chip.platform == "gpu":  # where a loop over layers copies what it keeps
        unroll = settings.get("training.unroll", c.training.unroll)
        yield from ({**settings, "training.unroll": n} for n in (1, None) if n != unroll)
    at = SAVED.index(save) if save in SAVED else 0
    for other in SAVED[:at] if 2 * plan.step.peak < chip.memory_bytes else SAVED[at + 1 :]:
        yield from _with(c, mesh, m, other, schedule)
    if mesh["p"] > 1:
        yield from (x for other in SCHEDULES if other != schedule for x in _with(c, mesh, m, save, other))


def _axes(c: Config, mesh: Mapping[str, int]) -> str:
    """Axes among which devices are moved: c only for long sequences, e only for experts, or where the mesh has them."""
    more = {"c": c.training.seq_len >= LONG, "e": hasattr(c.model, "experts")}
    return "prdt" + "".join(axis for axis, is_tried in more.items() if is_tried or mesh[axis] > 1)


def as_lines(c: Config, found: list[Change], count: int = 6) -> list[str]:
    """The best settings and the runners-up, as a table of at most 80 columns, and what limits the best."""
    lines = ["  a step    MFU     memory        cost  settings"]
    for settings, plan in found[:count]:
        cost = "unknown" if plan.dollars is None or not plan.steps else f"${plan.dollars:,.0f}"
        figures = f"{in_seconds(plan.seconds):>8} {plan.mfu:>6.1%} {in_bytes(plan.step.peak):>10} {cost:>11}  "
        lines += textwrap.wrap(
            named(c, settings), 80, initial_indent=figures, subsequent_indent=" " * len(figures),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return [*lines, "", f"Best: {limit_of(found[0].plan)}"]


def limit_of(plan: Plan) -> str:
    """What most of a step is spent on, in words."""
    words, share = next(iter(plan.limits.items()))
    return f"{share:.0%} of its step is {words}."


def as_config(name: str, overrides: list[str], groups: Path, settings: Settings) -> str:
    """A configuration like that of this name with these overrides, and with these settings.

    `groups`: the directory of the groups that an override may choose from.
    """
    given = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text and not text.startswith("~"))
    chosen = {key: value for key, value in given.items() if (groups / key).is_dir()}
    own = [f"{key}={value}" for key, value in ({**given, **settings}).items() if key not in chosen]
    defaults = [name, *({f"override /{key}": value} for key, value in chosen.items()), "_self_"]
    return OmegaConf.to_yaml(OmegaConf.merge({"defaults": defaults}, OmegaConf.from_dotlist(own)))
