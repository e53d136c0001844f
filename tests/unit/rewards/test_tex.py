r"""TeX's arguments: the forms of one formula have one spelling, whatever surrounds it. Oracle: the form with braces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.rewards.verifier.tex import braced

ARGUMENTS = ["1", "x", r"\pi", r"\frac{a}{2}", r"\sqrt{3}", r"\hat{y}", "{n+1}", "{}", r"{\text{a b}}"]
ONE = [r"\sqrt", r"\hat", r"\mathbb", r"\text", r"\pmod", "^", "_", r"\sqrt[3]"]
TWO = [r"\frac", r"\binom", r"\overset"]
FORMULAS = st.one_of(
    st.tuples(st.sampled_from(ONE), st.sampled_from(ARGUMENTS)),
    st.tuples(st.sampled_from(TWO), *[st.sampled_from(ARGUMENTS)] * 2),
)


@given(st.lists(FORMULAS, min_size=1, max_size=4), st.sampled_from([" ", "  "]))
def test_every_form_of_an_argument_gets_braces(formulas: list[tuple[str, ...]], space: str) -> None:
    with_braces = "+".join(
        command + "".join(one if one.startswith("{") else f"{{{one}}}" for one in arguments)
        for command, *arguments in formulas
    )
    assert braced("+".join(space.join(formula) for formula in formulas)) == with_braces
    assert braced(with_braces) == with_braces


@pytest.mark.parametrize(
    "text", [r"\frac{1}", r"\frac1", r"x^", r"\sqrt", r"\sqrt[3", r"x^)", r"^^", r"\frac,1", "}{", "{^", r"\sqrt["]
)
def test_a_command_without_its_arguments_stays_as_it_is(text: str) -> None:
    assert braced(text) == text
