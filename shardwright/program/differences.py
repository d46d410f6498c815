"""Finds the differences between configurations."""

from collections.abc import Mapping, Sequence
from typing import Any

_ABSENT = object()


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the names that do not have the same value in all of these flat configurations, in their
    order.
    """
    names = dict.fromkeys(name for config in configs for name in config)
    return [
        name
        for name in names
        if any(x.get(name, _ABSENT) != configs[0].get(name, _ABSENT) for x in configs)
    ]


def config_differences(saved: dict, current: dict, fixed: tuple[str, ...]) -> list[str]:
    """Lists the differences between two nested dicts in the settings `fixed`.

    Args:
        saved: configuration stored with the checkpoint.
        current: configuration of this run.
        fixed: names of sections or settings to compare, such as ("model", "optimizer",
            "data.seed").

    Returns:
        Lines like "optimizer.lr: checkpoint has 0.001, this run has 0.01", sorted by key; empty if
        all agree.
    """
    before, now = (
        {
            key: value
            for key, value in flat(config).items()
            if any(key == p or key.startswith(p + ".") for p in fixed)
        }
        for config in (saved, current)
    )

    def shown(config, key):
        return f"has {config[key]!r}" if key in config else "does not have it"

    return [
        f"{key}: checkpoint {shown(before, key)}, this run {shown(now, key)}"
        for key in sorted(differing([before, now]))
    ]


def flat(config: dict, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested dict: {"a": {"b": 1}} becomes {"a.b": 1}.

    An empty dict counts as a value.
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return values
