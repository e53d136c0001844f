"""A function that hangs in every call wastes little time.

Not covered: a service that hangs (tests/unit/rewards/test_http.py).
"""

from __future__ import annotations

from contextlib import closing

import pytest

from oblr_megatron.processes.calls import Score
from oblr_megatron.processes.patience import MIN_LATE, Patience
from oblr_megatron.processes.pool import Pool
from tests.unit.processes.conftest import unhurried

SCORERS = "tests.unit.processes.scorers"
ANSWERED, LATE = [Score(1.0)], [Score(timed_out=True)]


def test_patience_ends_when_nothing_was_ever_answered() -> None:
    patience = Patience(at_once=2)
    assert patience.limit == MIN_LATE == 8 and Patience(at_once=32).limit == 64
    order = list(patience.begin(512))
    assert sorted(order) == list(range(512)) and order[:8] == list(range(0, 512, 64)), "of eight different prompts"
    for _ in range(8):
        assert not patience.ended
        patience.note(LATE)
    assert patience.ended
    assert list(patience.begin(3)) == [0, 1, 2] and not patience.ended, "the next batch begins again"


def test_a_refused_call_is_no_score() -> None:
    """A service refuses a connection while it starts, and then hangs."""
    patience = Patience(at_once=1)
    list(patience.begin(100))
    patience.note([Score(error="connection refused")])
    for _ in range(8):
        patience.note(LATE)
    assert patience.ended


def test_patience_does_not_end_after_an_answer() -> None:
    patience = Patience(at_once=1)
    list(patience.begin(100))
    patience.note([*LATE, *ANSWERED])
    for _ in range(50):
        patience.note(LATE)
    assert not patience.ended


def test_a_function_that_hangs_is_called_a_few_times_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = unhurried(monkeypatch, "sleep")
    with closing(Pool(f"{SCORERS}:mixed", num_workers=4, deadline_s=0.5)) as pool:
        assert all(score.timed_out for score in pool.map([("sleep", "", "")] * 100))
        assert MIN_LATE <= len(requests) < MIN_LATE + 4, "the last ones were under way"
        assert pool.ask("fine", "", "").value == 1


def test_a_function_that_has_worked_gets_all_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = unhurried(monkeypatch, "sleep")
    with closing(Pool(f"{SCORERS}:mixed", num_workers=4, deadline_s=0.5)) as pool:
        assert pool.map([("fine", "", "")])[0].value == 1
        assert sum(score.timed_out for score in pool.map([("sleep", "", "")] * 12)) == 12
        assert len(requests) == 13
