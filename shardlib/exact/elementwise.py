"""Functions of each entry: exact on floats where the ring has their laws, and hashes otherwise."""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

from shardlib.exact import ring
from shardlib.exact.endings import Undecided
from shardlib.exact.values import (
    ONE,
    ZERO,
    Exact,
    choose,
    is_tie,
    make_float,
    move,
    of_numbers,
)

MASKED = -2000.0
"""exp of less is 0, as a mask by a large negative number means it.

Scores of data are above. exp of some is 0 in float32, but not in a sum by blocks, each of which
subtracts its own maximum.
"""
FEW_INTEGERS = 1024
"""Largest count of different numbers n for which uⁿ, or exp(n·log u), is found as a product."""


def add(a: Exact, b: Exact) -> Exact:
    """Adds."""
    of_logarithms = a.exponential is not None or b.exponential is not None
    exponential = ring.multiply(a.power, b.power) if of_logarithms else None
    return make_float(
        a.value + b.value, ring.add(a.image, b.image), exponential, _radicand_of_sum(a, b)
    )


def _radicand_of_sum(a: Exact, b: Exact) -> Any:
    """Returns what is under the root of both terms, or of one if the other is 0; else 1."""
    if a.radicand is None and b.radicand is None:
        return None
    is_first, is_second = b.image == 0, a.image == 0
    if a.radicand is not None and b.radicand is not None:
        is_first = is_first | (a.radicand == b.radicand)
    if not (is_first.any() or is_second.any()):
        return None
    return np.where(is_first, a.factor, np.where(is_second, b.factor, ring.ONE))


def negate(a: Exact) -> Exact:
    """Negates."""
    exponential = None if a.exponential is None else ring.invert(a.exponential)
    return make_float(-a.value, ring.negate(a.image), exponential, a.radicand)


def subtract(a: Exact, b: Exact) -> Exact:
    """Subtracts."""
    return add(a, negate(b))


def multiply(a: Exact, b: Exact) -> Exact:
    """Multiplies."""
    exponential = _multiply_logarithms(a, b)
    if exponential is None:
        exponential = _multiply_logarithms(b, a)
    image, radicand = _multiply_images(a, b)
    root = None
    if a.image is b.image:
        root = np.where(a.value < 0, ring.negate(a.image), a.image)
    return make_float(a.value * b.value, image, exponential, radicand, root)


def _multiply_images(a: Exact, b: Exact) -> tuple[Any, Any]:
    """Returns image and radicand of a product: √s·√s is s, and s·√(1/s) is √s."""
    image = ring.multiply(a.image, b.image)
    if a.radicand is None and b.radicand is None:
        return image, None
    if a.radicand is None or b.radicand is None:
        plain, rooted = (a, b) if a.radicand is None else (b, a)
        radicand = np.broadcast_to(rooted.radicand, image.shape)
        turns = ring.are_inverse(plain.image, rooted.radicand)
        if turns.any():
            number, within, whole = np.broadcast_arrays(plain.image, radicand, rooted.image)
            turns &= ring.equal(whole, ring.root(within, 2))  # not c·√s with another c
            image = np.where(turns, ring.root(number, 2), image)
            radicand = np.where(turns, number, radicand)
        return image, radicand
    is_same = a.radicand == b.radicand
    corrected = ring.multiply(image, ring.correction_of_root(a.radicand))
    image = np.where(is_same, corrected, image)
    if is_same.all():
        return image, None
    return image, np.where(is_same, ring.ONE, ring.multiply(a.radicand, b.radicand))


def _multiply_logarithms(a: Exact, b: Exact) -> Any:
    """Returns exp(a·n) = exp(a)ⁿ if `a` has logarithms and `b` a few integers n; else None."""
    if a.exponential is None:
        return None
    numbers = np.unique(b.value)
    are_integers = np.isfinite(numbers) & (numbers == np.round(numbers))
    if numbers.size > FEW_INTEGERS or not are_integers.all():
        return None
    exponential = np.ones(np.broadcast_shapes(a.value.shape, b.value.shape), np.uint64)
    for n in numbers.astype(int).tolist():
        power = ring.power(a.exponential, abs(n))
        exponential = np.where(b.value == n, ring.invert(power) if n < 0 else power, exponential)
    return exponential


def divide(a: Exact, b: Exact) -> Exact:
    """Divides. A finite number by ±inf is 0."""
    under_root = None if b.radicand is None else ring.invert(b.radicand)
    inverse = Exact(1 / b.value, ring.invert(b.image), radicand=under_root)
    image, radicand = _multiply_images(a, inverse)
    vanishes = np.isinf(b.value) & np.isfinite(a.value)
    value = a.value / b.value
    return make_float(value, np.where(vanishes, ring.ZERO, image), radicand=radicand)


def exponential(a: Exact) -> Exact:
    """Exponentiates."""
    is_masked = a.value < MASKED
    return make_float(np.exp(a.value), np.where(is_masked, ring.ZERO, a.power))


def logarithm(a: Exact) -> Exact:
    """Takes the logarithm."""
    return make_float(np.log(a.value), ring.logarithm(a.image), a.image)


def _exp2(a: Exact) -> Exact:
    image = ring.exponential(ring.multiply(a.image, ring.logarithm(np.uint64(2))))
    return make_float(np.exp2(a.value), np.where(a.value < MASKED, ring.ZERO, image))


def _logistic(a: Exact) -> Exact:
    return divide(ONE, add(ONE, exponential(negate(a))))


def _square(a: Exact) -> Exact:
    return multiply(a, a)


def _maximum(a: Exact, b: Exact) -> Exact:
    return choose((a.value >= b.value) | np.isnan(a.value), a, b)


def _minimum(a: Exact, b: Exact) -> Exact:
    return choose((a.value <= b.value) | np.isnan(a.value), a, b)


def _absolute(a: Exact) -> Exact:
    return choose(a.value < 0, negate(a), a)


def _sign(a: Exact) -> Exact:
    return of_numbers(np.where(is_tie(a, ZERO), 0.0, np.sign(a.value)))


def to_integers(value: Any) -> Any:
    """Returns floats, rounded to integers where they are within rounding of one."""
    near = np.round(value)
    return np.where(np.abs(value - near) < 1e-6, near, value)


def _rounding(function: Callable) -> Callable[[Exact], Exact]:
    def round_entries(a: Exact) -> Exact:
        return of_numbers(function(to_integers(a.value)))

    return round_entries


def _remainder(a: Exact, b: Exact) -> Exact:
    quotient = ring.image_of(np.trunc(to_integers(a.value / b.value)))
    image = ring.subtract(a.image, ring.multiply(quotient, b.image))
    return make_float(np.fmod(a.value, b.value), image)


def integer_power(a: Exact, n: int) -> Exact:
    """Raises floats to an integer power, which may be negative."""
    if n < 0:
        return divide(ONE, integer_power(a, -n))
    if n == 0:
        return of_numbers(np.ones(a.value.shape))
    half = integer_power(a, n // 2) if n > 1 else ONE
    square = multiply(half, half)
    return multiply(square, a) if n % 2 else square


def _power(a: Exact, b: Exact) -> Exact:
    exponents = np.unique(b.value).astype(np.float64)
    are_halves = np.isfinite(exponents) & (2 * exponents == np.round(2 * exponents))
    if b.image is None or (exponents.size <= FEW_INTEGERS and are_halves.all()):
        shape = np.broadcast_shapes(a.value.shape, b.value.shape)
        first, *others = exponents.tolist() or [0.0]
        result = move(lambda x: np.broadcast_to(x, shape), _half_integer_power(a, first))
        for n in others:
            result = choose(b.value == n, _half_integer_power(a, n), result)
        return result
    image = ring.exponential(ring.multiply(b.image, ring.logarithm(a.image)))
    return make_float(np.power(a.value, b.value), np.where(a.image == 0, ring.ZERO, image))


def _half_integer_power(a: Exact, exponent: float) -> Exact:
    """Raises floats to n or n + 1/2, as an integer power times a root."""
    n = int(exponent)  # rounds to 0
    if n == exponent:
        return integer_power(a, n)
    root = _square_root(a) if exponent > 0 else _inverse_square_root(a)
    return multiply(integer_power(a, n), root) if n else root


def _square_root(a: Exact) -> Exact:
    image = ring.root(a.image, 2) if a.root is None else a.root
    return make_float(np.sqrt(a.value), image, radicand=a.image)


def _inverse_square_root(a: Exact) -> Exact:
    root = _square_root(a)
    return make_float(1 / root.value, ring.invert(root.image), radicand=ring.invert(a.image))


def _equal(a: Exact, b: Exact) -> Exact:
    return Exact((a.value == b.value) | is_tie(a, b))


def _less(a: Exact, b: Exact) -> Exact:
    return Exact((a.value < b.value) & ~is_tie(a, b))


def _not(a: Exact) -> Exact:
    return Exact(~a.value)


def _at_most(a: Exact, b: Exact) -> Exact:
    return Exact((a.value <= b.value) | is_tie(a, b))


FLOATS: dict[str, Callable[..., Exact]] = {
    "abs": _absolute,
    "add": add,
    "add_any": add,
    "cbrt": lambda a: make_float(np.cbrt(a.value), ring.root(a.image, 3)),
    "ceil": _rounding(np.ceil),
    "div": divide,
    "eq": _equal,
    "exp": exponential,
    "exp2": _exp2,
    "expm1": lambda a: subtract(exponential(a), ONE),
    "floor": _rounding(np.floor),
    "ge": lambda a, b: _at_most(b, a),
    "gt": lambda a, b: _less(b, a),
    "is_finite": lambda a: Exact(np.isfinite(a.value)),
    "le": _at_most,
    "log": logarithm,
    "log2": lambda a: divide(logarithm(a), logarithm(of_numbers(2.0))),
    "log1p": lambda a: logarithm(add(ONE, a)),
    "logistic": _logistic,
    "lt": _less,
    "max": _maximum,
    "min": _minimum,
    "mul": multiply,
    "ne": lambda a, b: _not(_equal(a, b)),
    "neg": negate,
    "one_minus_square": lambda a: subtract(ONE, _square(a)),
    "pow": _power,
    "rem": _remainder,
    "round": _rounding(np.round),
    "rsqrt": _inverse_square_root,
    "sign": _sign,
    "sqrt": _square_root,
    "square": _square,
    "sub": subtract,
}
"""Functions of floats by primitive."""


def _divide_integers(a: Any, b: Any) -> Any:
    b = np.where(b == 0, 1, b)
    if a.dtype.kind != "i":
        return a // b
    return np.sign(a) * np.sign(b) * (abs(a) // abs(b))


def _remainder_of_integers(a: Any, b: Any) -> Any:
    return np.fmod(a, np.where(b == 0, 1, b))


def _shift_right_logical(a: Any, b: Any) -> Any:
    unsigned = f"u{a.itemsize}"
    return (a.view(unsigned) >> b.astype(unsigned)).view(a.dtype)


INTEGERS: dict[str, Callable] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "div": _divide_integers,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "population_count": np.bitwise_count,
    "pow": np.power,
    "rem": _remainder_of_integers,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": _shift_right_logical,
    "sign": np.sign,
    "square": np.square,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
"""Functions of integers and bools by primitive, in NumPy, which wraps around as JAX does."""

for _name in ("eq", "le", "lt"):  # comparisons in a total order
    FLOATS[f"{_name}_to"] = FLOATS[_name]
    INTEGERS[f"{_name}_to"] = INTEGERS[_name]


def _igamma_grad_a(a: Any, x: Any) -> Any:
    step = 1e-5
    return (scipy.special.gammainc(a + step, x) - scipy.special.gammainc(a - step, x)) / (2 * step)


WITHOUT_LAWS: dict[str, Callable] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "bessel_i0e": scipy.special.i0e,
    "bessel_i1e": scipy.special.i1e,
    "cos": np.cos,
    "cosh": np.cosh,
    "digamma": scipy.special.psi,
    "erf": scipy.special.erf,
    "erf_inv": scipy.special.erfinv,
    "erfc": scipy.special.erfc,
    "igamma": scipy.special.gammainc,
    "igamma_grad_a": _igamma_grad_a,
    "igammac": scipy.special.gammaincc,
    "lgamma": scipy.special.gammaln,
    "nextafter": np.nextafter,
    "sin": np.sin,
    "sinh": np.sinh,
    "tan": np.tan,
    "tanh": np.tanh,
}
"""Functions of floats whose image is a hash of their operands' images.

tanh is one because (1 + p)ˣ − (1 + p)⁻ˣ has a factor p: a few of them in a row would be 0.
"""


def hash_function(name: str, xs: list[Exact]) -> Exact:
    """Applies a function of WITHOUT_LAWS."""
    value = WITHOUT_LAWS[name](*(x.value for x in xs))
    return make_float(value, ring.hash_of(name, *(x.image for x in xs)))


# ---- complex numbers -----------------------------------------------------------------------------


def to_complex(x: Exact) -> Exact:
    """Returns floats as complex numbers."""
    if x.value.dtype.kind == "c" or x.image is None:
        return x
    return Exact(x.value.astype(np.complex128), ring.pack(x.image, np.zeros_like(x.image)))


def multiply_complex(a: Any, b: Any, multiply: Callable = ring.multiply) -> Any:
    """Multiplies packed images, by a product of images."""
    (a0, a1), (b0, b1) = ring.unpack(a), ring.unpack(b)
    real = ring.subtract(multiply(a0, b0), multiply(a1, b1))
    return ring.pack(real, ring.add(multiply(a0, b1), multiply(a1, b0)))


def _conjugate(x: Any) -> Any:
    real, imaginary = ring.unpack(x)
    return ring.pack(real, ring.negate(imaginary))


def _add_complex(a: Any, b: Any) -> Any:
    pairs = zip(ring.unpack(a), ring.unpack(b), strict=True)
    return ring.pack(*(ring.add(x, y) for x, y in pairs))


def _negate_complex(a: Any) -> Any:
    return ring.pack(*map(ring.negate, ring.unpack(a)))


def _divide_complex(a: Any, b: Any) -> Any:
    conjugate = _conjugate(b)
    square, _ = ring.unpack(multiply_complex(b, conjugate))
    inverse = ring.pack(ring.invert(square), np.zeros_like(square))
    return multiply_complex(multiply_complex(a, conjugate), inverse)


_COMPLEX: dict[str, tuple[Callable, Callable]] = {
    "add": (np.add, _add_complex),
    "add_any": (np.add, _add_complex),
    "conj": (np.conj, _conjugate),
    "div": (np.divide, _divide_complex),
    "imag": (np.imag, lambda x: ring.unpack(x)[1]),
    "mul": (np.multiply, multiply_complex),
    "neg": (np.negative, _negate_complex),
    "real": (np.real, lambda x: ring.unpack(x)[0]),
    "sub": (np.subtract, lambda a, b: _add_complex(a, _negate_complex(b))),
}
"""Functions of complex numbers, and of their images."""


def apply_to_complex(name: str, xs: list[Exact]) -> Exact:
    """Applies a function of each entry to complex numbers, or to the parts of some."""
    if name == "complex":
        real, imaginary = xs
        return Exact(real.value + 1j * imaginary.value, ring.pack(real.image, imaginary.image))
    if name == "abs":
        square = multiply_complex(xs[0].image, _conjugate(xs[0].image))
        within, _ = ring.unpack(square)
        return Exact(np.abs(xs[0].value), ring.root(within, 2), radicand=within)
    if name == "exp":
        real = exponential(apply_to_complex("real", xs))
        angle = [apply_to_complex("imag", xs)]
        parts = [multiply(real, hash_function(part, angle)) for part in ("cos", "sin")]
        return apply_to_complex("complex", parts)
    if name not in _COMPLEX:
        raise Undecided("exact arithmetic has no rule for this primitive of complex numbers")
    of_values, of_images = _COMPLEX[name]
    return Exact(of_values(*(x.value for x in xs)), of_images(*(x.image for x in xs)))
