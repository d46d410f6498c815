"""Targets of our step, and its ratios to the other contestants."""

import dataclasses

DEMO_GOAL, DEMO_PEAK = 4096 / 0.17, 430e9
"""Tokens/s of the demo on 8 simulated devices, where products reach these FLOP/s."""

MFU_MARKS = {"124m": 0.45, "540m": 0.55, "1b": 0.55, "2b": 0.60}
"""Full-attention MFU in bf16 on an H200."""


@dataclasses.dataclass
class Target:
    """A measured value and its goal."""

    name: str
    value: float
    goal: float
    """Least value that meets the target."""

    @property
    def met(self) -> bool:
        """The value reaches the goal."""
        return self.value >= self.goal

    def __str__(self) -> str:
        result = "met" if self.met else f"missed by {1 - self.value / self.goal:.0%}"
        return f"target  {self.name}: {self.value:.3g}, at least {self.goal:.3g}: {result}"


def targets(size: str, contestants: dict[str, dict], platform: str) -> list[Target]:
    """Targets of `ours` against the contestants that were measured."""
    ran = {label: its for label, its in contestants.items() if its["error"] is None}
    found: list[Target] = []
    if size == "tiny":
        return found

    def at_least(goal: float, peer: str, what: str = "tokens_per_s") -> None:
        if "ours" in ran and peer in ran:
            ratio = ran["ours"][what] / ran[peer][what]
            name, ratio = ("tokens/s", ratio) if what == "tokens_per_s" else ("memory, the inverse", 1 / ratio)
            found.append(Target(f"{size}, ours over {peer}, {name}", ratio, goal))

    if size == "demo":
        at_least(1.5, "seqax")
        at_least(1.0, "seqax", what="peak_bytes")
        if "ours" in ran and "floor" in ran:
            goal = DEMO_GOAL * ran["floor"]["about"]["peak"] / DEMO_PEAK
            found.append(Target(f"{size}, ours, tokens/s", ran["ours"]["tokens_per_s"], goal))
    elif platform == "cpu":
        at_least(1.1, "nnx")
        at_least(1.5, "torch")
        if "of_floor" in ran.get("ours", {}):
            found.append(Target(f"{size}, share of the floor", ran["ours"]["of_floor"], 0.75))
        at_least(1.0, "nnx", what="peak_bytes")
        at_least(1.0, "torch", what="peak_bytes")
    else:
        at_least(1.1, "torch")
        if size in MFU_MARKS and "mfu_full" in ran.get("ours", {}):
            found.append(Target(f"{size}, MFU with full attention", ran["ours"]["mfu_full"], MFU_MARKS[size]))
    return found


def ratios(size: str, contestants: dict[str, dict]) -> str:
    """Ratios of ours to each of the others, and of ours with other settings to ours, a line each."""
    ran = {label: its for label, its in contestants.items() if its["error"] is None and its["contestant"] != "floor"}
    if "ours" not in ran:
        return ""
    cells = []
    for label, its in ran.items():
        if label != "ours":
            over, under = (its, ran["ours"]) if its["contestant"] == "ours" else (ran["ours"], its)
            best, median = (over[key] / under[key] for key in ("tokens_per_s", "tokens_per_s_median"))
            names = f"{label} / ours" if over is its else f"ours / {label}"
            cells.append(f"ratio   {size}, {names}: {best:.2f}, by medians {median:.2f}")
    return "\n".join(cells)
