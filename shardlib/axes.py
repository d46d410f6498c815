"""The mesh axes that specs may name, which a trainer registers."""

from collections.abc import Iterable, Mapping

AXIS_ORDER: list[str] = []
"""The registered axes, in their order within a dim: `M/t/d`, `V/t/p`. A mesh may lack any of them,
which is the same as having one device along it: specs are then read without that axis. Axes that
are not registered come last, in alphabetical order."""
EITHER_ORDER: list[str] = []
"""Axes that may come in either order within a dim: in `L/c/t` each device of t holds part of the
positions of its device of c; in `K/t/c` each device of c holds part of the heads of its device of
t. A dim keeps the order that it was given (`checks.check_value`)."""
GROUPS: dict[str, tuple[str, ...]] = {}
"""Groups of axes, which a spec may name instead of their axes: if b is a group of r and d, `B/b` is
`B/r/d`, and `+b` is `+r +d`."""
SPREAD_OVER: list[str] = []
"""Axes over which a small array may be spread that need not be whole on each device."""
PIPELINE_AXIS = "p"
"""The axis of pipeline stages."""


def register_axes(
    order: Iterable[str],
    *,
    either_order: Iterable[str] = (),
    groups: Mapping[str, tuple[str, ...]] | None = None,
    spread_over: Iterable[str] = (),
) -> None:
    """Replaces the registered axes. Call it before any spec is written.

    Args:
        order: the axes, in their order within a dim.
        either_order: those that may come in either order.
        groups: groups of axes, by the name that specs use.
        spread_over: those over which small arrays may be spread.
    """
    AXIS_ORDER[:] = order
    EITHER_ORDER[:] = either_order
    GROUPS.clear()
    GROUPS.update(groups or {})
    SPREAD_OVER[:] = spread_over
