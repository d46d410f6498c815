"""Rules of collectives."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardlib.exact.endings import Wrong
from shardlib.exact.machine import Machine, rule
from shardlib.exact.values import ZERO, Exact, choose, extreme, join, move, total


def _exchange(
    m: Machine, axes: Sequence[str], groups: Any, function: Callable[[Exact], Exact], x: Exact
) -> Exact:
    """Applies a function to the blocks of the devices along axes.

    It gets them in a first dim, and returns in a first dim what each device receives, or what all
    of them receive in one entry. `groups` are indices of devices that exchange apart; None: all.
    """
    blocks = move(lambda a: m.to_front(a, axes), x)
    n = m.count(axes)
    if groups is None:
        found = function(blocks)
        if len(found.value) == 1:
            return move(lambda a: a[0], found)
        return move(lambda a: m.from_front(a, axes), found)
    received: list[Exact | None] = [None] * n
    for group in groups:
        found = function(move(lambda a, group=group: a[[*group]], blocks))
        for i, device in enumerate(group):
            at = i if len(found.value) > 1 else 0
            received[device] = move(lambda a, at=at: a[at], found)
    of_all = join(np.stack, [x for x in received if x is not None])
    return move(lambda a: m.from_front(a, axes), of_all)


def _groups(eqn: Any) -> Any:
    return eqn.params.get("axis_index_groups")


def _keep_first_dim(x: Exact) -> Exact:
    return move(lambda a: a[None], x)


@rule("psum", "psum_invariant", "unreduced_psum")
def _psum(m: Machine, eqn: Any, x: Exact) -> Exact:
    axes = m.named(eqn.params["axes"])
    return _exchange(m, axes, _groups(eqn), lambda x: _keep_first_dim(total(x, 0)), x)


@rule("pmax", "pmin")
def _pmax(m: Machine, eqn: Any, x: Exact) -> Exact:
    axes = m.named(eqn.params["axes"])
    largest = eqn.primitive.name == "pmax"
    return _exchange(m, axes, _groups(eqn), lambda x: _keep_first_dim(extreme(x, 0, largest)), x)


@rule("all_gather", "all_gather_invariant", "all_gather_reduced")
def _all_gather(m: Machine, eqn: Any, x: Exact) -> Exact:
    params = eqn.params
    axes = m.named(params["axis_name"])
    dim = params["all_gather_dimension"] + m.rank

    def gather(a: np.ndarray) -> np.ndarray:
        a = np.moveaxis(a, 0, dim)
        if params["tiled"]:
            a = a.reshape(*a.shape[:dim], -1, *a.shape[dim + 2 :])
        return a[None]

    return _exchange(m, axes, _groups(eqn), lambda x: move(gather, x), x)


@rule("reduce_scatter", "unreduced_reduce_scatter", "psum_scatter")
def _reduce_scatter(m: Machine, eqn: Any, x: Exact) -> Exact:
    params = eqn.params
    axes = m.named(params["axis_name"])
    dim = params["scatter_dimension"] + m.rank

    def scatter(x: Exact) -> Exact:
        n = len(x.value)
        return move(lambda a: _blocks(a, dim, n, params["tiled"]), total(x, 0))

    return _exchange(m, axes, _groups(eqn), scatter, x)


def _blocks(a: np.ndarray, dim: int, n: int, tiled: bool) -> np.ndarray:
    """Returns n blocks of a dim in a first dim; without `tiled`, the n entries."""
    if tiled:
        a = a.reshape(*a.shape[:dim], n, a.shape[dim] // n, *a.shape[dim + 1 :])
    return np.moveaxis(a, dim, 0)


@rule("all_to_all")
def _all_to_all(m: Machine, eqn: Any, x: Exact) -> Exact:
    params = eqn.params
    axes = m.named(params["axis_name"])
    split = params["split_axis"] + m.rank + 1
    concat = params["concat_axis"] + m.rank + 1

    def exchange(a: np.ndarray) -> np.ndarray:
        if params["tiled"]:
            n = len(a)
            a = a.reshape(*a.shape[:split], n, a.shape[split] // n, *a.shape[split + 1 :])
        a = np.moveaxis(np.moveaxis(a, split, 0), 1, concat)
        if params["tiled"]:
            a = a.reshape(*a.shape[:concat], -1, *a.shape[concat + 2 :])
        return a

    return _exchange(m, axes, _groups(eqn), lambda x: move(exchange, x), x)


@rule("ppermute")
def _ppermute(m: Machine, eqn: Any, x: Exact) -> Exact:
    axes = m.named(eqn.params["axis_name"])
    perm = eqn.params["perm"]
    n = m.count(axes)
    for devices in zip(*perm, strict=True):
        if len({*devices}) < len(devices) or not all(0 <= device < n for device in devices):
            raise Wrong(f"of {n} devices, {perm} has one twice, or one that does not exist")

    def send(x: Exact) -> Exact:
        source_of = {target: source for source, target in perm}
        at = [source_of.get(device, 0) for device in range(n)]
        is_sent = np.array([device in source_of for device in range(n)])
        zero = ZERO if x.image is not None else Exact(np.zeros((), x.value.dtype))
        is_sent = is_sent.reshape(-1, *(1,) * (x.value.ndim - 1))
        return choose(is_sent, move(lambda a: a[at], x), zero)

    return _exchange(m, axes, None, send, x)


@rule("pbroadcast")
def _pbroadcast(m: Machine, eqn: Any, x: Exact) -> Exact:
    axes = m.named(eqn.params["axis_name"])
    source = eqn.params["source"]
    return _exchange(m, axes, None, lambda x: move(lambda a: a[source : source + 1], x), x)


@rule("axis_index")
def _axis_index(m: Machine, eqn: Any) -> Exact:
    parted = m.parted
    m.parted = {}  # a device knows its index in each branch
    axes = m.named(eqn.params["axis_name"])
    m.parted = parted
    index = np.arange(m.count(axes), dtype=np.int32)
    return Exact(m.from_front(index.reshape(-1, *(1,) * m.rank), axes))
