r"""The verifier: hard cases by rule, `settle` against the workers, and batches.

Oracles: a person's decision for each hard case, Python's Fraction for numbers. Elsewhere: gold answers of benchmarks
(test_golds.py), harmful texts (test_harm.py). Not covered: all notations that models use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.rewards import math
from oblr_megatron.rewards.math import DEADLINE_S, MathReward, grade, settle
from oblr_megatron.rewards.verifier.compare import equal_answers
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from oblr_megatron.rewards.verifier.normalize import normalize
from oblr_megatron.rewards.verifier.symbolic import equal_expressions
from tests.unit.rewards.conftest import batch
from tests.unit.rewards.hard_cases import CASES


@pytest.fixture(scope="module")
def reward():
    with MathReward(EXTRACTIONS["math"], num_workers=2, deadline_s=DEADLINE_S) as reward:
        yield reward


@pytest.mark.parametrize("rule", CASES)
def test_hard_cases(rule: str) -> None:
    def wrong(cases: Sequence[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
        return [case for case in cases if grade(f"so \\boxed{{{case[0]}}}", case[1]) != case[2]]

    assert not wrong(wrong(CASES[rule]))  # again: on a starved machine a comparison may pass its deadline


PIECES = [*"0123456789xyn+-*/=<>()[]{}|,.;:!^_%&$° ", "\\", "\\\\", r"\frac", r"\sqrt", r"\pm", r"\cup", r"\{", r"\}"]
PIECES += [r"\text{", r"\begin{pmatrix}", r"\end{pmatrix}", r"\le", r"\in", r"\infty", r"\pi", r"\circ", " or ", "cm"]
PIECES += ["e5"]


@settings(max_examples=500, deadline=None)
@given(*[st.lists(st.sampled_from(PIECES), max_size=14).map("".join)] * 2)
def test_settle_never_raises(answer: str, gold: str) -> None:
    """Every answer that is not empty equals itself."""
    assert settle(answer, gold) in (True, False, None)
    assert settle(answer, answer) is bool(normalize(answer))


def test_grade_from_many_threads() -> None:
    found: list[bool] = []
    cases = [(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), (r"\boxed{\sqrt{8}}", r"3\sqrt{2}")] * 4
    threads = [threading.Thread(target=lambda c=case: found.append(grade(*c))) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 4 + [True] * 4


def test_grade_in_a_forked_process_and_from_a_script() -> None:
    """The script has no `__main__` guard and forks after its first call."""
    script = """
import json, os, sys
from oblr_megatron.rewards.math import grade
before = grade(r"\\\\boxed{\\\\sqrt{8}}", r"2\\\\sqrt{2}")
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, json.dumps(grade(r"\\\\boxed{\\\\sqrt{18}}", r"3\\\\sqrt{2}")).encode())
    os._exit(0)
child = json.loads(os.read(reading, 10))
print(json.dumps([before, child, grade(r"\\\\boxed{1+x}", "x+1")]))
""".replace("\\\\\\\\", "\\\\").replace("\\\\", "\\")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(result.stdout) == [True, True, True]
    assert result.stderr == ""


def test_score_covers_every_sample_of_every_prompt(reward: MathReward) -> None:
    rows = [
        ("4", [r"\boxed{4}", r"\boxed{5}", "4", r"\boxed{2+2}"]),
        (r"\sqrt{2}", [r"\boxed{\frac{2}{\sqrt{2}}}", r"\boxed{2}", r"\boxed{\sqrt{2}}", r"\boxed{\sqrt{2"]),
    ]
    result = reward.score(*batch(rows))
    assert result.rewards == [1, 0, 0, 1, 1, 0, 1, 0]
    assert (result.failures, result.timeouts) == (0, 0)
    assert reward.score([], []).rewards == []


def test_score_returns_the_extracted_answers(reward: MathReward) -> None:
    result = reward.score(*batch([("4", [r"\boxed{4} or \boxed{x+3}", "4", r"\boxed{4.0}"]), ("x", ["", "a", "b"])]))
    assert result.answers == ["x+3", None, "4.0", None, None, None] and result.by_value
    assert result.main_rewards == result.rewards == [0, 0, 1, 0, 0, 0]


def test_an_answer_on_which_the_verifier_raises_fails_alone(reward: MathReward, monkeypatch) -> None:
    def settle_or_raise(answer: str, gold: str, tolerance: str) -> bool | None:
        if answer == "3":
            raise LookupError("a fault of the verifier")
        return settle(answer, gold, tolerance)

    monkeypatch.setattr(math, "settle", settle_or_raise)
    result = reward.score(*batch([("4", [r"\boxed{4}", r"\boxed{3}"])]))
    assert (result.rewards, result.faults) == ([1, 0], {1: "failed"})
    assert "LookupError: a fault of the verifier" in result.cause


@settings(max_examples=300, deadline=None)
@given(st.fractions(max_denominator=10**6), st.fractions(min_value="1/1000000", max_value=1), st.data())
def test_a_number_equals_itself_in_any_spelling_and_no_other_number(value: Fraction, step: Fraction, data) -> None:
    texts = [data.draw(st.sampled_from(spellings(v))) for v in (value, value, value + step)]
    assert settle(texts[0], texts[1]) is True
    assert settle(texts[0], texts[2]) is settle(texts[2], texts[0]) is False


def spellings(value: Fraction) -> list[str]:
    """Spellings of a fraction: LaTeX, slash, mixed number, finite decimal, powers of ten."""
    above, below = abs(value).as_integer_ratio()
    sign = "-" if value < 0 else ""
    texts = [
        f"{sign}{above}/{below}",
        f"{sign}\\frac{{{above}}}{{{below}}}",
        f"\\dfrac{{{sign}{3 * above}}}{{{3 * below}}}",
    ]
    if above % below:
        texts += [f"{sign}{above // below}\\frac{{{above % below}}}{{{below}}}"] if above > below else []
    else:
        texts += [f"{sign}{above // below:,}", f"{sign}{above // below}.00", f"$ {sign}{above // below} $."]
    if 10**12 % below == 0:
        digits = f"{above * 10**12 // below:013d}"
        texts += [
            f"{sign}{digits[:-12]}.{digits[-12:]}",
            f"{sign}{int(digits)}e-12",
            f"{sign}{int(digits)}\\times 10^{{-12}}",
        ]
    return texts


@pytest.mark.parametrize("rule", CASES)
def test_settle_agrees_with_the_workers(rule: str) -> None:
    for answer, gold, _ in CASES[rule]:
        settled = settle(answer, gold)
        assert settled is None or settled is equal_answers(answer, gold, equal_expressions), (answer, gold)
