r"""Answers that are hard to score: (boxed answer, gold answer, whether a person calls them equal), by rule."""

from __future__ import annotations

from tests.unit.rewards import hard_cases_algebra, hard_cases_forms, hard_cases_numbers, hard_cases_texts

FILES = (hard_cases_numbers, hard_cases_forms, hard_cases_algebra, hard_cases_texts)
CASES: dict[str, list[tuple[str, str, bool]]] = {rule: cases for file in FILES for rule, cases in file.CASES.items()}
