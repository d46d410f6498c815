"""Checks settings. Each check raises ValueError with the name of the setting, its value and the allowed values."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from shardlib.parsing import did_you_mean

_UPPER = {math.inf: "finite", math.nextafter(1, 2): "at most 1"} | {2**n: f"below 2**{n}" for n in range(10, 64)}
"""Words for the exclusive upper limits of ranges."""


def within(low: float, end: float, default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """Makes a dataclass field for a number in [low, end), for check_ranges. `options` are those of the field."""
    return dataclasses.field(default=default, metadata={"range": (low, end)}, **options)


at_least_0 = functools.partial(within, 0, math.inf)
above_0 = functools.partial(within, math.ulp(0), math.inf)
at_least_1 = functools.partial(within, 1, 2**31)


def check_ranges(section: str, settings: Any) -> None:
    """Checks the fields made by `within`, in `settings` and in nested dataclasses."""
    for field in dataclasses.fields(settings):
        name = f"{section}.{field.name}" if section else field.name
        value = getattr(settings, field.name)
        if "range" in field.metadata:
            check_range(name, value, *field.metadata["range"], or_null=field.default is None)
        if dataclasses.is_dataclass(value):
            check_ranges(name, value)


def check_range(name: str, value: float | None, low: float = 1, end: float = 2**31, or_null: bool = False) -> None:
    """Checks that a number is in [low, end). None is in every range; `or_null`: the message for 0 says so."""
    if value is not None and not low <= value < end:  # NaN is in no range
        least = "above 0" if low == math.ulp(0) else f"at least {low}"
        null = ", or null for none" if or_null and value == 0 else ""
        raise ValueError(f"{name} is {value}; it must be {least} and {_UPPER.get(end, f'below {end}')}{null}.")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises ValueError for a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.{did_you_mean(value, allowed)}")
