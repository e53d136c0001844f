"""Extracting the answer of a response. Not covered: comparing it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.rewards.verifier.extract import EXTRACTIONS, MAX_ANSWER_CHARS, after_hashes, boxed, last_line


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"), (r"\boxed{1} no, \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and then \boxed{4", "3"), (r"\boxed{ {1} and \boxed{2}", "2"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"), (r"\boxed {6}", "6"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"), (r"} { \boxed{7} } {", "7"), ("\\boxed{8\n9}", "8\n9"), (r"\boxed{}", None),
        (r"\boxed{  }", None), (r"\boxed 5", None), (r"\boxedsomething{5}", None), (r"\\boxed{5}", None),
        (r"\fbox{5}", None), ("42", None), ("", None),
    ],
)  # fmt: skip
def test_boxed(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 1 = 2\n#### 2", "2"), ("#### 3\nwait\n#### 4 apples \nbye", "4 apples"), ("#### \n", None),
        (r"no marks, \boxed{5}", "5"), ("**Text**\n**#### 5**", "5"), ("#### **5**", "**5**"),
        ("** \n#### 5**", "5**"), ("#### Final Answer\n\\boxed{42}", "42"), ("#### 7\n\\boxed{5}", "7"),
        ("#### no\nthe end", "no"), ("nothing", None),
    ],
)  # fmt: skip
def test_after_hashes(text: str, answer: str | None) -> None:
    assert after_hashes(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a\nb\n 42 \n\n", "42"), (r"a\nso \boxed{6}", "6"), ("7", "7"), (" \n", None), ("", None),
        ("The answer is **5**.", "5"), ("The final answer is **5**", "5"), ("**Answer: 5**", "5"),
        ("**The answer is 5.**", "5."), ("*Answer: 5*", "5"), ("***Answer: 5***", "5"), ("__Answer: 5__", "5"),
        ("**Answer:** 5", "5"), ("*Answer:* 5", "5"), ("Answer: x*", "x*"), ("**Answer:** x*", "x*"),
        ("*Answer: 2*3*", "2*3*"), ("The answer is **5** or **6**", "5** or **6**"), ("**Answer:**", "**Answer:**"),
    ],
)  # fmt: skip
def test_last_line(text: str, answer: str | None) -> None:
    assert last_line(text) == answer


def test_limits_on_length_and_depth() -> None:
    assert boxed("\\boxed{" + "9" * MAX_ANSWER_CHARS + "}") is not None
    assert boxed("\\boxed{" + "9" * (MAX_ANSWER_CHARS + 1) + "}") is None
    assert boxed("\\boxed{" + "(" * 65 + ")" * 65 + "}") is None
    assert boxed("\\boxed{" + "{" * 65 + "}" * 65 + "}") is None


@pytest.mark.parametrize(
    "unit", [r"\boxed{", "{", "}", "\\", r"\boxed ", "####", "\n", "\\boxed{}", "\\boxed" + " " * 50]
)
@pytest.mark.timeout(120)  # a linear scan takes at most a second, a quadratic one hours
def test_a_megabyte_is_scanned_in_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    for extract in EXTRACTIONS.values():
        extract(text)


@given(st.text(alphabet="\\boxed{}#1 \n", max_size=60))
def test_the_answer_is_none_or_not_blank(text: str) -> None:
    for extract in EXTRACTIONS.values():
        answer = extract(text)
        assert answer is None or answer.strip()


@given(st.text(alphabet="ab1 {}\\", max_size=30))
def test_balanced_content_is_extracted_unchanged(content: str) -> None:
    depth, escaped = 0, False
    for character in content:
        depth += (not escaped) * ((character == "{") - (character == "}"))
        escaped = character == "\\" and not escaped
        if depth < 0:
            return
    if depth == 0 and not escaped and content.strip() and "\\boxed" not in content:
        assert boxed(f"before {{ \\boxed{{{content}}} after") == content
