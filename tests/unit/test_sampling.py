"""When a run stops before its time limit: the time of the next step, with an evaluation where one is due.

Not covered: the signals and the limit itself (runtime/test_stopping.py).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.sampling import Sampling
from oblr_megatron.step_loop import sample


@pytest.mark.parametrize(("step", "seconds"), [(10, -math.inf), (18, 60.0), (19, 960.0)])
def test_the_next_step_may_take_the_longest_one_and_an_evaluation_that_is_due(step: int, seconds: float) -> None:
    """At the start of this process, after step 10, signals alone count."""
    asked = list[float]()
    run: Any = SimpleNamespace(
        start=10,
        longest_step_s=60.0,
        evaluation_s=900.0,
        evaluation_due=lambda step: step % 20 == 0,
        stop=SimpleNamespace(shared_reason=lambda needed, _: asked.append(needed)),
        control_group=None,
    )
    assert not Sampling.stopped(run, step)
    assert asked == [seconds]


def test_a_run_that_only_samples_stops_before_its_first_step() -> None:
    """A signal came while its engines started. A step here would be an AttributeError."""
    asked = list[int]()
    run: Any = SimpleNamespace(start=3, stopped=lambda step: asked.append(step) is None)
    sample(run)
    assert asked == [3]
