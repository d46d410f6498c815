"""Checks of settings. Each raises ValueError with the name of the setting, its value and the allowed values."""

import math
from collections.abc import Mapping, Sequence

from omegaconf import OmegaConf

_UPPER = {2**31: "below 2**31", 2**63: "below 2**63", math.inf: "finite", math.nextafter(1, 2): "at most 1"}
"""Words for the upper limits of ranges, which are exclusive."""


def check_ranges(section: str, settings, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises ValueError for a field of `settings` outside of its range [low, end). None is in every range."""
    for name, (low, end) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value < end:  # NaN is in no range
            upper = _UPPER.get(end, f"below {end}")
            raise ValueError(f"{section}.{name} is {value}; it must be at least {low} and {upper}.")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError for a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")


def check_booleans(overrides: Sequence[str], config) -> None:
    """Raises ValueError for an override such as `data.shuffle=2`, which OmegaConf would take as true."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if isinstance(OmegaConf.select(config, key), bool) and value.lower().strip("'\"") not in ("true", "false"):
            raise ValueError(f"{key} is {value}; it must be true or false.")
