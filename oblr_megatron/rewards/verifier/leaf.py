r"""Compare two single expressions: words, times, bases, numbers with units; the rest by computer algebra."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from oblr_megatron.rewards.verifier.normalize import compact
from oblr_megatron.rewards.verifier.quantity import E_NOTATION, POWER, Quantity, read_base, read_marks, read_number

Symbolic = Callable[[str, str], bool]  # (gold, prediction) -> equal, by computer algebra

_OPERATORS = re.compile(
    r"\\(sum|prod|coprod|i{0,3}nt|oint|lim|limsup|liminf|gcd|lcm|max|min|sup|inf|det|dim|deg|b?mod|pmod|pod|bigcup|bigcap|ldots)"
    r"(?![A-Za-z])|\\text\{\s*(lcm|gcd|max|min|mod|rank|tr|det|lim|sum|prod|gdc|hcf)\s*\}"
    r"|(?<![A-Za-z\\])(gcd|lcm|max|min|sum|prod|mod|lim|int|det|hcf)(?![A-Za-z])"
    r"|\\begin\{(v)matrix\}|\\frac\{\s*(?:d|\\partial)(?:[^{}]|\{[^{}]*\}){0,40}\}\{\s*(d|\\partial)"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NO_LETTERS = re.compile(r"\\text\{[^{}]*\}|\\(?:begin|end)\{[a-z]*\}")  # words, and the names of environments
_TEXT_LETTER = re.compile(r"\\text\{\s*[A-Za-z]\s*\}")
_QUANTITY = re.compile(  # in \text
    r"([+-]?[0-9](?:[0-9.,/]*[0-9])?) ?([%°]|(?=[A-Za-z]{2})(?:(?!(?<![A-Za-z])(?:and|or)(?![A-Za-z]))[^0-9])+)"
)
_WORD = re.compile(r"[A-Za-z][A-Za-z .'-]*")
_ANY_CASE = re.compile(r"[A-Za-z][a-z]{2}|[A-Z]{5}")  # a gold answer "ABCD" may name points
LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_CONSTANTS = {"e", "i"}
_ORDER = re.compile(r"[A-Z]{3}")  # "BAC" is an order of three points more often than a product
_PLAIN_WORDS = {"yes", "no", "odd", "even", "true", "false", "none", "all", "dne"}
_TIME = re.compile(r"([0-9]{1,2}:[0-9]{2})\s*([ap])\.?\s*m")
_LETTER_UNIT = re.compile(rf"(?<=[0-9}}]) [msghNCJWVKLTA]{POWER}$")  # after a space alone: "5N" may be a product
_APART = re.compile(r"(?<![0-9.])[0-9.]+ [0-9.]")  # two numbers with nothing between them


def equal_leaves(gold: str, given: str, symbolic: Symbolic) -> bool:
    """Whether two normalized expressions are equal; may raise what `symbolic` raises."""
    if compact(gold) == compact(given):
        return True
    for rule in (_by_time, _by_words, _by_base, _by_number):
        equal = rule(gold, given)
        if equal is not None:
            return equal
    expected, actual = read_marks(gold), read_marks(given)
    if _APART.search(actual.core) or not operators(actual.core) <= operators(expected.core):
        return False
    return _equal_expressions(expected, actual, symbolic)


def has_variable(text: str) -> bool:
    """Whether the text contains letters other than constants, units and words."""
    letters = (match.group(1) for match in LETTER.finditer(_NO_LETTERS.sub("", read_marks(text).core)))
    return any(letter and letter not in _CONSTANTS for letter in letters)


def _by_time(gold: str, given: str) -> bool | None:
    """The result if the gold answer is a time with a.m. or p.m., else None."""
    if ":" not in gold:
        return None
    expected, actual = (_TIME.match(_TEXT.sub(r" \1", text).strip().lower()) for text in (gold, given))
    return expected and (actual is not None and expected.groups() == actual.groups())


def _by_words(gold: str, given: str) -> bool | None:
    """The result if either side is a word, else None."""
    if (word := _as_word(gold)) is not None:
        actual = _as_word(given) or _word_form(given)
        any_case = word.casefold() in _PLAIN_WORDS or _ANY_CASE.search(word)
        return word == actual or bool(any_case and word.casefold() == actual.casefold())
    if not (text := _TEXT.fullmatch(given)) or _TEXT_LETTER.fullmatch(given):
        return None
    words = text.group(1).strip()
    quantity = _QUANTITY.fullmatch(words)
    return compact(words) == compact(gold) or bool(quantity and _by_number(gold, _with_unit(*quantity.groups())))


def _with_unit(number: str, unit: str) -> str:
    return number + (unit if unit in "%°" else f"\\text{{ {unit}}}")


def _by_base(gold: str, given: str) -> bool | None:
    """The result if either side names a base, else None. If the gold answer names one, the bases must be equal."""
    expected, actual = read_base(gold), read_base(given)
    if expected is not None:
        return actual is not None and actual[1] == expected[1] and int(*actual) == int(*expected)
    if actual is None:
        return None
    value = read_number(read_marks(gold).core)
    return value is not None and int(*actual) == value


def _by_number(gold: str, given: str) -> bool | None:
    """The result if both sides are numbers, else None."""
    pairs = number_pairs(gold, given)
    return None if pairs is None else any(a == b for a, b in pairs)


def number_pairs(gold: str, given: str) -> list[tuple[Fraction, Fraction]] | None:
    """Pairs to compare: (gold, given) as written; with percent signs also as values. None unless both are numbers."""
    expected, actual = read_marks(gold), read_marks(given)
    a = read_number(expected.core)
    if a is None:
        return None
    b = read_number(_LETTER_UNIT.sub("", actual.core))
    if b is None:
        return None
    a, b = a * expected.scale, b * actual.scale
    if not (expected.percent or actual.percent):
        return [(a, b)]
    return [(a, b), (a / 100 if expected.percent else a, b / 100 if actual.percent else b)]


def _equal_expressions(gold: Quantity, given: Quantity, symbolic: Symbolic) -> bool:
    a, b = map(_expression, (gold, given))
    if symbolic(a, b):
        return True
    if gold.degree != given.degree and "\\pi" in a + b:  # one in degrees, the other in radians
        a, b = (f"\\frac{{\\pi}}{{180}}({c})" if q.degree else c for q, c in ((gold, a), (given, b)))
        return symbolic(a, b)
    return False


def _expression(quantity: Quantity) -> str:
    """The core in LaTeX, with scale words and e-notation written out (the grammar reads "e" as Euler's number)."""
    core = E_NOTATION.sub(r"\1 \\cdot 10^{\2}", quantity.core) if E_NOTATION.fullmatch(quantity.core) else quantity.core
    return core if quantity.scale == 1 else f"{quantity.scale}({core})"


def operators(text: str) -> set[str]:
    """Operators in the text. A prediction with operators that the gold answer lacks is unevaluated, hence wrong."""
    return {next(name for name in match.groups() if name) for match in _OPERATORS.finditer(text)}


def _as_word(text: str) -> str | None:
    r"""The answer if it is a single word, else None: in \text, or letters that cannot be a product of variables."""
    if match := _TEXT.fullmatch(text):
        return _word_form(match.group(1))
    if not _WORD.fullmatch(text):
        return None
    longest = max(map(len, re.findall("[A-Za-z]+", text)))  # "x y z" is a product, "abc - d" a difference
    is_word = (
        longest > 3
        or _ORDER.fullmatch(text)
        or (longest == 3 < len(text) and "-" not in text)
        or text.casefold() in _PLAIN_WORDS
    )
    return _word_form(text) if is_word else None


def _word_form(text: str) -> str:
    """The word without brackets and punctuation around it."""
    return " ".join(_TEXT.sub(r"\1", text).strip(" ().'\"").split())
