r"""The verifier by its contract: hard cases by rule, the benchmarks' golds, and texts that try to do harm.

Oracles: a person's verdict for each hard case; every gold equals itself in another spelling and differs from its
neighbours. Not covered: benchmarks that state a tolerance, and the whole of what models write.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.rewards.extract import EXTRACTIONS
from oblr_megatron.rewards.math import DEADLINE_S, MathReward, grade, settle
from oblr_megatron.rewards.normalize import normalize
from tests.unit.rewards.conftest import batch, golds
from tests.unit.rewards.hard_cases import CASES

BENCHMARKS = ("gsm8k_test", "math500", "olympiadbench")


@pytest.fixture
def reward():
    with MathReward(EXTRACTIONS["math"], num_workers=2, deadline_s=DEADLINE_S) as reward:
        yield reward


@pytest.mark.parametrize("rule", CASES)
def test_hard_cases(rule: str) -> None:
    wrong = [case for case in CASES[rule] if grade(f"so \\boxed{{{case[0]}}}", case[1]) != case[2]]
    assert not wrong


def test_the_table_is_a_real_one() -> None:
    cases = [case for rule in CASES.values() for case in rule]
    assert len(cases) == len({case[:2] for case in cases}) >= 60
    assert 0.3 < sum(case[2] for case in cases) / len(cases) < 0.7


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [(r"\boxed{3} or rather \boxed{4}", True), ("4", False), (r"\boxed{4", False), (r"\boxed{4} no: \boxed{5}", False)],
)
def test_only_the_last_complete_box_counts(prediction: str, expected: bool) -> None:
    assert grade(prediction, "4") is expected


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_gold_equals_itself(name: str, reward: MathReward) -> None:
    answers = golds(name)
    result = reward.score(*batch([(answer, [f"\\boxed{{{answer}}}"]) for answer in answers]))
    assert [answer for answer, value in zip(answers, result.rewards, strict=True) if value != 1] == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_gold_equals_itself_in_another_spelling(name: str, reward: MathReward) -> None:
    r"""As models write: \dfrac, \left and \right, braces around, a full stop, spaces around signs."""
    answers = golds(name)
    rows = [(answer, [f"\\boxed{{{text}}}" for text in respellings(answer)]) for answer in answers]
    flat = [(answer, response) for answer, responses in rows for response in responses]
    result = reward.score(*batch(rows))
    wrong = [pair for pair, value in zip(flat, result.rewards, strict=True) if value != 1]
    assert wrong == [] and result.timeouts == result.failures == 0


def respellings(answer: str) -> list[str]:
    spelled = re.sub(r"\\frac(?![a-z])", r"\\dfrac", answer)
    spelled = spelled if "left" in spelled else re.sub(r"(?<!\\)([(\[])", r"\\left\1", spelled)
    spelled = spelled if "right" in spelled else re.sub(r"(?<!\\)([)\]])", r"\\right\1", spelled)
    return [
        spelled,
        f"{{{answer}}}",
        f"\\displaystyle {answer.rstrip('.')}.",
        re.sub(r"(?<=[0-9}]) ?([-+]) ?(?=[0-9\\])", r" \1 ", answer),
    ]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_perturbed_golds_differ(name: str, reward: MathReward) -> None:
    answers = sorted(set(golds(name)))
    answers = random.Random(0).sample(answers, min(len(answers), 200))  # all of them would take ten seconds a set
    rows = [(answer, [f"\\boxed{{{text}}}" for text in texts]) for answer in answers if (texts := perturbed(answer))]
    flat = [(answer, response) for answer, responses in rows for response in responses]
    result = reward.score(*batch(rows))
    assert [pair for pair, value in zip(flat, result.rewards, strict=True) if value != 0] == []
    assert len(flat) > 300 and result.failures == result.timeouts == 0


def perturbed(answer: str) -> list[str]:
    """A last digit off by one, one entry more, one more: none of them equals the answer."""
    digit = re.search(r"[0-9](?=[^0-9]*$)", answer)
    if digit is None or digit.group() == "0" or re.search(r"_|text|mbox", answer):
        return []
    off = answer[: digit.start()] + str((int(digit.group()) + 1) % 10) + answer[digit.end() :]
    return [off, f"{answer}, 987654321", f"{answer}+1"]


def test_golds_of_one_set_differ_from_one_another(reward: MathReward) -> None:
    numbers = sorted({answer for answer in golds("olympiadbench") if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", answer)})
    pairs = random.Random(0).sample([(a, b) for a in numbers for b in numbers], 2000)
    result = reward.score(*batch([(gold, [f"\\boxed{{{answer}}}"]) for gold, answer in pairs]))
    assert result.rewards == [float(Fraction(a) == Fraction(b)) for a, b in pairs]


HARMFUL = [
    r"9^{9^{9^{9^{9}}}}",
    r"(((10!)!)!)!",
    r"x^{999999999}-y^{999999999}",
    r"\frac{1}{" * 60 + "2" + "}" * 60,
    r"\sqrt{" * 60 + "2" + "}" * 60,
    "+".join(f"\\sin({k}x)" for k in range(200)),
    "(" * 60 + "x" + ")" * 60,
    r"\binom{10^9}{5\cdot10^8}",
    "1" * 4000,
    "0." + "1" * 3900,
    "1e999999999",
    r"\int\int\int x",
    "a" * 1000,
    "__import__('os').abort()",
    "{,}" * 1000,
    r"\text{" * 60 + "}" * 60,
    r"\begin{pmatrix}" + "&" * 1500 + r"\end{pmatrix}",
    "1," * 1900 + "1",
    " " * 3000 + "1 1",
    "\ufdfa" * 3000,
]


@pytest.mark.parametrize("answer", HARMFUL, ids=range(len(HARMFUL)))
def test_a_harmful_text_is_wrong_in_time(answer: str) -> None:
    start = time.perf_counter()
    assert grade(f"\\boxed{{{answer}}}", r"\sqrt{2}+x") is False
    assert time.perf_counter() - start < DEADLINE_S + 5
    assert grade(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), "the next answer is judged as ever"


PIECES = [*"0123456789xyn+-*/=<>()[]{}|,.;:!^_%&$° ", "\\", "\\\\", r"\frac", r"\sqrt", r"\pm", r"\cup", r"\{", r"\}"]
PIECES += [
    r"\text{",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"\le",
    r"\in",
    r"\infty",
    r"\pi",
    r"\circ",
    " or ",
    "cm",
    "e5",
]


@settings(max_examples=500, deadline=None)
@given(*[st.lists(st.sampled_from(PIECES), max_size=14).map("".join)] * 2)
def test_what_is_settled_on_the_spot_never_raises(answer: str, gold: str) -> None:
    """And whatever has a content equals itself."""
    verdict = settle(answer, gold)
    assert verdict in (True, False, None)
    assert settle(answer, answer) is bool(normalize(answer))


def test_grade_from_many_threads() -> None:
    verdicts: list[bool] = []
    cases = [(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), (r"\boxed{\sqrt{8}}", r"3\sqrt{2}")] * 4
    threads = [threading.Thread(target=lambda c=case: verdicts.append(grade(*c))) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(verdicts) == [False] * 4 + [True] * 4


def test_grade_in_a_forked_process_and_from_a_script() -> None:
    """No guard around the script's main part, and a fork after the first call: both are usual."""
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


def test_score_judges_every_sample_of_every_prompt(reward: MathReward) -> None:
    rows = [
        ("4", [r"\boxed{4}", r"\boxed{5}", "4", r"\boxed{2+2}"]),
        (r"\sqrt{2}", [r"\boxed{\frac{2}{\sqrt{2}}}", r"\boxed{2}", r"\boxed{\sqrt{2}}", r"\boxed{\sqrt{2"]),
    ]
    result = reward.score(*batch(rows))
    assert result.rewards == [1, 0, 0, 1, 1, 0, 1, 0]
    assert (result.failures, result.timeouts) == (0, 0)
    assert reward.score([], []).rewards == []
