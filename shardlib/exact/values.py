"""Arrays on all devices at once, each entry as a pair of a number and its image in the ring."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.exact import ring


@dataclasses.dataclass(slots=True, eq=False)
class Exact:
    """An array on all devices of a mesh.

    Each part has a leading dim for each axis of the mesh, of one entry if all devices along the
    axis have the same.

    Attributes:
        value: what programs decide by: float64 of a float, whatever its dtype; an integer or a
            bool as it is; a key as its uint64.
        image: elements of the ring, by which results are compared, two packed into one for complex
            numbers; None of integers, bools and keys.
        exponential: the exponential of a sum that has logarithms in it, because exp(log u + a) is
            u·exp(a), but exp(log u) is u only for powers of 1 + p. None: that of the image.
        radicand: s of a product c·√s, whose image is c·ring.root(s), because √s·√s is s, but the
            square of ring.root(s) is only ±s. None: 1.
        root: the image of |x| of a square x², because ring.root(x²) is only ±x. None: not known.
    """

    value: Any
    image: Any = None
    exponential: Any = None
    radicand: Any = None
    root: Any = None

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The arrays that it consists of."""
        return tuple(getattr(self, name) for name in self._names)

    @property
    def _names(self) -> list[str]:
        return [name for name in self.__slots__ if getattr(self, name) is not None]

    def with_parts(self, parts: Iterable[Any]) -> "Exact":
        """Returns an array of other parts, in the order of `parts`."""
        return Exact(**dict(zip(self._names, parts, strict=True)))

    @property
    def power(self) -> Any:
        """Its exponential in the ring."""
        return ring.exponential(self.image) if self.exponential is None else self.exponential

    @property
    def factor(self) -> Any:
        """Its radicand, which is 1 of numbers without a root."""
        return np.ones_like(self.image) if self.radicand is None else self.radicand


class Ref:
    """A mutable array (jax.new_ref)."""

    def __init__(self, content: Exact):
        self.content = content


def is_float(dtype: Any) -> bool:
    """True for the dtypes of floats."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_key(dtype: Any) -> bool:
    """True for the dtypes of keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def make_float(value: Any, image: Any, *parts: Any, **more: Any) -> Exact:
    """Makes an array of floats. Images of nan and ±inf stand for themselves."""
    return Exact(value, ring.mark(value, image), *parts, **more)


def of_numbers(value: Any) -> Exact:
    """Makes an array of floats from their numbers."""
    value = np.asarray(value, np.float64)
    return Exact(value, ring.image_of(value))


ONE = of_numbers(1.0)
ZERO = of_numbers(0.0)


def with_same_parts(xs: Sequence[Exact]) -> list[Exact]:
    """Returns the arrays, of which all have the same parts."""
    if all(len(x.parts) <= 2 for x in xs):
        return [*xs]
    has_power, has_radicand = (
        any(getattr(x, name) is not None for x in xs) for name in ("exponential", "radicand")
    )
    has_root = all(x.root is not None for x in xs)
    return [
        Exact(
            x.value,
            x.image,
            x.power if has_power else None,
            x.factor if has_radicand else None,
            x.root if has_root else None,
        )
        for x in xs
    ]


def move(function: Callable[[Any], Any], x: Exact) -> Exact:
    """Applies a function that moves entries to all parts of an array."""
    return x.with_parts(map(function, x.parts))


def join(function: Callable[[Sequence], Any], xs: Sequence[Exact]) -> Exact:
    """Applies a function that moves entries of several arrays into one."""
    xs = with_same_parts(xs)
    return xs[0].with_parts(map(function, zip(*(x.parts for x in xs), strict=True)))


def choose(first: Any, a: Exact, b: Exact) -> Exact:
    """Returns the entries of `a` where `first` is True, and those of `b` elsewhere."""
    a, b = with_same_parts([a, b])
    parts = zip(a.parts, b.parts, strict=True)
    return a.with_parts(np.where(first, p, q) for p, q in parts)


def is_complex(x: Exact) -> bool:
    """True for an array of complex numbers."""
    return x.value.dtype.kind == "c"


def equal(a: Exact, b: Exact) -> Any:
    """True where two arrays are equal: floats by their images, all else by value."""
    if a.image is None or b.image is None:
        return a.value == b.value
    if is_complex(a):
        pairs = zip(ring.unpack(a.image), ring.unpack(b.image), strict=True)
        return np.logical_and(*(ring.equal(x, y) for x, y in pairs))
    return ring.equal(a.image, b.image)


def is_tie(a: Exact, b: Exact) -> Any:
    """True where two floats are equal, though rounding may have parted their numbers."""
    return equal(a, b) & (np.abs(a.value - b.value) <= 1e-6 * (1 + np.abs(a.value)))


def sort_key(x: Exact) -> np.ndarray:
    """Returns what entries are ordered by: floats that differ by rounding are equal."""
    return x.value.astype(np.float32) if x.value.dtype == np.float64 else x.value


def total(x: Exact, dims: int | tuple[int, ...]) -> Exact:
    """Sums along dims of the parts."""
    if x.image is None:
        return Exact(x.value.sum(dims, dtype=x.value.dtype))
    if is_complex(x):
        image = ring.pack(*(part.sum(dims) % ring.MODULUS for part in ring.unpack(x.image)))
        return Exact(x.value.sum(dims), image)
    radicand = None if x.radicand is None else _radicand_of_sum(x, dims)
    return make_float(x.value.sum(dims), x.image.sum(dims) % ring.MODULUS, radicand=radicand)


def _radicand_of_sum(x: Exact, dims: int | tuple[int, ...]) -> Any:
    """Returns what is under the root of all terms but zeros, and 1 if they have several."""
    is_zero = x.image == 0
    common = np.where(is_zero, ring.ZERO, x.radicand).max(dims, initial=0, keepdims=True)
    is_common = (is_zero | (x.radicand == common)).all(dims) & (common > 0).all(dims)
    return np.where(is_common, common.max(dims, initial=0), ring.ONE) if is_common.any() else None


def extreme(x: Exact, dim: int, largest: bool) -> Exact:
    """Returns the largest or smallest entries along a dim of the parts."""
    if x.image is None:
        return Exact((np.max if largest else np.min)(x.value, dim))
    at = np.expand_dims((np.argmax if largest else np.argmin)(x.value, dim), dim)
    return move(lambda a: np.squeeze(np.take_along_axis(a, at, dim), dim), x)
