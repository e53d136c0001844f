r"""LaTeX -> sympy with math-verify's grammar, without its extraction, units and case folding. In worker processes only.

Decimals become exact fractions, so nothing is rounded. Inside trigonometric functions, degrees become radians.

ANTLR's SLL prediction is tried first, because its tables are cached between texts. If it parses a text, full LL
prediction gives the same tree; if it fails, the text is parsed again with full prediction.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy

from oblr_megatron.rewards.verifier.tex import FUNCTIONS

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_FUNCTION = re.compile(rf"(?<![A-Za-z\\])({FUNCTIONS})")
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_FACTORIAL_POWER = re.compile(r"([0-9]+|[A-Za-z])!\s*\^")
_WHOLE = r"(?:([0-9]+)|\(\s*([0-9]+)\s*\))"
_FRACTION_TIMES = re.compile(  # 1/2 x and 1/2\pi are x/2 and \pi/2; the grammar reads a product below the line
    rf"((?:^|[-+=<>(\[{{,])\s*){_WHOLE}\s*/\s*{_WHOLE}(?=\s+[A-Za-z(\\]|\\(?:sqrt|pi)(?![A-Za-z]))"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_TIMES_BRACKET = re.compile(r"(?<![0-9.])([0-9.]+)\s*\(")  # the grammar reads 2(\frac{1}{2}) as a mixed number
_POWER_T = re.compile(r"(?<!matrix\})\^\s*(?:\{\s*T\s*\}|T)")  # the grammar drops it, as the transpose of a scalar
_LETTER = re.compile(r"\\Gamma(?![A-Za-z])(?!\s*\()|\\[A-Za-z]+|I")
_OTHER_LETTERS = {r"\gamma": r"\varsigma ", r"\Gamma": r"\varpi ", "I": r"\wp "}
"""Letter -> a letter that no answer has. The grammar takes the first for a constant, and drops its power and index."""
_FUNCTION_ARGUMENT = re.compile(rf"({FUNCTIONS})\s*\{{(\([^{{}}]*\))\}}")  # \sin{(x)}^{2} is \sin(x)^{2}
_WHOLE_AND_FRACTION = re.compile(r"(?<![0-9.])([0-9]+)\s*(\\frac\{\s*([0-9]+)\s*\}\{\s*([0-9]+)\s*\})")
_ANGLE = re.compile(r"([0-9]+|\\[A-Za-z]+|[A-Za-z])\s*°")


@lru_cache(maxsize=2048)  # the responses of a group share the gold answer, and often their answers
def read(text: str) -> Any:
    """LaTeX to sympy, without evaluation.

    Raises:
        Exception: of any class, if the text cannot be parsed.
    """
    text = _FUNCTION_ARGUMENT.sub(r"\1\2", _FUNCTION.sub(r"\\\1", text))
    text = _FACTORIAL_POWER.sub(r"(\1!)^", text)
    text = _FRACTION_TIMES.sub(r"\1\\frac{\2\3}{\4\5}", text)
    text = _ANGLE.sub(r"(\\frac{\1 \\pi}{180})", text) if _TRIGONOMETRIC.search(text) else text.replace("°", "")
    text = _LETTER.sub(lambda match: _OTHER_LETTERS.get(match.group(), match.group()), _DECIMAL.sub(_as_fraction, text))
    text = _POWER_T.sub("^{(T)}", text)
    text = _TIMES_BRACKET.sub(r"\1 \\cdot (", text)
    text = _WHOLE_AND_FRACTION.sub(_mixed_or_product, text)
    text = normalize_latex(text, _NORMALIZATION)
    try:
        return _Fast(None, True, False, _CONVERSION).parse(text)
    except Exception:  # noqa: BLE001 - the library raises many classes; full prediction may still parse the text
        return latex2sympy(
            text, is_real=True, convert_degrees=False, normalization_config=None, conversion_config=_CONVERSION
        )


class _Fast(_Latex2Sympy):
    """The library's parser with SLL prediction."""

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = PredictionMode.SLL
        return parser


def _as_fraction(match: re.Match[str]) -> str:
    whole, decimals = match.groups()
    return f"(\\frac{{{whole}{decimals}}}{{{10 ** len(decimals)}}})"


def _mixed_or_product(match: re.Match[str]) -> str:
    """A proper fraction makes a mixed number, also before a factor. Any other, or one after a power, is a factor."""
    whole, fraction, above, below = match.groups()
    if int(above) >= int(below) or match.string[: match.start()].rstrip().endswith(("^", "_")):
        return f"{whole} \\cdot {fraction}"
    return f"(\\frac{{{int(whole) * int(below) + int(above)}}}{{{below}}})"


def warm_up() -> None:
    """Fill the grammar's tables before workers are forked: the first use of a rule takes 100 times as long."""
    examples = r"\frac{1}{2}+x^{2}", r"(2\sqrt{3}, \pi]", r"x \ge \sin(2 n)!", r"\log_{2} 3", r"\left\{a, b_1\right\}"
    for text in examples:
        read(text)
