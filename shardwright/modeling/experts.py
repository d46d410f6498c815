"""Chooses how a mixture of experts computes all choices of its router, with none dropped."""

from shardlib.planned import choose_by_size, planned_devices


def pools_without_drops(experts: int, per_token: int) -> int | None:
    """Number of pools, one for each device of e, with slots for all choices of a sequence.

    None if a token uses more than a quarter of a device's experts: then each may as well compute
    all tokens.
    """
    pools = planned_devices("e")
    return None if choose_by_size("experts", 4 * per_token > experts // pools) else pools
