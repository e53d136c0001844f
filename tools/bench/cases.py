r"""The verifier and math-verify on the hard cases of the tests: how many each judges as a person does, by rule.

    python tools/bench/cases.py --json run/bench/cases.json    seconds

math-verify is called as its documentation says, with a \boxed{...} around both answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from math_verify import parse, verify
from record import publish

from oblr_megatron.rewards.math import grade

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.unit.rewards.hard_cases import CASES


@dataclass(frozen=True, slots=True)
class Row:
    """One rule.

    Example: Row(rule="bases", cases=24, math=24, math_verify=15, false_positives=0, math_verify_false_positives=6)
    """

    rule: str
    cases: int
    math: int  # judged as a person does
    math_verify: int
    false_positives: int  # wrong answers that were accepted
    math_verify_false_positives: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    rows = [compare(rule, cases) for rule, cases in CASES.items()]
    publish([*rows, compare("all", [case for cases in CASES.values() for case in cases])], "hard cases", options.json)


def compare(rule: str, cases: Sequence[tuple[str, str, bool]]) -> Row:
    """Both on the cases of one rule."""
    ours = [grade(f"so \\boxed{{{given}}}", gold) for given, gold, _ in cases]
    theirs = [math_verify_says(given, gold) for given, gold, _ in cases]
    expected = [equal for _, _, equal in cases]
    return Row(
        rule=rule,
        cases=len(cases),
        math=sum(verdict is equal for verdict, equal in zip(ours, expected, strict=True)),
        math_verify=sum(verdict is equal for verdict, equal in zip(theirs, expected, strict=True)),
        false_positives=sum(verdict and not equal for verdict, equal in zip(ours, expected, strict=True)),
        math_verify_false_positives=sum(v and not equal for v, equal in zip(theirs, expected, strict=True)),
    )


def math_verify_says(given: str, gold: str) -> bool:
    """That library's verdict."""
    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"so \\boxed{{{given}}}")))


if __name__ == "__main__":
    main()
