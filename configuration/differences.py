"""Differences between two configurations, for messages."""

from typing import Any


def config_differences(saved: dict, current: dict, fixed: tuple[str, ...]) -> list[str]:
    """How two nested plain dicts differ within the sections `fixed`, one line a difference.

    Args:
        saved: the configuration stored with the checkpoint.
        current: this run's.
        fixed: dotted prefixes of what must agree, such as ("model", "optimizer", "data.seed").

    Returns:
        Lines like "optimizer.lr: checkpoint has 0.001, this run has 0.01", sorted by key; empty if all agree.
    """
    before, now = (
        {key: value for key, value in _flatten(config) if any(key == p or key.startswith(p + ".") for p in fixed)}
        for config in (saved, current)
    )
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if key not in now:
            lines.append(f"{key}: checkpoint has {before[key]!r}, this run does not have it")
        elif key not in before:
            lines.append(f"{key}: checkpoint does not have it, this run has {now[key]!r}")
        elif before[key] != now[key]:
            lines.append(f"{key}: checkpoint has {before[key]!r}, this run has {now[key]!r}")
    return lines


def _flatten(config: dict, prefix: str = "") -> list[tuple[str, Any]]:
    items = []
    for key, value in config.items():
        items += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return items
