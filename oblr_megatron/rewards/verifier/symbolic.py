r"""Equality of expressions by computer algebra. For worker processes only: it may need unbounded time and memory.

Two numbers are equal if their difference is zero to 300 digits. Two expressions with variables are equal if they agree
at fixed rational points; arithmetic is exact for rational functions. math-verify compares sets of different form.
"""

from __future__ import annotations

import math
import re
from typing import Any

import sympy
from math_verify import verify
from sympy import Basic, Expr, MatrixBase, Rational
from sympy.core.relational import Relational
from sympy.matrices.expressions import MatAdd, MatMul, MatrixExpr

from oblr_megatron.rewards.verifier.compare import equal_answers
from oblr_megatron.rewards.verifier.latex import read

MAX_LOG10 = 2e5  # expressions that contain numbers with more digits are not evaluated
DIGITS = 300
MIN_POINTS = 3
FAR = ((1, 97, 3), (-1, 1003, 7), (-1, 97, 3))  # signs, numerators and denominators of large test points
FAR_INTEGERS = (40, 101, 1009)
_UNREAD = re.compile(r"[^\s']'+|(?<![0-9.])[0-9.]+\s*_\{(?:[^{}]|\{[^{}]*\})*\}")
"""Primes, and indices of numbers: the grammar leaves them out."""


def score(prediction: str, gold: str) -> float:
    """1.0 if an extracted answer equals the gold answer, else 0.0. Runs in the worker processes."""
    return float(equal_answers(prediction, gold, equal_expressions))


def equal_expressions(gold: str, given: str) -> bool:
    """Whether two normalized expressions are equal; False if one cannot be parsed."""
    if set(_UNREAD.findall(gold)) != set(_UNREAD.findall(given)):
        return False
    try:
        expected, actual = read(gold), read(given)
        if isinstance(actual, MatrixExpr) and not _is_linear(actual):
            return False
        return _equal(_matrix(expected), _matrix(actual))
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception:  # noqa: BLE001 - on malformed text, the grammar and sympy raise exceptions of any class
        return False


def _equal(gold: Any, given: Any) -> bool:
    if isinstance(gold, MatrixBase) and isinstance(given, MatrixBase):
        return gold.shape == given.shape and all(map(_equal, gold.flat(), given.flat()))
    if isinstance(gold, Relational) and isinstance(given, Relational):
        return _equal_relations(gold, given)
    if isinstance(gold, Expr) and isinstance(given, Expr):
        return _equal_scalars(gold, given)
    if all(isinstance(side, Basic) and not isinstance(side, Expr) for side in (gold, given)):
        return bool(verify(gold, given, timeout_seconds=None))  # sets of all kinds
    return False


def _matrix(value: Any) -> Any:
    """The matrix that an expression of matrices equals; anything else unchanged."""
    return value.doit() if isinstance(value, MatrixExpr) and _log10_bound(value) <= MAX_LOG10 else value


def _is_linear(value: MatrixExpr) -> bool:
    """Whether matrices are only added and multiplied by scalars. A product of matrices may be the question itself."""
    matrices = [part for part in value.args if isinstance(part, (MatrixBase, MatrixExpr))]
    if isinstance(value, MatrixBase):
        return True
    kinds = isinstance(value, MatAdd) or (isinstance(value, MatMul) and len(matrices) == 1)
    return kinds and all(map(_is_linear, matrices))


def _equal_relations(gold: Relational, given: Relational) -> bool:
    """Equal if one difference of sides is a constant multiple of the other, with a positive factor for inequalities."""
    kind, other = (str(side.rel_op).replace(">", "<") for side in (gold, given))  # "<=" stands for ">=" too
    if kind != other:
        return False
    a, b = _evaluate(_difference(gold)), _evaluate(_difference(given))
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for values in _points([False] * len(symbols)):
        at = dict(zip(symbols, values, strict=True))
        above, below = a.subs(at), b.subs(at)
        if _vanishes(above) or _vanishes(below):
            continue
        factor = above / below
        return (kind in ("==", "!=") or bool(factor.evalf() > 0)) and _equal_scalars(a, factor * b)
    return False


def _difference(relation: Relational) -> Expr:
    """lhs - rhs for = and >, rhs - lhs for <."""
    difference = relation.lhs - relation.rhs
    return -difference if "<" in relation.rel_op else difference


def _equal_scalars(gold: Expr, given: Expr) -> bool:
    if _log10_bound(gold) > MAX_LOG10 or _log10_bound(given) > MAX_LOG10:
        return False
    gold, given = _evaluate(gold), _evaluate(given)
    if gold == given:
        return gold not in (sympy.nan, sympy.zoo)
    if any(value.has(sympy.oo, -sympy.oo, sympy.nan, sympy.zoo) for value in (gold, given)):
        return False
    gold, given = _imaginary_unit(gold, given)
    symbols = sorted(gold.free_symbols | given.free_symbols, key=str)
    if not symbols:
        return _vanishes(gold - given)
    return _agree(gold, given, symbols)


def _agree(gold: Expr, given: Expr, symbols: list[Any]) -> bool:
    """Whether two expressions have equal values at all test points where the gold expression is real."""
    compared = 0
    counted = any(value.has(sympy.Mod, sympy.factorial, sympy.binomial) for value in (gold, given))
    for values in _points(_integers(symbols, gold, given), large=not counted):
        at = dict(zip(symbols, values, strict=True))
        expected, actual = gold.subs(at), given.subs(at)
        if not _is_real_number(expected):
            continue
        if actual.has(sympy.nan, sympy.zoo, sympy.oo) or not _vanishes(expected - actual):
            return False
        compared += 1
    return compared >= MIN_POINTS or sympy.simplify(gold - given) == 0


def _integers(symbols: list[Any], *values: Expr) -> list[bool]:
    """Variables that stand for integers. With a floor or ceiling only the usual ones do: it changes no integer."""
    if any(value.has(sympy.Mod, sympy.factorial, sympy.binomial) for value in values):
        return [True] * len(symbols)
    rounded = any(value.has(sympy.floor, sympy.ceiling) for value in values)
    return [rounded and symbol.name[0] in "ijklmnpqN" for symbol in symbols]


def _points(integers: list[bool], *, large: bool = False) -> list[list[Rational]]:
    """Fixed test points: a variable gets fractions of both signs, or positive integers of both parities.

    Large ones tell |x - 5| from 5 - x, and n from min(n, 20).
    """
    count = len(integers)
    positive = [[Rational(7 + 4 * k + 3 * j, 5 + (k + 2 * j) % 7) for j in range(count)] for k in range(4)]
    whole = [[Rational(2 + k + (k + 2) * j) for j in range(count)] for k in range(3)]
    mixed = [[(-1) ** (k >> (j % 2)) * Rational(11 + 3 * k + 5 * j, 6 + j) for j in range(count)] for k in range(4)]
    fractions = positive + whole + mixed
    far = [[sign * Rational(n + 4 * j, below) for j in range(count)] for sign, n, below in FAR] if large else []
    if not any(integers):
        return fractions + far
    small = [[Rational(1 + (k * (2 * j + 3) + 5 * j) % 17) for j in range(count)] for k in range(17)]
    apart = [[Rational(n + j) for j in range(count)] for n in FAR_INTEGERS[: len(far)]]
    rows = zip([*small, *apart], [*(fractions[k % 11] for k in range(17)), *far], strict=True)
    return [[whole[j] if integer else other[j] for j, integer in enumerate(integers)] for whole, other in rows]


def _is_real_number(value: Expr) -> bool:
    if value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return False
    return bool(value.is_real) or _vanishes(sympy.im(value))


def _vanishes(value: Expr) -> bool:
    """Whether a number is zero: exactly for rationals, else to DIGITS significant digits of its terms."""
    if value.is_Rational:
        return bool(value == 0)
    number = value.evalf(15, maxn=DIGITS)
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    return all(part == 0 or getattr(part, "_prec", 0) == 1 for part in number.as_real_imag())


def _evaluate(value: Expr) -> Expr:
    """Evaluate an expression. Odd roots of negative numbers are real."""

    def real_root(power: Expr) -> Expr:
        base, exponent = power.as_base_exp()
        sign = -1 if exponent.p % 2 else 1
        return sign * (-base) ** exponent

    def is_odd_root(power: Expr) -> bool:
        if not power.is_Pow:
            return False
        base, exponent = power.as_base_exp()
        return bool(
            base.is_Rational and base.is_negative and exponent.is_Rational and exponent.q % 2 and exponent.q > 1
        )

    return value.doit().replace(is_odd_root, real_root)


def _imaginary_unit(gold: Expr, given: Expr) -> tuple[Expr, Expr]:
    """Replace i by the imaginary unit if it is the only variable."""
    unit = dict.fromkeys(gold.free_symbols | given.free_symbols, sympy.I)
    if {symbol.name for symbol in unit} != {"i"}:
        return gold, given
    return sympy.expand(gold.subs(unit)), sympy.expand(given.subs(unit))


def _log10_bound(value: Basic) -> float:
    """Upper bound on log10 of every number that occurs when the expression is evaluated; infinite for power towers."""
    if isinstance(value, sympy.Rational):
        return math.log10(max(abs(value.p), value.q))
    bounds = [_log10_bound(argument) for argument in value.args]
    largest = max(bounds, default=0.0)
    if largest > MAX_LOG10:
        return math.inf
    if isinstance(value, sympy.Pow) and not value.args[1].free_symbols:
        base = bounds[0] if value.args[0].is_Integer else max(bounds[0], 1.0)  # variables stand for fractions
        return max(largest, base * 10.0 ** min(bounds[1], 12.0))
    if isinstance(value, sympy.factorial) and not value.free_symbols:
        return max(largest, math.lgamma(10.0 ** min(largest, 12.0) + 1) / math.log(10))
    if isinstance(value, sympy.binomial) and not value.free_symbols:
        return max(largest, largest * 10.0 ** min(bounds[1], 12.0))
    return sum(bounds) if isinstance(value, sympy.Mul) else largest + math.log10(len(bounds) + 1)
