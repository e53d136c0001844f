r"""Read numbers exactly, as `Fraction`, and the marks around them: currency, percent, degrees, units, scales, bases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_DIGITS = 1000  # longer numbers are left to computer algebra and its deadline
MAX_SCALE = 10**100  # "trillion" 430 times in a row is no number

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_PLAIN = re.compile(_DECIMAL)
E_NOTATION = re.compile(rf"({_DECIMAL})[eE]([+-]?[0-9]{{1,4}})")
_POWER_OF_TEN = re.compile(rf"(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|[xX])\s*)?10\s*\^\{{\s*([+-]?[0-9]{{1,4}})\s*\}}")
_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\{([0-9]+)\}|\(([0-9]+)\)|\\dot\{([0-9])\}(?:([0-9]*)\\dot\{([0-9])\})?)"
)
_SPACED = re.compile(r"[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]*)?")
_MIXED = re.compile(r"([0-9]+)\s*(\\frac.*)|([0-9]+) ([0-9]+/[0-9]+)")
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}|([^/]+)/([^/]+)")

_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALES |= {f"{word}s": scale for word, scale in _SCALES.items()}
_NO_UNIT = re.compile(  # they change the value in other ways
    r"\s*(?:plus|minus|squared|cubed|factorial|halves|(?:ten|hundred|thousand|million|billion)ths"
    r"|(?:third|fourth|fifth|sixth|seventh|eighth|ninth)s?)(?![A-Za-z])"
    r"|.*(?<![A-Za-z])(?:half|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)\s*$",
    re.IGNORECASE,
)
_SHORT_UNITS = {
    "cm", "mm", "km", "dm", "nm", "in", "ft", "yd", "mi", "kg", "mg", "lb", "lbs", "oz", "sec", "min", "hr", "hrs",
    "ms", "ml", "mL", "cl", "mph", "kmh", "kph", "Hz", "kJ", "kW", "Pa", "mol", "cents", "cent", "rad", "radians",
    "sq", "cu", "usd", "USD", "eur", "EUR", "inches", "inch", "feet", "foot", "miles", "mile", "meters", "metres",
    "hours", "minutes", "seconds", "days", "weeks", "months", "years", "dollars", "euros", "pounds", "unit", "units",
    "square", "cubic", "cup", "cups", "liter", "liters", "litre", "litres", "gallon", "gallons", "gram", "grams",
}  # fmt: skip
POWER = r"(?:\s*\^\{\s*-?\s*[1-9]\s*\})?"
_TEXT_UNIT = rf"\s*\\text\{{((?:[^{{}}\\0-9;:=<>|&+*?!]|\\cdot|\\\s|\^\s*-?[1-9]|\^\s*\{{-?[1-9]\}})*)\}}{POWER}"
_UNIT_END = re.compile(
    rf"(?:\s*(?:/|\\cdot(?![A-Za-z]))\s*)?(?:{_TEXT_UNIT}|\s*\\frac\{{{_TEXT_UNIT}\s*\}}\{{{_TEXT_UNIT}\s*\}}"
    rf"|\s*(?<![A-Za-z\\{{])(?<=[0-9}}\s])([A-Za-z]{{2,}}(?:[ /][A-Za-z]+)*|m/s|[\u4e00-\u9fff]+){POWER})$"
)
_CELSIUS = re.compile(r"°\s*(?:[CF]|\\text\{\s*[CF]\s*\})$")
_NOT_UNITS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "mod"}
_TRIGONOMETRIC = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_UNIT_PREFIX = re.compile(r"^(?:USD|EUR|GBP|Rs\.?|INR)\s*(?=[0-9.])")
_BASE = re.compile(
    r"\(?\s*(-?[0-9A-Z]+)\s*\)?\s*"
    r"(?:_\{\s*(?:\\text\s*\{)?\s*\(?([0-9]{1,2}|[a-z]{3,7})\)?\s*\}?\s*\}"
    r"|(?:\\text\{)?\s*(?:in )?base\s*(?:\})?\s*([0-9]{1,2}|[a-z]{3,7})\s*\}?)"
)
_BASE_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    r"""An expression without its marks.

    Example: read_marks(r"5.4\text{ million cm}^2") -> Quantity(core="5.4", scale=1000000).
    """

    core: str
    scale: int = 1
    percent: bool = False
    degree: bool = False


@lru_cache(maxsize=2048)
def read_marks(text: str) -> Quantity:
    """Remove units, percent and degree signs, currency and scale words from an expression (normalized text)."""
    scale, percent, degree = 1, False, False
    text = _UNIT_PREFIX.sub("", text.strip())
    while True:
        if text.endswith("%"):
            text, percent = text[:-1].rstrip(), True
        elif (celsius := _CELSIUS.search(text)) and celsius.start():
            text = text[: celsius.start() + 1]
        elif text.endswith("°") and not _TRIGONOMETRIC.search(text):
            text, degree = text[:-1].rstrip(), True
        elif (words := _unit_words(text)) is not None:
            factor = math.prod(_SCALES.get(word.lower(), 1) for word in words[0])
            if scale * factor > MAX_SCALE:
                return Quantity(text, scale, percent, degree)
            text, scale = text[: words[1]].rstrip(), scale * factor
        else:
            return Quantity(text, scale, percent, degree)


def _unit_words(text: str) -> tuple[list[str], int] | None:
    """(words, start position) of the unit at the end of the text; None if there is none, or nothing before it."""
    match = _UNIT_END.search(text)
    if match is None or not text[: match.start()].strip():
        return None
    bare = match.group(4)
    unit = bare or match.group(1) or ""
    if _NO_UNIT.match(unit):
        return None
    words = re.findall(r"[A-Za-z]+|^[万亿]", unit.strip())
    if bare and bare.isascii() and not _are_units(words):
        after_space = text[match.start()].isspace() and text[: match.start()].rstrip()[-1:].isdigit()
        if not (after_space and len(words[0]) >= 3 and _NOT_UNITS.isdisjoint(words)):
            return None
    return words, match.start()


def _are_units(words: list[str]) -> bool:
    r"""Whether words outside of \text are units or scale words: km, sq ft, km/h, m/s, million dollars."""
    known = [word in _SHORT_UNITS or word.lower() in _SCALES for word in words]
    return words == ["m", "s"] or (known[0] and all(k or len(word) == 1 for k, word in zip(known, words, strict=True)))


def read_base(text: str) -> tuple[str, int] | None:
    """(digits, base) of a number written with its base: "52_8" -> ("52", 8)."""
    match = _BASE.fullmatch(text.strip())
    if match is None:
        return None
    digits, named = match.group(1), match.group(2) or match.group(3)
    base = _BASE_WORDS.get(named, 0) if named.isalpha() else int(named)
    if base == 0 or (len(digits) == 1 and digits.isalpha()):
        return None  # a variable with an index, such as A_1
    try:
        int(digits, base)
    except ValueError:
        return None  # invalid base, or invalid digit in this base
    return digits, base


def read_number(text: str) -> Fraction | None:
    r"""The exact value of a normalized number; None for anything else.

    Examples: "1.50" -> 3/2; r"-\frac{1}{2}" -> -1/2; "1 3/4" -> 7/4; "2.88e-3" -> 0.00288; r"0.\overline{3}" -> 1/3.
    """
    text = text.strip()
    if not text or len(text) > MAX_DIGITS:
        return None
    if text[0] in "+-":
        value = _unsigned(text[1:].strip())
        return value if value is None or text[0] == "+" else -value
    return _unsigned(text)


def _unsigned(text: str) -> Fraction | None:
    if (text[:1], text[-1:]) in (("(", ")"), ("{", "}")):
        inner = text[1:-1]
        return None if text[0] in inner or text[-1] in inner else read_number(inner)
    for pattern, value in _FORMS:
        if match := pattern.fullmatch(text):
            return value(match)
    fraction = _fraction(text)
    return _mixed(text) if fraction is None else fraction


def _power_of_ten(match: re.Match[str]) -> Fraction:
    return Fraction(match.group(1) or 1) * Fraction(10) ** int(match.group(2))


def _repeating(match: re.Match[str]) -> Fraction:
    whole, fixed, *marked = match.groups(default="")
    block = "".join(marked)
    return Fraction(f"{whole or 0}.{fixed}0") + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(fixed))


def _fraction(text: str) -> Fraction | None:
    r"""The value of \frac{a}{b}, or of a/b."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    numerator, denominator = (read_number(part) for part in match.groups() if part is not None)
    return numerator / denominator if numerator is not None and denominator else None


def _mixed(text: str) -> Fraction | None:
    """A whole number and a proper fraction: "1 3/4"."""
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    fraction = _fraction(match.group(2) or match.group(4))
    if fraction is None or not 0 < fraction < 1:
        return None
    return int(match.group(1) or match.group(3)) + fraction


_FORMS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction]]] = [
    (_PLAIN, lambda match: Fraction(match.group())),
    (_SPACED, lambda match: Fraction(match.group().replace(" ", ""))),
    (E_NOTATION, _power_of_ten),
    (_POWER_OF_TEN, _power_of_ten),
    (_REPEATING, _repeating),
]
