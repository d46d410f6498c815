"""The ring Z/p⁴, p = 251, in which sums, products, quotients and exponentials are exact.

An element stands for a float. 2 is a unit, so every float has an image, m·2ᵉ, and sums, products
and quotients by units do not depend on their order. exp(a) = (1 + p)ᵃ, so exp(a + b) is
exp(a)·exp(b), and log is its inverse, except in the highest of the four digits, which comparisons
therefore leave out (COMPARED). Roots are powers, so √(a·b) = √a·√b. No ring has √a·√a = a too, as
-1 is the image of positive numbers a, of which √(a·a) is 1; an Exact notes what is under its root.
A function without such laws is a hash of its operands.

Two programs that compute the same function have the same images. Those of two other programs agree
in an entry by chance with a probability of about 1/p³ for a random input, as polynomials do by the
lemma of Schwartz and Zippel; exp is a polynomial here. The idea is that of FpSan (Triton's
programming guide, chapter 3) and of "Identity Testing for Circuits with Exponentiation Gates" (ITCS
2026, arXiv 2506.04529).

Elements are NumPy arrays of uint64 below MODULUS, which is below 2³², so a product fits.
"""

import fractions
import functools
import math
import zlib
from typing import Any

import numpy as np

PRIME, DIGITS = 251, 4
MODULUS = PRIME**DIGITS
COMPARED = PRIME ** (DIGITS - 1)
"""Elements are equal if they are equal modulo this."""
Element = np.ndarray | np.uint64
_U = np.uint64
NAN, INFINITE, MINUS_INFINITE = _U(123456789), _U(987654321), _U(MODULUS - 987654321)
"""Images of nan, inf and -inf."""
_EXPONENTS = 1300
_POWERS_OF_TWO = np.array([pow(2, e, MODULUS) for e in range(-_EXPONENTS, _EXPONENTS)], _U)
_INVERSES = np.array([0] + [pow(i, -1, PRIME) for i in range(1, PRIME)], _U)
_LARGEST_DENOMINATORS = 16, 128, 2048
ZERO, ONE = _U(0), _U(1)


def add(a: Element, b: Element) -> Any:
    """Adds."""
    return (a + b) % MODULUS


def subtract(a: Element, b: Element) -> Any:
    """Subtracts."""
    return (a + (MODULUS - b)) % MODULUS


def negate(a: Element) -> Any:
    """Negates."""
    return (MODULUS - a) % MODULUS


def multiply(a: Element, b: Element) -> Any:
    """Multiplies."""
    return a * b % MODULUS


def equal(a: Element, b: Element) -> Any:
    """True where two elements are equal."""
    return a % COMPARED == b % COMPARED


# ---- images of numbers ---------------------------------------------------------------------------


def image_of(x: Any) -> Any:
    """Returns the images of floats m·2ᵉ."""
    x = np.asarray(x, np.float64)
    finite = np.isfinite(x)
    mantissa, exponent = np.frexp(np.where(finite, x, 0.0))
    m = (np.ldexp(mantissa, 53).astype(np.int64) % MODULUS).astype(_U)
    return mark(x, multiply(m, _POWERS_OF_TWO[exponent - 53 + _EXPONENTS]))


def image_of_integers(x: np.ndarray) -> Any:
    """Returns the images of integers."""
    if x.dtype.kind == "u":
        return x.astype(_U) % MODULUS
    return (x.astype(np.int64) % MODULUS).astype(_U)


@functools.cache
def image_of_literal(x: float, dtype: Any) -> np.uint64:
    """Returns the image of a number of a program: of the simplest fraction that rounds to it.

    So 0.1 is 1/10 in each dtype, and 0.9 + 0.1 is 1.
    """
    for limit in _LARGEST_DENOMINATORS if math.isfinite(x) else ():
        f = fractions.Fraction(x).limit_denominator(limit)
        if float(np.asarray(float(f), dtype)) == x and f.denominator % PRIME:
            return _U(f.numerator * pow(f.denominator, -1, MODULUS) % MODULUS)
    return _U(image_of(x))


def mark(x: Any, image: Element) -> Any:
    """Returns `image` where the float `x` is finite, and the image of nan or ±inf elsewhere."""
    finite = np.isfinite(x)
    if finite.all():
        return image
    special = np.where(np.isnan(x), NAN, np.where(x > 0, INFINITE, MINUS_INFINITE))
    return np.where(finite, image, special)


# ---- quotients, powers, exponentials -------------------------------------------------------------


def split_unit(x: Element) -> tuple[Any, Any]:
    """Returns (u, k) of x = pᵏ·u with a unit u; (1, DIGITS) of 0."""
    u = x
    k = np.zeros(np.shape(x), np.int64)
    while (divides := (u % PRIME == 0) & (u > 0)).any():
        u = np.where(divides, u // PRIME, u)
        k = k + divides
    return np.where(u == 0, ONE, u), np.where(u == 0, DIGITS, k)


def invert(x: Element) -> Any:
    """Returns the inverses of units. It is multiplicative on the whole ring."""
    u, k = split_unit(x)
    y = _INVERSES[u % PRIME]
    for _ in range(2):  # each step of Newton's method doubles the digits
        y = multiply(y, subtract(_U(2), multiply(u, y)))
    return multiply(y, _MULTIPLICATIVE[k])


_MULTIPLICATIVE = np.array([pow(1234577, k, MODULUS) for k in range(DIGITS + 1)], _U)
"""What p⁰, p¹, … become where p has no inverse."""


def power(x: Element, n: int) -> Any:
    """Returns xⁿ for n ≥ 0."""
    result = np.ones_like(x)
    while n:
        if n & 1:
            result = multiply(result, x)
        x = multiply(x, x)
        n >>= 1
    return result


_HALF, _THIRD = (_U(pow(i, -1, MODULUS)) for i in (2, 3))


def exponential(x: Element) -> Any:
    """Returns (1 + p)ˣ = 1 + p·x + p²·x·(x−1)/2 + p³·x·(x−1)·(x−2)/6."""
    two = multiply(multiply(x, subtract(x, ONE)), _HALF)
    three = multiply(multiply(two, subtract(x, _U(2))), _THIRD)
    first = PRIME * (x % COMPARED)
    return (1 + first + PRIME**2 * (two % PRIME**2) + PRIME**3 * (three % PRIME)) % MODULUS


def _logarithm_of_one_plus(y: Element) -> Any:
    """Returns log(y)/p of y = 1 + p·z modulo p³: z − p·z²/2 + p²·z³/3."""
    z = (subtract(y, ONE) // PRIME) % COMPARED
    square = multiply(z, z)
    cubic = multiply(_U(PRIME**2), multiply(_THIRD, multiply(z, square)))
    return subtract(add(z, cubic), multiply(_U(PRIME), multiply(_HALF, square))) % COMPARED


_BASE = multiply(invert(_logarithm_of_one_plus(_U(1 + PRIME))), invert(_U(PRIME - 1)))


def logarithm(x: Element) -> Any:
    """Inverts `exponential`. log(a·b) = log(a) + log(b); roots of 1 have the logarithm 0."""
    u, k = split_unit(x)
    of_unit = multiply(_logarithm_of_one_plus(power(u, PRIME - 1)), _BASE)
    return add(of_unit, _U(7654321) * k.astype(_U) % MODULUS) % COMPARED


def _exponent_of_root(n: int) -> int:
    """Returns e such that x ↦ xᵉ is one-to-one on units, and inverts x ↦ xⁿ where that is."""
    invertible = PRIME - 1
    while (common := math.gcd(invertible, n)) > 1:
        invertible //= common
    stays = (PRIME - 1) // invertible  # of its elements there are no n-th roots
    e = 0
    modulus = 1
    of_part = pow(n, -1, invertible) if invertible > 1 else 0
    residues = (invertible, of_part), (stays, 1 % stays), (COMPARED, pow(n, -1, COMPARED))
    for part, residue in residues:
        if part > 1:
            e += modulus * ((residue - e) * pow(modulus, -1, part) % part)
            modulus *= part
    return e


_ROOTS = {n: _exponent_of_root(n) for n in (2, 3)}
_ROOTS_OF_P = {n: invert(power(_MULTIPLICATIVE[1], _ROOTS[n])) for n in (2, 3)}
"""The roots of p, such that root(invert(x)) is invert(root(x))."""


def root(x: Element, n: int) -> Any:
    """Returns the square roots (n = 2) or cubic roots (n = 3), which are multiplicative."""
    u, k = split_unit(x)
    y = power(u, _ROOTS[n])
    for i in range(1, DIGITS):
        y = np.where(k >= i, multiply(y, _ROOTS_OF_P[n]), y)
    return np.where(k == DIGITS, ZERO, y)


_OF_SQUARES = np.array(
    [1 if pow(i, PRIME // 2, PRIME) == 1 else MODULUS - 1 for i in range(PRIME)], _U
)
"""x over the square of root(x, 2), by the last digit of a unit x."""


def correction_of_root(x: Element) -> Any:
    """Returns what the square of root(x, 2) must be multiplied by to be x: ±1 for units."""
    last = x % PRIME
    factor = np.asarray(_OF_SQUARES[last])
    is_other = last == 0
    others = np.asarray(x)[is_other]
    factor[is_other] = multiply(others, invert(power(root(others, 2), 2)))
    return factor


def are_inverse(x: Element, y: Element) -> Any:
    """True where one of two elements is the inverse of the other."""
    product = np.asarray(x * y % COMPARED)
    found = np.asarray(product == 1)
    is_other = product % PRIME == 0
    a, b = (np.broadcast_to(z, product.shape)[is_other] for z in (x, y))
    found[is_other] = equal(invert(a), b) | equal(a, invert(b))
    return found


MOST_PRODUCTS = 2**17
"""Number of products of entries in one call of BLAS. OpenBLAS starts threads from 2¹⁸ on."""


def matmul(a: np.ndarray, b: np.ndarray) -> Any:
    """Multiplies matrices, by float64 products of halves of 16 bits, exact up to 2¹⁹ terms."""
    a0, a1, b0, b1 = (half.astype(np.float64) for x in (a, b) for half in _halves(x))
    low = multiply_matrices(a0, b0)
    high = multiply_matrices(a1, b1)
    middle = multiply_matrices(a0 + a1, b0 + b1) - low - high
    return join_halves(low, middle, high)


def multiply_matrices(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiplies matrices of floats, in parts for which no BLAS starts threads.

    A run shares its host with devices and compilers, where threads wait longer than they work.
    """
    rows, terms = a.shape[-2:]
    parts = min(rows, rows * terms * b.shape[-1] // MOST_PRODUCTS + 1)
    if parts < 2:
        return a @ b
    return np.concatenate([part @ b for part in np.array_split(a, parts, -2)], -2)


def _halves(x: np.ndarray) -> tuple[Any, Any]:
    return x & _U(0xFFFF), x >> _U(16)


def split_halves(x: np.ndarray) -> tuple[Any, Any]:
    """Returns the lower and the upper 16 bits as floats."""
    low, high = _halves(x)
    return low.astype(np.float64), high.astype(np.float64)


def join_halves(low: np.ndarray, middle: np.ndarray, high: np.ndarray) -> Any:
    """Returns low + 2¹⁶·middle + 2³²·high of floats that are integers."""
    low, middle, high = (x.astype(_U) % MODULUS for x in (low, middle, high))
    return (low + middle * _U(2**16) % MODULUS + high * _U(2**32 % MODULUS) % MODULUS) % MODULUS


def hash_of(name: str, *xs: np.ndarray) -> Any:
    """Hashes elements and integers, by splitmix64: the value of a function that has no laws."""
    h = _U(zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 & (2**64 - 1))
    for x in xs:
        h = h ^ (x % COMPARED if x.dtype == _U else x.astype(np.int64).astype(_U))
        h = (h ^ (h >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> _U(27))) * _U(0x94D049BB133111EB)
        h = h ^ (h >> _U(31))
    return h % MODULUS


# ---- complex numbers -----------------------------------------------------------------------------


def pack(real: Element, imaginary: Element) -> Any:
    """Packs the two images of a complex number into one uint64."""
    return real | (imaginary << _U(32))


def unpack(x: Element) -> tuple[Any, Any]:
    """Inverts `pack`."""
    return x & _U(0xFFFFFFFF), x >> _U(32)
