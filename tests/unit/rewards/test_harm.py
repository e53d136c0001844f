r"""Harmful texts, eight concurrent callers, many answers: the verifier meets its deadline and its memory does not grow.

Not covered: the pool with other functions (test_pool.py).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from oblr_megatron.rewards.math import DEADLINE_S, MathReward, grade, settle
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from tests.unit.processes.conftest import unhurried
from tests.unit.rewards.conftest import batch

ROOT = Path(__file__).resolve().parents[3]
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
    " = ".join(["x"] * 1000),
    "x \\in " * 600,
    r"\text{A}=" * 400,
    ("x=" * 15 + "(") * 60 + "1" + ")" * 60,
    "x" + " trillion" * 430,
    r"\sqrt{2}" + " 万" * 1900,
]


@pytest.mark.parametrize("answer", HARMFUL, ids=range(len(HARMFUL)))
def test_a_harmful_text_scores_0_within_the_deadline(answer: str) -> None:
    assert grade(f"\\boxed{{{answer}}}", r"\sqrt{2}+x") is False
    assert grade(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), "the next answer is scored correctly"


@pytest.mark.parametrize("answer", HARMFUL, ids=range(len(HARMFUL)))
def test_settle_is_fast_for_a_harmful_text(answer: str) -> None:
    """`settle` runs in the trainer process, where no deadline can stop it."""
    for gold, tolerance in ((r"\sqrt{2}+x", ""), ("4.2", "0.1"), (answer, "1%")):
        start = time.perf_counter()
        settle(answer, gold, tolerance)
        assert time.perf_counter() - start < DEADLINE_S


CALLERS, WORKERS, SHORT_S = 8, 2, 1.0
TURN_S = SHORT_S * CALLERS / WORKERS  # the calls of three other callers, then the own call


@pytest.mark.alone
def test_eight_concurrent_callers_are_served_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller has three normal calls and one that times out. A call waits for at most three other calls."""
    never_ends = "n^{" * 60 + "2" + "}" * 60  # the grammar needs 20 s for it
    limits = unhurried(monkeypatch, never_ends)
    questions = [(r"\sqrt{8}", 1.0), (never_ends, 0.0), (r"3\sqrt{2}", 0.0), (r"\frac{4}{\sqrt{2}}", 1.0)]
    answered: list[tuple[float, float, float, int]] = []  # (seconds, value, expected, timeouts)

    def ask(reward: MathReward, first: int) -> None:
        for answer, expected in questions[first:] + questions[:first]:
            start = time.perf_counter()
            result = reward.score(*batch([(r"2\sqrt{2}", [f"\\boxed{{{answer}}}"])]))
            answered.append((time.perf_counter() - start, result.rewards[0], expected, result.timeouts))

    with MathReward(EXTRACTIONS["math"], num_workers=WORKERS, deadline_s=SHORT_S) as reward:
        reward.pool.map([(r"\sqrt{8}", r"2\sqrt{2}")] * WORKERS)  # start the workers before time is measured
        threads = [threading.Thread(target=ask, args=(reward, n % len(questions))) for n in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answered) == CALLERS * len(questions)
    assert [value for _, value, _, _ in answered] == [expected for _, _, expected, _ in answered]
    assert sum(timeouts for *_, timeouts in answered) == CALLERS
    assert set(limits) == {SHORT_S}, "the wait for a worker is no part of a call's deadline"
    assert max(seconds for seconds, *_ in answered) < TURN_S + 12, "12 s for forking workers on a busy machine"


ANSWERS, BATCH, WARM_UP = 10_000, 500, 2_000
GROWTH_BYTES = 32 * 2**20  # of this process, the fork server and two workers; the caches of workers still grow


@pytest.mark.nightly
def test_memory_is_constant_over_ten_thousand_answers() -> None:
    """In a process of its own, which has no other children and no memory that earlier tests freed."""
    script = f"from {__name__} import score_ten_thousand; score_ten_thousand()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes, workers = json.loads(done.stdout.splitlines()[-1])
    settled = sizes[WARM_UP // BATCH :]
    print(*(f"{name} {size >> 20} MiB" for name, size in (("warm", settled[0]), ("largest", max(settled)))))
    assert max(settled) - settled[0] < GROWTH_BYTES
    assert workers >= 1 + 2 * WORKERS, "fork server and workers, each replaced after 2,000 answers"


def score_ten_thousand() -> None:
    """Print the bytes of this process and its children after each batch, and how many children there were."""
    generator = random.Random(0)
    sizes: list[int] = []
    workers: set[int] = set()
    with MathReward(EXTRACTIONS["math"], num_workers=WORKERS, deadline_s=DEADLINE_S) as reward:
        for first in range(0, ANSWERS, BATCH):
            rows = [question(first + n, generator) for n in range(BATCH)]
            result = reward.score(*batch([(gold, [text]) for gold, text, _ in rows]))
            assert result.rewards == [expected for *_, expected in rows]
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            workers |= {process.pid for process in processes[1:]}
            sizes.append(sum(process.memory_info().rss for process in processes))
    print(json.dumps([sizes, len(workers)]))


def question(number: int, generator: random.Random) -> tuple[str, str, float]:
    """(gold, response, reward): all distinct; every second one needs computer algebra."""
    right = generator.random() < 0.5
    value = number + (not right)
    if number % 2:
        return str(number), f"So it is {value}.\n\\boxed{{{value}\\text{{ km}}}}", float(right)
    return f"{number}+x", f"\\boxed{{x+{value}}}", float(right)
