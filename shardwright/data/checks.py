"""Checks settings.

Each check raises ValueError with the name of the setting, its value and the allowed values.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from shardlib.parsing import did_you_mean

_UPPER = {math.inf: "finite", math.nextafter(1, 2): "at most 1"} | {
    2**n: f"below 2**{n}" for n in range(10, 64)
}
"""Words for the exclusive upper limits of ranges."""


FIXED, CHANGING, TUNABLE, FREE = "fixed", "changing", "tunable", "free"
"""What a field of settings may be marked as.

FIXED: a run that resumes must have the same, because it determines batches or the math of the step.
CHANGING: it may change during a run, by training.changes, whether FIXED or not. TUNABLE: a setting
of a model in which a run may differ from the one whose weights it starts from. FREE: the result of
a program does not depend on it. Other settings of runs may change when they resume.
"""


def setting(*marks: str, default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """Makes a dataclass field with marks, for `marked`. `options` are those of the field."""
    return dataclasses.field(default=default, metadata={"marks": marks}, **options)


def marked(kind: Any, mark: str) -> list[str]:
    """Names the fields of a dataclass that have a mark."""
    return [
        field.name for field in dataclasses.fields(kind) if mark in field.metadata.get("marks", ())
    ]


def within(
    low: float, end: float, default: Any = dataclasses.MISSING, *marks: str, **options: Any
) -> Any:
    """Makes a dataclass field for a number in [low, end), for check_ranges, with marks.

    `options` are of the field.
    """
    return dataclasses.field(
        default=default, metadata={"range": (low, end), "marks": marks}, **options
    )


at_least_0 = functools.partial(within, 0, math.inf)
above_0 = functools.partial(within, math.ulp(0), math.inf)
at_least_1 = functools.partial(within, 1, 2**31)


def one_of(choices: Iterable[str], *marks: str, default: Any = dataclasses.MISSING) -> Any:
    """Makes a dataclass field for one of several texts, for check_ranges, with marks."""
    return dataclasses.field(default=default, metadata={"choices": (*choices,), "marks": marks})


def a_path(default: Any = dataclasses.MISSING, *marks: str, **options: Any) -> Any:
    """Makes a dataclass field for a path, a list of paths, or what may be a path, for expand_paths,
    with marks.
    """
    return dataclasses.field(default=default, metadata={"path": True, "marks": marks}, **options)


def expand_paths(section: str, settings: Any) -> None:
    """Expands a leading ~ in the fields made by `a_path`, in `settings` and in nested dataclasses.

    Raises ValueError if the home directory is unknown.
    """
    for field in dataclasses.fields(settings):
        name = f"{section}.{field.name}" if section else field.name
        value = getattr(settings, field.name)
        if "path" in field.metadata:
            setattr(settings, field.name, _expanded(name, value))
        for key, inner in value.items() if isinstance(value, dict) else [("", value)]:
            if dataclasses.is_dataclass(inner):
                expand_paths(f"{name}.{key}".rstrip("."), inner)


def _expanded(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(name, each) for each in value]
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    if (path := os.path.expanduser(value)) == value:
        raise ValueError(
            f"{name} is {value}, but there is no such home directory. Write the whole path, or "
            f"./{value}."
        )
    return path


def check_ranges(section: str, settings: Any) -> None:
    """Checks the fields made by `within` and `one_of`, in `settings` and in nested dataclasses."""
    for field in dataclasses.fields(settings):
        name = f"{section}.{field.name}" if section else field.name
        value = getattr(settings, field.name)
        if "range" in field.metadata:
            check_range(name, value, *field.metadata["range"], or_null=field.default is None)
        if "choices" in field.metadata and value is not None:
            check_choice(name, value, field.metadata["choices"])
        if dataclasses.is_dataclass(value):
            check_ranges(name, value)


def check_range(
    name: str, value: float | None, low: float = 1, end: float = 2**31, or_null: bool = False
) -> None:
    """Checks that a number is in [low, end).

    None is in every range; `or_null`: the message for 0 says so.
    """
    if value is not None and not low <= value < end:  # NaN is in no range
        least = "above 0" if low == math.ulp(0) else f"at least {low}"
        null = ", or null for none" if or_null and value == 0 else ""
        raise ValueError(
            f"{name} is {value}; it must be {least} and {_UPPER.get(end, f'below {end}')}{null}."
        )


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises ValueError for a value that is not allowed."""
    if value not in allowed:
        raise ValueError(
            f"{name} is {value!r}; choose one of "
            f"{', '.join(allowed)}.{did_you_mean(value, allowed)}"
        )
