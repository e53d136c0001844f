r"""LaTeX -> sympy by math-verify's grammar, without its extraction, its units and its case folding. For workers only.

Decimals become exact fractions first, so that nothing is rounded; angles in degrees become radians inside functions.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

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
