"""Explains numbers of a program by the sizes of its dims and the numbers of devices."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

Numbers = tuple[int, ...]
"""A number as it is in each of several traces of a program."""
MAX_DIMS = 4
"""A product has at most so many dims."""


DIVISORS = (2, 4, 8)
"""A model may divide a size by one of these, as for blocks of positions."""


class Monomials:
    """Numbers that are made of sizes.

    Args:
        dims: the size of each dim in each trace. Sizes that are quotients, such as the number of
            chunks, are dims as well.
        axes: the number of devices along each axis in each trace.
    """

    def __init__(self, dims: Mapping[str, Numbers], axes: Mapping[str, Numbers]):
        one = (1,) * len(next(iter([*dims.values(), *axes.values()]), ()))
        self._groups = self._products(one, [*axes.values()], len(axes))
        self._dims = self._products(one, [*dims.values()], MAX_DIMS)
        self._sizes = [*dims.values()]
        self.seen: dict[Numbers, bool] = {}

    @staticmethod
    def _products(one: Numbers, sizes: list[Numbers], most: int) -> set[Numbers]:
        chosen = (some for n in range(most + 1) for some in itertools.combinations(sizes, n))
        return {tuple(map(math.prod, zip(one, *some, strict=True))) for some in chosen}

    def explain(self, numbers: Numbers) -> bool:
        """Returns True if one monomial gives the number in each trace.

        It is a product of dims, times or over a product of axes, or one more or less than that, or
        a part of one by DIVISORS, or half of one, rounded down. A number that is the same in all
        traces is a constant.
        """
        if len(set(numbers)) == 1:
            return True
        if numbers not in self.seen:
            positive = tuple(-n for n in numbers) if max(numbers) < 0 else numbers
            near = [tuple(n + more for n in positive) for more in (0, 1, -1)]
            multiples = [tuple(n * whole for n in positive) for whole in DIVISORS]
            odd = itertools.product((0, 1), repeat=len(positive))
            halves = [
                tuple(2 * n + more for n, more in zip(positive, of, strict=True)) for of in odd
            ]
            self.seen[numbers] = any(map(self._is_monomial, [*near, *multiples, *halves]))
        return self.seen[numbers]

    def _is_monomial(self, numbers: Numbers) -> bool:
        if min(numbers) < 1:
            return False
        for group in self._groups:
            pairs = [*zip(numbers, group, strict=True)]
            if tuple(n * g for n, g in pairs) in self._dims:
                return True
            if not any(n % g for n, g in pairs) and tuple(n // g for n, g in pairs) in self._dims:
                return True
        return False

    def explain_floats(self, numbers: Sequence[float], tolerance: float) -> bool:
        """Returns True if a constant times a power of one monomial gives the number in each trace.

        The powers are ±1 and ±½, as in the mean of a dim and in the scale of attention. The
        tolerance is that of a quotient of two of them. It may also be a whole number that `explain`
        explains, or the logarithm of one.
        """
        first = numbers[0]
        if all(n == first or n != n != first for n in numbers):
            return True
        if not all(math.isfinite(n) and n * first > 0 for n in numbers):
            return False
        with np.errstate(over="ignore"):
            for whole in (np.array(numbers, float), np.exp(numbers)):
                near = np.round(whole)
                is_whole = (np.abs(whole - near) <= 1e-3 * tolerance * near) & (near < 2**53)
                if is_whole.all() and self.explain(tuple(map(int, near))):
                    return True
        ratios = np.log([n / first for n in numbers])
        return any(
            (np.abs(self._ratios * power - ratios) < tolerance).all(1).any()
            for power in (1, -1, 0.5, -0.5)
        )

    @functools.cached_property
    def _ratios(self) -> np.ndarray:
        """Logarithms of monomials, each trace's over the first trace's."""
        beside = {tuple(n + more for n in x) for x in self._sizes for more in (1, -1)}
        all_dims = self._dims | {x for x in beside if min(x) > 0}
        dims, groups = (np.log(np.array([*x], float)) for x in (all_dims, self._groups))
        logs = np.concatenate([dims[:, None] + groups, dims[:, None] - groups])
        logs = logs.reshape(-1, logs.shape[-1])
        return logs - logs[:, :1]
