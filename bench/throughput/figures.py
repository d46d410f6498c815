"""Figures of a contestant (tokens per second, MFU, the floor's share, memory), and its line of the table."""

import statistics
from typing import Any

from bench.throughput.peers.job import Job
from bench.throughput.rounds import Measured


def flops_per_token(job: Job) -> tuple[float, float]:
    """FLOPs of a token with causal and with full attention, as flops.flops_of_model counts them."""
    c = job.shapes
    n, attention = c.parameters - c.vocab * c.d_model, c.layers * c.heads * c.d_head * job.length
    return 6 * n + 6 * attention, 6 * n + 12 * attention


def figures(m: Measured, floor: dict[str, Any] | None) -> dict[str, Any]:
    """All numbers of a contestant, for the table and for --json. `floor`: the figures of the floor."""
    found: dict[str, Any] = {"label": m.label, "contestant": m.job.contestant, "error": m.error, "tokens": m.job.tokens}
    if m.error is not None:
        return found
    best, median = (m.job.tokens / seconds for seconds in (min(m.rounds), statistics.median(m.rounds)))
    found |= {"tokens_per_s": best, "tokens_per_s_median": median}
    found |= {
        "step_s": m.rounds,
        "compile_s": m.compile_s,
        "peak_bytes": m.device_peak or m.host_peak,
        "host_peak_bytes": m.host_peak,
    }
    found |= {"steps_peak_bytes": m.steps_peak, "device_peak_bytes": m.device_peak, "imports_bytes": m.imports_memory}
    found |= {"about": m.about, "settings": m.job.settings, "losses": m.losses[:8]}
    found["parts"] = {name: value for name, value in m.parts.items() if name != "event"}
    if floor and floor["error"] is None and m.job.contestant != "floor":
        floor_per_token = min(floor["step_s"]) * (1 + floor["about"]["attention_share"]) / floor["tokens"]
        # A measured peak may be lower than the floor reaches, if other programs ran at the time.
        peak = max(floor["about"]["peak"], flops_per_token(m.job)[0] / floor_per_token)
        causal, full = (x * best / peak for x in flops_per_token(m.job))
        found |= {"mfu_causal": causal, "mfu_full": full, "of_floor": floor_per_token * best}
    return found


COLUMNS = {"": 44, "tokens/s": 10, "median": 10, "MFU": 7, "full": 7, "floor": 7, "peak MiB": 10, "steps": 8}
HEADER = "".join(f"{name:>{width}}" for name, width in (COLUMNS | {"compile s": 10}).items())


def line_of(found: dict[str, Any]) -> str:
    """The line of the table."""
    name = f"{found['label']:<44}"
    if found["error"]:
        return f"{name}  failed: {found['error']}"
    cells = f"{found['tokens_per_s']:>10,.0f}{found['tokens_per_s_median']:>10,.0f}"
    share = lambda key: f"{found[key]:>7.1%}" if key in found else f"{'':>7}"
    cells += share("mfu_causal") + share("mfu_full") + share("of_floor")
    peak = f"{found['peak_bytes'] / 2**20:>10,.0f}"
    above = found["steps_peak_bytes"] - found["imports_bytes"]
    return f"{name}{cells}{peak}{f'+{above / 2**20:,.0f}':>8}{found['compile_s']:>10.1f}"


PARTS = ("matmul", "attention", "other", "collective")


def parts_of(size: str, contestants: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of a table in Markdown: milliseconds of a step by kind of kernel, the least and as measured."""
    lines = []
    for label, its in contestants.items():
        found = its.get("parts") or {}
        if "because" in found:
            lines.append(f"| {size}, {label} | not measured, because {found['because']} |")
        elif found:
            least, took = found["least"], found["took"]
            sums = {"least": sum(least.values()) if least else None, "took": 1000 * min(its["step_s"])}
            cells = [f"{_ms(least and least.get(kind))} | {_ms(took.get(kind, 0.0))}" for kind in PARTS]
            lines.append(" | ".join([f"| {size}, {label}", *cells, f"{_ms(sums['least'])} | {_ms(sums['took'])} |"]))
    return lines


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


PARTS_HEADER = "\n".join(
    [
        "milliseconds of a step: `least` by the compiled program, at the maker's peaks; `took` in a trace",
        "| | " + " | ".join(f"{kind} least | took" for kind in (*PARTS, "step")) + " |",
        "|---" * (1 + 2 * (len(PARTS) + 1)) + "|",
    ]
)


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
