r"""Answers that are hard to judge: (boxed answer, gold answer, whether they are equal), by the rule that decides."""

from __future__ import annotations

from tests.unit.rewards import hard_cases_algebra, hard_cases_forms, hard_cases_numbers, hard_cases_texts

FILES = (hard_cases_numbers, hard_cases_forms, hard_cases_algebra, hard_cases_texts)
CASES: dict[str, list[tuple[str, str, bool]]] = {rule: cases for file in FILES for rule, cases in file.CASES.items()}
