r"""The benchmarks' golds: each equals itself in other spellings and differs from what is almost the same.

Here a sample of each set; tools/bench/golds.py takes whole sets and lists the exceptions.
"""

from __future__ import annotations

import json
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from oblr_megatron.rewards.math import settle
from tests.unit.rewards.conftest import SHARED

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "bench"))  # scripts import their neighbours

import golds

pytestmark = pytest.mark.nightly
ROWS = 300  # of each set
ALIKE = {  # docs/verifier.md says why these are equal
    "864 \\mbox{ inches}^2": {"\\boxed{864 \\mbox{ inches}^3}"},
    "15\\mbox{ cm}^2": {"\\boxed{15\\mbox{ cm}^3}"},
    "\\angle B E A_{1}=90,\\angle A E B_{1}=90": {
        "\\boxed{\\angle B E A_{2}=90,\\angle A E B_{1}=90}",
        "\\boxed{\\angle B E A_{1}=90,\\angle A E B_{2}=90}",
    },
}


def entries(name: str) -> list[golds.Entry]:
    path = SHARED / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return rows if len(rows) <= ROWS else random.Random(0).sample(rows, ROWS)


@pytest.mark.parametrize("kind", golds.KINDS)
@pytest.mark.parametrize("name", golds.SETS)
def test_golds(name: str, kind: str) -> None:
    extraction, write, equal = golds.KINDS[kind]
    cases = [(entry["answer"], text) for entry in entries(name) for text in write(entry)]
    assert cases or kind in ("answer_raw", "solution")
    wrong = golds.exceptions(cases, extraction, equal=equal)
    assert [(gold, text) for gold, text in wrong if text not in ALIKE.get(gold, ())] == []


def test_golds_of_one_set_differ_from_one_another() -> None:
    answers = (entry["answer"] for entry in entries("olympiadbench"))
    numbers = sorted({answer for answer in answers if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", answer)})
    for a, b in random.Random(0).sample([(a, b) for a in numbers for b in numbers], 5000):
        assert settle(b, a) is (Fraction(a) == Fraction(b))
