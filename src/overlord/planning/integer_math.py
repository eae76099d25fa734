"""Exponential, logarithm and cosine in integers, so that every machine gets the same bits.

Weights become integers of 2^40 (``draw.py``). So a last bit that differs between two maths
libraries can change the stream. Rounding a library's result makes that rare, never impossible: a
value close to a rounding border still falls to either side. This module uses integer arithmetic in
units of 2^-80, and one correctly rounded division at the end.
"""

from __future__ import annotations

BITS = 80
ONE = 1 << BITS
_TERMS = 12  # of exp's series below 1/16: the first one left out is below 2^-80


def _arctan_of_one_over(n: int) -> int:
    total, power, k = 0, (ONE << 16) // n, 1
    while power:
        total += power // k if k % 4 == 1 else -(power // k)
        power, k = power // (n * n), k + 2
    return total


LN2 = sum((ONE << 16) // (k << k) for k in range(1, BITS + 16)) >> 16
PI = 4 * (4 * _arctan_of_one_over(5) - _arctan_of_one_over(239)) >> 16


def exp_down(x: float) -> float:
    """Return ``exp(x)`` for x <= 0, exact to 2^-70; 0 for x below -64.

    The zero makes no difference to weights, whose unit is 2^-40.
    """
    assert x <= 0, "softmax and powers are taken relative to their largest term"
    if x < -64:
        return 0.0
    n, d = (-x).as_integer_ratio()
    return _exp_down((n << BITS) // d) / ONE


def _exp_down(y: int) -> int:
    """Return ``exp(-y)``; y >= 0 and the result are integers in units of 2^-80.

    Whole multiples of ln 2 become halvings. A series gives the exponential of a sixteenth of the
    rest, which is squared four times.
    """
    halvings, rest = divmod(y, LN2)
    z = rest >> 4
    total = term = ONE
    for k in range(1, _TERMS):
        term = -(term * z >> BITS) // k
        total += term
    for _ in range(4):
        total = total * total >> BITS
    return total >> halvings


def log(x: float) -> int:
    """Return the natural logarithm of x > 0, in units of 2^-80 (exact to about 2^-60)."""
    n, d = x.as_integer_ratio()
    whole = n.bit_length() - d.bit_length()
    m = (n << BITS) // (d << whole) if whole >= 0 else (n << BITS - whole) // d
    if m < ONE:
        m, whole = m << 1, whole - 1
    bits = 0
    for _ in range(64):  # squaring doubles the logarithm: each round gives one binary digit
        m = m * m >> BITS
        bits <<= 1
        if m >= 2 * ONE:
            m, bits = m >> 1, bits | 1
    return ((whole << 64) + bits) * LN2 >> 64


def power_below_one(log_ratio: int, exponent: float) -> float:
    """Return ``ratio ** exponent`` for a ratio from 0 to 1 and an exponent of at least 0.

    ``log_ratio`` is the logarithm of the ratio as from ``log``, in units of 2^-80. Results below
    exp(-64) are 0.
    """
    assert log_ratio <= 0 <= exponent
    n, d = exponent.as_integer_ratio()
    y = -log_ratio * n // d
    return _exp_down(y) / ONE if y < 64 * ONE else 0.0


def half_cosine(k: int, n: int) -> float:
    """Return ``(1 - cos(pi k/n)) / 2`` for 0 <= k <= n, a smooth curve from 0 to 1."""
    assert 0 <= k <= n
    # the curve is symmetric, and the series of the sine is short in its lower half
    if 2 * k > n:
        return 1.0 - half_cosine(n - k, n)
    x = PI * k // (2 * n)
    square, term, sine, j = x * x >> BITS, x, 0, 1
    while term:
        sine += term if j % 4 == 1 else -term
        term, j = (term * square >> BITS) // ((j + 1) * (j + 2)), j + 2
    return (sine * sine >> BITS) / ONE
