"""Compare numbers within a tolerance, as Minerva and one row of OlympiadBench allow."""

from __future__ import annotations

import re
from fractions import Fraction

from oblr_megatron.rewards.verifier.leaf import number_pairs
from oblr_megatron.rewards.verifier.normalize import normalize
from oblr_megatron.rewards.verifier.quantity import read_marks
from oblr_megatron.rewards.verifier.structure import Leaf, Named, Node, chain, parse

MAX_CHARS = 20  # length limit of a tolerance
_OHM = re.compile(r"(?<=[0-9}\s])\s*\\Omega(?![A-Za-z])")
_MICRO = re.compile(r"(?<=[0-9}\s])\s*\\mu\s*(?=\\text\{)")  # without a unit behind it \mu may be a variable


def within(prediction: str, gold: str, tolerance: str) -> bool | None:
    r"""Whether two plain numbers differ by at most the tolerance; None unless both are plain numbers.

    The arithmetic is exact. Units, percent signs and names are ignored, as in `compare`. In a chain with an
    approximation the first plain number counts, and each one after an equals sign.

    Args:
        prediction: an extracted answer.
        gold: the gold answer.
        tolerance: "0.1" absolute, "1%" relative to the gold answer; for "" and malformed texts the result is None.

    Examples: ("4.3", "4.2", "0.1") True; ("4.31", "4.2", "0.1") False; ("101", "100", "1%") True;
    (r"\frac{13}{3}", "4.2", "0.1") False; (r"2\pi \approx 6.28", "6.3", "0.1") True; ("x", "4.2", "0.1") None.
    """
    allowed = _read(tolerance.removesuffix("%"))
    expected, stated = _stated(gold)[:1], _stated(prediction)
    pairs = [number_pairs(one, other) for one in expected for other in stated]
    if allowed is None or not pairs or not all(pairs):
        return None
    relative = tolerance.endswith("%")
    percent = read_marks(expected[0]).percent
    return all(_near(readings or [], allowed, relative=relative, percent=percent) for readings in pairs)


def _near(readings: list[tuple[Fraction, Fraction]], allowed: Fraction, *, relative: bool, percent: bool) -> bool:
    """Whether (gold, given) are near in one of their readings; `percent` is that of the gold answer."""
    if relative:
        return any(abs(a - b) <= allowed / 100 * abs(a) for a, b in readings)
    units = (1, 100 if percent else 1)  # to compare the numbers as written, and as values
    return any(abs(a - b) * unit <= allowed for (a, b), unit in zip(readings, units, strict=False))


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


def _stated(text: str) -> list[str]:
    r"""The expressions to compare, without names such as "x =" and Greek units; empty for lists, tuples and the like.

    Examples: "x = 4.3" -> ["4.3"]; r"2\pi \approx 6.28" -> ["6.28"].
    """
    text = _MICRO.sub("", _OHM.sub(r"\\text{ ohm}", normalize(text)))
    parts, signs = chain(text)
    if "\\approx" in signs and set(signs) <= {"=", "\\approx"}:
        nodes = [_value(parse(part, grouped=True)) if part else Leaf("") for part in parts]
        if not all(isinstance(node, Leaf) for node in nodes):
            return []
        numbers = [place for place, node in enumerate(nodes) if number_pairs(node.text, node.text)]
        if numbers:
            return [nodes[place].text for place in numbers if place == numbers[0] or signs[place - 1] == "="]
    node = _value(parse(text, grouped=True))
    return [node.text] if isinstance(node, Leaf) and node.text else []


def _value(node: Node) -> Node:
    """The node without names."""
    while isinstance(node, Named):
        node = node.value
    return node
