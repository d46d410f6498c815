"""Chooses how a mixture of experts computes all choices of its router, with none dropped."""

from shardlib.grouped import LEAST_ROWS
from shardlib.values import choose_by_size, planned_devices, target_device

FEWEST = {"gpu": 8192}
"""Fewest tokens on a device for which pools without drops are faster than all experts with all tokens, by platform: as
XLA predicts for H100. Elsewhere so many that each expert has LEAST_ROWS."""


def pools_without_drops(experts: int, per_token: int, tokens: int, asked: bool | None = None) -> int | None:
    """Number of pools, one for each device of e, with slots for all choices of `tokens` on all devices.

    None where all experts with all tokens are as fast, or as `asked`. The model must compute the same either way.
    """
    pools = planned_devices("e")
    if asked is not None:
        return pools if asked else None
    ours = experts // pools
    on_device = tokens // planned_devices("rdc")
    few = on_device < FEWEST.get(target_device().platform, LEAST_ROWS * ours // per_token)
    return None if choose_by_size("experts", few or 4 * per_token > ours) else pools
