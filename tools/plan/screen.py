"""A plan on the terminal."""

from shardwright.plan.plan import Plan, by_line


def as_text(plan: Plan) -> str:
    """The plan in lines of at most 100 columns."""
    lines = [f"{plan.seconds:.3g} s a step, MFU {100 * plan.mfu:.1f} %, {plan.step.peak / 2**30:.1f} GiB"]
    for line, rows in list(by_line(plan.rows).items())[:10]:
        lines.append(f"{sum(row.exposed for row in rows):8.3f} s  {line}")
    return "\n".join(lines)
