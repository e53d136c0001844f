"""Accuracies before and after: which engine answers, and what a reward without scores does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.config import Config
from oblr_megatron.errors import RunError
from oblr_megatron.extras.quantize import accuracy
from tests.unit.evaluation import test_setup
from tests.unit.evaluation.test_unscored import PROMPTS, Echo, Failing, config

run_config = test_setup.config


def test_accuracies_before_and_after_quantization_are_of_the_directories(
    run_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's engines round weights when they arrive: "before" would be rounded, too."""
    opened: list[Any] = []

    @contextmanager
    def open_(given: Config) -> Iterator[tuple[None, None]]:
        opened.append(given)
        yield None, None

    monkeypatch.setattr(accuracy, "opened", open_)
    assert accuracy.with_vllm(tmp_path, {}, run_config) == {}
    (given,) = opened
    assert (given.rollout.quantization, given.rollout.dtype, given.model.path) == ("none", "bfloat16", tmp_path)


def test_quantize_counts_greedy_responses_and_names_the_set_without_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*late: int) -> dict[str, accuracy.Accuracy]:
        opened = nullcontext((Echo(), Failing(*late)))
        monkeypatch.setattr(accuracy, "opened", lambda config: opened)
        return accuracy.with_vllm(Path("m"), {"set": PROMPTS}, config())

    assert found(2) == {"set": accuracy.count_right([1.0, 1.0, 0.0], unscored=1)}
    with pytest.raises(RunError, match="'set'"):
        found(0, 1)
