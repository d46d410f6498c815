"""Small helpers on top of JAX."""

import contextlib
import contextvars
import functools
import inspect
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

_SAVED = "saved_for_backward"
_RECORD: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("record", default=None)


def save_for_backward(x):
    """Keeps `x`, an array or a pytree of arrays, from the forward pass for the backward pass."""
    if record := _RECORD.get():
        caller = inspect.currentframe().f_back
        record(x, caller.f_code.co_filename, caller.f_lineno)
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _SAVED), x)


def explicit_activation_checkpointing(fn):
    """Decorator: the backward pass of `fn` gets its arguments and what it marks with `save_for_backward`, no more.

    Everything else is computed again.
    """
    checkpointed = jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(_SAVED))

    @functools.wraps(fn)
    def call(*args, **kwargs):
        # What is recorded inside jax.checkpoint could not leave it.
        return (fn if _RECORD.get() else checkpointed)(*args, **kwargs)

    return call


@contextlib.contextmanager
def recording(record: Callable | None) -> Iterator[None]:
    """Calls record(x, file, line of the call) for each value that `save_for_backward` is given while JAX traces inside.

    For forward passes that tools look into: nothing is checkpointed meanwhile.
    """
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)


def recorder() -> Callable | None:
    """What `recording` is in force."""
    return _RECORD.get()


def fold_in_str(key: jax.Array, name: str) -> jax.Array:
    """A random key for `name`, the same whatever other names there are."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


TRUNCATED_NORMAL_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at ±2: divide by it to give `jax.random.truncated_normal` variance 1."""


def make_mesh(r: int, d: int, t: int, devices: Sequence[jax.Device], p: int = 1) -> jax.sharding.Mesh:
    """The mesh of axes r, d, t over all `devices`, t innermost: neighbours along it are nearest. p > 1: p outermost.

    One size may be -1, which takes what is left. Raises ValueError if they do not fit, with those that do.
    """
    sizes = [p, r, d, t]
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = len(devices) // max(1, -math.prod(sizes))
    shown = lambda sizes: " ".join(f"{axis}={n}" for axis, n in zip("prdt", sizes, strict=True) if axis != "p" or n > 1)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        fits = itertools.product([n for n in divisors if n == max(1, sizes[0])] or [1], *[divisors] * 3)
        raise ValueError(
            f"mesh {shown((p, r, d, t))} does not fit {len(devices)} devices. Those that do: "
            + ", ".join(shown(fit) for fit in fits if math.prod(fit) == len(devices))
            + ". (-1, for one axis, takes what is left.)"
        )
    axes = ("r", "d", "t")
    if sizes[0] > 1:
        axes = ("p", *axes)
    # Without stages there is no axis p, and specs mean what they say without it.
    return jax.make_mesh(sizes[-len(axes) :], axes, axis_types=(AxisType.Explicit,) * len(axes), devices=devices)


def start_devices(hosts: int, coordinator: str | None, host: int | None, xla_flags: str) -> None:
    """Adds to XLA_FLAGS and joins the other processes, before anything else asks for devices.

    Args:
        hosts: processes of the run, at least 1.
        coordinator, host: address:port of process 0, and which of them this is; None where JAX finds out by itself.
        xla_flags: put behind those of the environment.

    Raises:
        ValueError: another number of processes found one another.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
    if hosts > 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(coordinator, None if coordinator is None else hosts, host)
    if jax.process_count() != hosts:
        raise ValueError(
            f"hardware.hosts is {hosts}, but {jax.process_count()} processes found one another. "
            "Start one process on each host, e.g. with srun, or set hardware.hosts."
        )
