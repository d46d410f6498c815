"""Figures of a contestant (tokens per second, MFU, the floor's share, memory), and its line of the table."""

import statistics
from typing import Any

from benchmarks.throughput.peers.job import Job
from benchmarks.throughput.rounds import Measured


def flops_per_token(job: Job) -> tuple[float, float]:
    """FLOPs of a token with causal and with full attention, as training_io.flops.flops_of_model counts them."""
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
