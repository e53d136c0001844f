r"""Equality of expressions by computer algebra, for worker processes only: it may take for ever, or all memory.

math-verify reads the LaTeX (its grammar, without its extraction, its units and its case folding). Decimals become
exact fractions before that, so that nothing is rounded. Two numbers are equal when their difference is zero to 300
digits; two expressions with variables when they agree at rational points, with exact arithmetic where both are rational
functions.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy import Basic, Expr, MatrixBase, Rational
from sympy.core.relational import Relational

from oblr_megatron.rewards.compare import equal_answers

MAX_LOG10 = 5000.0  # numbers with more digits are not worked out
DIGITS = 300
MIN_POINTS = 3

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp)(?![A-Za-z])"
)
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_SQUARE_ROOT = re.compile(r"\\?sqrt\s*\(([^()]*)\)")
_FACTORIAL_POWER = re.compile(r"([0-9A-Za-z])!\s*\^")
_ROOT = re.compile(r"\\sqrt\s*\[([^\[\]]*)\]\s*([0-9A-Za-z])")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_ANGLE = re.compile(r"([0-9]+|\\[A-Za-z]+|[A-Za-z])\s*°")


def judge(prediction: str, gold: str) -> float:
    """1.0 if an extracted answer equals the gold one, else 0.0; the workers' entry."""
    return float(equal_answers(prediction, gold, equal_expressions))


def warm_up() -> None:
    """Fill the grammar's caches once, before workers are forked."""
    for text in (
        r"\frac{1}{2}+x^{2}",
        r"(2\sqrt{3}, \pi]",
        r"x \ge \sin(2 n)!",
        r"\log_{2} 3",
        r"\left\{a, b_1\right\}",
    ):
        read(text)


def equal_expressions(gold: str, given: str) -> bool:
    """Whether two normalised expressions are equal; what cannot be read equals nothing."""
    try:
        expected, found = read(gold), read(given)
        return _equal(expected, found)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception:  # noqa: BLE001 - the grammar and sympy raise whatever they like on text that makes no sense
        return False


@lru_cache(maxsize=2048)  # a group's responses share the gold answer, and often theirs
def read(text: str) -> Any:
    """LaTeX to sympy, without evaluating.

    Raises:
        Exception: of any kind, if the text makes no sense.
    """
    text = _FUNCTION.sub(r"\\\1", _SQUARE_ROOT.sub(r"\\sqrt{\1}", text))
    text = _FACTORIAL_POWER.sub(r"(\1!)^", text)
    text = _ROOT.sub(r"\\sqrt[\1]{\2}", text)
    text = _ANGLE.sub(r"(\\frac{\1 \\pi}{180})", text) if _TRIGONOMETRIC.search(text) else text.replace("°", "")
    text = _DECIMAL.sub(_as_fraction, text)
    text = normalize_latex(text, _NORMALIZATION)
    return latex2sympy(
        text, is_real=True, convert_degrees=False, normalization_config=None, conversion_config=_CONVERSION
    )


def _as_fraction(match: re.Match[str]) -> str:
    whole, decimals = match.groups()
    return f"(\\frac{{{whole}{decimals}}}{{{10 ** len(decimals)}}})"


def _equal(gold: Any, given: Any) -> bool:
    if isinstance(gold, MatrixBase) and isinstance(given, MatrixBase):
        return gold.shape == given.shape and all(map(_equal, gold.flat(), given.flat()))
    if isinstance(gold, Relational) and isinstance(given, Relational):
        return _equal_relations(gold, given)
    if isinstance(gold, Expr) and isinstance(given, Expr):
        return _equal_scalars(gold, given)
    if (
        isinstance(gold, Basic)
        and isinstance(given, Basic)
        and not isinstance(gold, Expr)
        and not isinstance(given, Expr)
    ):
        return bool(verify(gold, given, timeout_seconds=None))  # sets of all kinds
    return False


def _equal_relations(gold: Relational, given: Relational) -> bool:
    """The same relation: one difference of sides is a constant multiple (positive, for inequalities) of the other."""
    equation = isinstance(gold, sympy.Eq)
    if equation != isinstance(given, sympy.Eq) or isinstance(gold, sympy.Ne) != isinstance(given, sympy.Ne):
        return False
    differences = [_evaluate(side) for side in (_as_positive(gold), _as_positive(given))]
    if not equation and gold.rel_op.rstrip("=") != given.rel_op.rstrip("=") and len(gold.rel_op) != len(given.rel_op):
        return False
    if len(gold.rel_op) != len(given.rel_op):  # strict or not
        return False
    a, b = differences
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for values in _points(len(symbols), integers=False):
        at = dict(zip(symbols, values, strict=True))
        above, below = a.subs(at), b.subs(at)
        if _vanishes(above) or _vanishes(below):
            continue
        factor = sympy.nsimplify(above / below)
        return (equation or factor.is_positive is True) and _equal_scalars(a, factor * b)
    return False


def _as_positive(relation: Relational) -> Expr:
    """lhs - rhs for > and =, rhs - lhs for <."""
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
    """Whether two expressions take the same values wherever the gold one is a real number."""
    discrete = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.factorial, sympy.binomial)
    integers = any(value.has(*discrete) for value in (gold, given))
    compared = 0
    for values in _points(len(symbols), integers=integers):
        at = dict(zip(symbols, values, strict=True))
        expected, found = gold.subs(at), given.subs(at)
        if not _is_real_number(expected):
            continue
        if found.has(sympy.nan, sympy.zoo, sympy.oo) or not _vanishes(expected - found):
            return False
        compared += 1
    return compared >= MIN_POINTS or sympy.simplify(gold - given) == 0


def _points(count: int, *, integers: bool) -> list[list[Rational]]:
    """Fixed points for `count` variables: fractions of both signs, or small positive integers of all parities."""
    if integers:
        return [[Rational(1 + (k * (2 * j + 3) + 5 * j) % 17) for j in range(count)] for k in range(17)]
    positive = [[Rational(7 + 4 * k + 3 * j, 5 + (k + 2 * j) % 7) for j in range(count)] for k in range(4)]
    whole = [[Rational(2 + k + (k + 2) * j) for j in range(count)] for k in range(3)]
    mixed = [[(-1) ** (k >> (j % 2)) * Rational(11 + 3 * k + 5 * j, 6 + j) for j in range(count)] for k in range(4)]
    return positive + whole + mixed


def _is_real_number(value: Expr) -> bool:
    if value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return False
    return bool(value.is_real) or _vanishes(sympy.im(value))


def _vanishes(value: Expr) -> bool:
    """Whether a number is zero: exactly for rationals, else to DIGITS significant digits of what was subtracted."""
    if value.is_Rational:
        return bool(value == 0)
    number = value.evalf(15, maxn=DIGITS)
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    return all(part == 0 or getattr(part, "_prec", 0) == 1 for part in number.as_real_imag())


def _evaluate(value: Expr) -> Expr:
    """Work the expression out; odd roots of negative numbers are the real ones, as in school."""

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
    """i is the imaginary unit where no other variable occurs beside it."""
    names = {symbol.name for symbol in gold.free_symbols | given.free_symbols}
    if names != {"i"}:
        return gold, given
    unit = dict.fromkeys(gold.free_symbols | given.free_symbols, sympy.I)
    return sympy.expand(gold.subs(unit)), sympy.expand(given.subs(unit))


def _log10_bound(value: Basic) -> float:
    """A bound on log10 of any number that working out the expression would write down; infinite for power towers."""
    if isinstance(value, sympy.Integer):
        return value.p.bit_length() * 0.302
    bounds = [_log10_bound(argument) for argument in value.args]
    largest = max(bounds, default=0.0)
    if largest > MAX_LOG10:
        return math.inf
    if isinstance(value, sympy.Pow) and not value.args[1].free_symbols:
        return max(largest, 1.0) * (10.0 ** min(bounds[1], 12.0)) if bounds[1] > 0 else largest
    if isinstance(value, sympy.factorial | sympy.binomial) and not value.free_symbols:
        return 10.0 ** min(largest, 12.0) * max(largest, 1.0)
    return sum(bounds) if isinstance(value, sympy.Mul) else largest + math.log10(len(bounds) + 1)
