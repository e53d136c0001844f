"""Opening a run: which GPU is used first. tests/e2e and tests/distributed open whole runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oblr_megatron import opening, preflight
from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.opening import open_sampling

TOTAL = 80 * 10**9


def test_a_rank_selects_its_gpu_before_any_other_cuda_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def record(name: str, answer: Any) -> None:
        def call(*arguments: Any) -> Any:
            calls.append((name, *arguments))
            return answer

        monkeypatch.setattr(torch.cuda, name, call)

    record("set_device", None)
    record("mem_get_info", (TOTAL, TOTAL))
    record("get_device_capability", (9, 0))
    record("get_device_properties", SimpleNamespace(total_memory=TOTAL))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")

    def resolve(*_: Any, free_bytes: int, **options: Any) -> None:
        calls.append(("resolve", free_bytes))
        raise UserError("enough was seen")

    monkeypatch.setattr(preflight, "resolve", resolve)
    monkeypatch.setattr(opening, "preflight", lambda config, ranks: preflight.select_mode(model, config, ranks))
    monkeypatch.setattr(opening, "check_run_dir", lambda *_, **__: None)
    monkeypatch.setattr(opening, "run_lock", lambda _: pytest.MonkeyPatch.context())
    model: Any = SimpleNamespace(config={})
    config = Config.model_validate({"run_dir": "run", "model": {"path": "model"}, "data": {"train": "rows.jsonl"}})
    with pytest.raises(UserError, match="enough"), open_sampling(config):
        pass
    assert calls[0] == ("set_device", 3)
    assert ("get_device_properties", 3) in calls and ("resolve", TOTAL) in calls
    assert not [name for name, *_ in calls if name == "mem_get_info"]  # it creates a context, also in the launcher
