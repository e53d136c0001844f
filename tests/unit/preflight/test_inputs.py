"""The norms' mode of a resumed run. Not covered: the rest of the inputs (tests/e2e/test_resume.py, unit/data)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from oblr_megatron.memory.select_mode import with_mode
from oblr_megatron.preflight.inputs import with_saved_mode
from tests.unit.configs import config_with


@pytest.mark.parametrize(
    ("before", "now", "mode"),
    [
        ([], [], "stash"),
        (["algo.baseline=rloo"], ["algo.baseline=rloo"], "stash"),
        (["algo.baseline=rloo"], [], "auto"),  # before, nothing was measured
        ([], ["gradnorm.source=logit"], "auto"),
        ([], ["parallel.micro_batch_tokens=512"], "auto"),
        ([], ["gradnorm.mode=inline"], "inline"),
        ([], ["optimizer.lr=0.1"], "stash"),
    ],
)
def test_a_resumed_run_keeps_the_mode_for_the_same_norms(before: list[str], now: list[str], mode: str) -> None:
    saved = with_mode(config_with(*before), "stash").model_dump(mode="json")
    checkpoints: list[Any] = [SimpleNamespace(state={"config": saved})]
    assert with_saved_mode(config_with(*now), cast(Any, checkpoints)).gradnorm.mode == mode
    assert with_saved_mode(config_with(*now), []) == config_with(*now)
