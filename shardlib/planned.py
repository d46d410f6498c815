"""How a program is traced: for which device and mesh it chooses its implementations."""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping

import jax

from shardlib import places
from shardlib.mesh import mesh_axes
from shardlib.parsing import ShardError


def _refused_in_steps(function: Callable) -> Callable:
    """Lets only the library call `function`, whose result depends on the run's mesh.

    The result is the same when the check traces the step on one device, so that both traces choose
    the same implementation. If a step computed with this result, the check could not see that the
    step depends on the mesh.
    """

    @functools.wraps(function)
    def checked(*args, **options):
        here = inspect.currentframe()
        caller = here.f_back.f_globals.get("__name__", "") if here and here.f_back else ""
        if not places.is_library(caller):
            raise ShardError(
                f"{function.__name__} is the same on all meshes, so the check cannot see what "
                "depends on it",
                "use shardops.axis_size('r d'), the number of devices along axes",
            )
        return function(*args, **options)

    return checked


@_refused_in_steps
def target_device():
    """Returns the device that the traced program is for: JAX's first one.

    A program can also be compiled for a machine elsewhere, on an abstract mesh of another platform.
    Then this is the mesh's abstract device, which has a platform and a kind.
    """
    device = jax.devices()[0]
    mesh = jax.sharding.get_abstract_mesh()
    target = None if mesh.empty else mesh.abstract_device
    return target if target is not None and target.platform != device.platform else device


class Choices:
    """Choices by size that a trace makes, or makes again as a trace at other sizes made them.

    Attributes:
        made: what was chosen, in order, each with its key.
    """

    def __init__(self, repeated: "Choices | None" = None) -> None:
        self.made: list[tuple[object, bool]] = []
        self._repeated = iter(repeated.made if repeated else ())
        self._is_free = repeated is None

    def make(self, key: object, choice: bool) -> bool:
        """Returns `choice`, or the one that is repeated. A program with other keys is another."""
        if not self._is_free:
            known, repeated = next(self._repeated, (None, False))
            self._is_free = known != key
            choice = choice if self._is_free else repeated
        self.made.append((key, choice))
        return choice


@dataclasses.dataclass(frozen=True)
class Planned:
    """Options for tracing a program that is compared with another one, or only planned."""

    sizes: tuple[tuple[str, int], ...] = ()
    """Mesh sizes by which to choose fast implementations, whatever mesh the program is traced on;
    empty: those of that mesh."""
    kernels_as_calls: bool = False
    """True: trace attention other than einsum as one call that computes nothing. For plans, because
    some kernels can only be traced where their device is."""
    plain_sums: bool = False
    """True: add rows by id with a scatter, which is one equation at any size, on all platforms."""
    choices: Choices | None = None
    """Where choices by size are kept. Small programs are compared with those at a run's sizes."""


_PLANNED = jax.make_user_context(Planned())  # JAX retraces a jitted function if it differs


def planned_for(**changes: object) -> contextlib.AbstractContextManager:
    """Returns a context that changes attributes of Planned."""
    return _PLANNED(dataclasses.replace(_PLANNED.value, **changes))


@_refused_in_steps
def planned() -> Planned:
    """Returns the options with which the current program is traced."""
    return _PLANNED.value


def choose_by_size(key: object, choice: bool) -> bool:
    """Returns `choice`, or what a trace at other sizes chose here: see Planned.choices."""
    choices = _PLANNED.value.choices
    return choice if choices is None else choices.make(key, choice)


@_refused_in_steps
def planned_devices(axes: Iterable[str]) -> int:
    """Returns the number of devices along `axes` by which to choose a fast implementation.

    It differs from `devices_along` in a trace that is compared with one on another mesh: see
    Planned.sizes.
    """
    sizes = planned_axes()
    return math.prod(sizes.get(axis, 1) for axis in axes)


@_refused_in_steps
def planned_axes() -> Mapping[str, int]:
    """Returns the axes and sizes of the mesh that `planned_devices` counts on."""
    return dict(_PLANNED.value.sizes) or mesh_axes()
