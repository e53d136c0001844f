"""Compare numbers within a tolerance, as Minerva and one row of OlympiadBench allow."""

from __future__ import annotations

from fractions import Fraction

from oblr_megatron.rewards.verifier.leaf import number_pairs
from oblr_megatron.rewards.verifier.normalize import normalize
from oblr_megatron.rewards.verifier.quantity import read_marks
from oblr_megatron.rewards.verifier.structure import Leaf, Named, parse

MAX_CHARS = 20  # length limit of a tolerance


def within(prediction: str, gold: str, tolerance: str) -> bool | None:
    r"""Whether two plain numbers differ by at most the tolerance; None unless both are plain numbers.

    The arithmetic is exact. Units, percent signs and names are ignored, as in `compare`.

    Args:
        prediction: an extracted answer.
        gold: the gold answer.
        tolerance: "0.1" absolute, "1%" relative to the gold answer; for "" and malformed texts the result is None.

    Examples: ("4.3", "4.2", "0.1") True; ("4.31", "4.2", "0.1") False; ("101", "100", "1%") True;
    (r"\frac{13}{3}", "4.2", "0.1") False; ("x", "4.2", "0.1") None.
    """
    allowed = _read(tolerance.removesuffix("%"))
    expected, actual = _plain(gold), _plain(prediction)
    pairs = number_pairs(expected, actual) if allowed is not None and expected and actual else None
    if allowed is None or not pairs:
        return None
    if tolerance.endswith("%"):
        return any(abs(a - b) <= allowed / 100 * abs(a) for a, b in pairs)
    units = (1, 100 if read_marks(expected).percent else 1)  # to compare the numbers as written, and as values
    return any(abs(a - b) * unit <= allowed for (a, b), unit in zip(pairs, units, strict=False))


def _read(text: str) -> Fraction | None:
    """The value of a non-negative decimal number, else None."""
    exponent = text.lower().partition("e")[2].strip("+- ")
    if len(text) > MAX_CHARS or len(exponent) > 3:  # Fraction("1e999999999") would not terminate
        return None
    try:
        value = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        return None
    return value if value >= 0 else None


def _plain(text: str) -> str:
    """The answer without a name such as "x ="; "" unless it is a single expression."""
    node = parse(normalize(text), grouped=True)
    while isinstance(node, Named):
        node = node.value
    return node.text if isinstance(node, Leaf) else ""
