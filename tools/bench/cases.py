r"""Compare the verifier with math-verify on the tests' hard cases: right decisions per rule.

    python tools/bench/cases.py --json run/bench/cases.json    seconds

math-verify is called as its documentation says, with \boxed{...} around both answers.
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
    """Results on the cases of one rule.

    Example: Row(rule="bases", cases=24, math=24, math_verify=15, false_positives=0, math_verify_false_positives=6)
    """

    rule: str
    cases: int
    math: int  # right decisions of our verifier
    math_verify: int
    false_positives: int  # wrong answers accepted by our verifier
    math_verify_false_positives: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    rows = [compare(rule, cases) for rule, cases in CASES.items()]
    publish([*rows, compare("all", [case for cases in CASES.values() for case in cases])], "hard cases", options.json)


def compare(rule: str, cases: Sequence[tuple[str, str, bool]]) -> Row:
    """Run both verifiers on the cases of one rule."""
    ours = [grade(f"so \\boxed{{{given}}}", gold) for given, gold, _ in cases]
    other = [math_verify_says(given, gold) for given, gold, _ in cases]
    expected = [equal for _, _, equal in cases]
    return Row(
        rule=rule,
        cases=len(cases),
        math=sum(accepted is equal for accepted, equal in zip(ours, expected, strict=True)),
        math_verify=sum(accepted is equal for accepted, equal in zip(other, expected, strict=True)),
        false_positives=sum(accepted and not equal for accepted, equal in zip(ours, expected, strict=True)),
        math_verify_false_positives=sum(one and not equal for one, equal in zip(other, expected, strict=True)),
    )


def math_verify_says(given: str, gold: str) -> bool:
    """Whether math-verify accepts the answer."""
    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"so \\boxed{{{given}}}")))


if __name__ == "__main__":
    main()
