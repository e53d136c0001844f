r"""Reading numbers and their marks. Oracle: Python's Fraction. Not covered: comparing answers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.rewards.verifier.normalize import compact, normalize
from oblr_megatron.rewards.verifier.quantity import Quantity, read_base, read_marks, read_number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_decimals_are_read_exactly(value) -> None:
    text = format(value, "f")
    assert read_number(text) == Fraction(text)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_fractions_in_every_spelling(above: int, below: int) -> None:
    value = Fraction(above, below)
    assert read_number(f"{above}/{below}") == value
    assert read_number(f"\\frac{{{above}}}{{{below}}}") == value
    assert read_number(f"-\\frac{{{above}}}{{{below}}}") == -value


@given(st.integers(0, 99), st.text("0123456789", max_size=4), st.text("0123456789", min_size=1, max_size=5))
def test_repeating_decimals(whole: int, fixed: str, block: str) -> None:
    """Multiplying by a power of ten shifts the block; the difference is a whole number."""
    value = read_number(f"{whole}.{fixed}\\overline{{{block}}}")
    assert value is not None
    shifted = value * 10 ** (len(fixed) + len(block)) - value * 10 ** len(fixed)
    assert shifted == int(f"{whole}{fixed}{block}") - int(f"{whole}{fixed}" or "0")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"), ("\\frac{0}{5}", "0"), ("1 3/4", "7/4"), (r"2\frac{1}{3}", "7/3"), ("1.5e3", "1500"),
        ("10^{-2}", "1/100"), (r"3 \times 10^4", "30000"), ("12 345 678", "12345678"), ("{(7)}", "7"), ("- 3", "-3"),
    ],
)  # fmt: skip
def test_numbers(text: str, value: str) -> None:
    assert read_number(normalize(text)) == Fraction(value)


@pytest.mark.parametrize(
    "text", ["", "-", "x", "1/0", r"\frac{1}{0}", "1/2/3", "1.2.3", "12 34", "3 5/4", "1e99999", "1" * 1001, "2+3", "e"]
)
def test_texts_that_are_not_numbers(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", Quantity("5")), ("5 cm", Quantity("5")), (r"5\text{ cm}^2", Quantity("5")), ("5 cm^{2}", Quantity("5")),
        ("5%", Quantity("5", percent=True)), ("30°", Quantity("30", degree=True)),
        (r"\sin 30°", Quantity(r"\sin 30°")), (r"5.4\text{ million dollars}", Quantity("5.4", scale=10**6)),
        ("2 dozen", Quantity("2", scale=12)), ("5x", Quantity("5x")), ("6m", Quantity("6m")),
        ("2RC", Quantity("2RC")), (r"\text{cm}", Quantity(r"\text{cm}")), (r"3\sin x", Quantity(r"3\sin x")),
        ("20 apples", Quantity("20")), (r"2\sqrt{3} \text{ units}", Quantity(r"2\sqrt{3}")),
    ],
)  # fmt: skip
def test_marks(text: str, expected: Quantity) -> None:
    assert read_marks(normalize(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("52_8", ("52", 8)), ("FF_{16}", ("FF", 16)), ("98_8", None), ("a_1", None), ("A_{12}", None), ("x_2", None)],
)
def test_bases(text: str, expected: tuple[str, int] | None) -> None:
    assert read_base(normalize(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$\\dfrac{1}{2}$.", r"\frac{1}{2}"), (r"10,\!080", "10080"), ("x² ≤ 4", r"x^{2} \le 4"),
        (r"30^{\circ}", "30°"), ("{30^\\circ}", "30°"), (r"\mbox{ cm}^2", r"\text{ cm}^{2}"),
        (r"\left[ 1, 2 \right)", "[ 1, 2 )"), (r"1 \text{ and } 2", "1 ; 2"), ("0.333...", "0.333..."),
        (r"\{1\}.", r"\{1\}"), ("a\u200bb\u00ad", "ab"),
    ],
)  # fmt: skip
def test_normalize(text: str, expected: str) -> None:
    assert normalize(text) == expected


@given(st.text(max_size=60))
def test_normalize_is_idempotent_on_plain_text(text: str) -> None:
    once = normalize(text)
    assert compact(normalize(once)) == compact(once) or "\\" in text or "{" in text
