"""The tasks: gold answers earn 1, splits are disjoint and stable, teachers are right as often as asked.

Not covered: how well a model learns them.
"""

import random

import pytest

from studies.tasks import TASKS, Row, Task, brackets, chain, walk

each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


@each_task
def test_rows_are_distinct_and_the_split_is_the_same_every_time(task: Task) -> None:
    train, held_out = task.rows(500, 50)
    questions = {row.question for row in train + held_out}
    assert len(questions) == 550 and (train, held_out) == task.rows(500, 50)


@each_task
def test_gold_answers_earn_one_and_fit(task: Task) -> None:
    for row in task.rows(300, 1)[0]:
        right = task.teach(row, random.Random(0), 1.0)
        assert task.reward(right, row.answer) == 1.0
        assert len(right) < task.max_response_tokens and set(row.question + right) <= set(task.characters)
        assert task.reward("", row.answer) == 0.0 and 0.0 <= task.reward(right + right[0], row.answer) <= 1.0
        if right + right[0] != "00":  # the same number
            assert task.reward(right + right[0], row.answer) < 1.0


@each_task
def test_teachers_are_right_as_often_as_asked(task: Task) -> None:
    """Wrong answers may be right by chance, and most easy questions of `mixed` are right at any skill."""
    generator = random.Random(0)
    rows = task.rows(1500, 1)[0]
    for share in (0.2, 0.6):
        right = [task.reward(task.teach(row, generator, share), row.answer) == 1.0 for row in rows]
        assert share - 0.05 < sum(right) / len(right) < share + 0.3


@each_task
def test_answers_of_an_untaught_teacher_fit(task: Task) -> None:
    generator = random.Random(1)
    for row in task.rows(300, 1)[0]:
        told = task.teach(row, generator, 0.0)
        assert len(told) < task.max_response_tokens and set(told) <= set(task.characters)


def test_examples_of_the_docstrings() -> None:
    assert chain.partial_sums("7+5+9+4:") == [2, 1, 5] and chain.reward("215=5", "5") == 1.0
    assert chain.reward("=5", "5") == 1.0 and chain.reward("2155", "5") == 0.0 and chain.reward("2=5=5", "5") == 0.0
    assert walk.places("4+3-2+1+1-3:") == [7, 5, 6, 7, 4]
    assert brackets.reward(">]", ">])") == pytest.approx(2 / 3) and brackets.reward("))", ">])") == 0.0
    assert TASKS["sums"].reward("151", Row("64+87=", "151").answer) == 1.0
