"""Opening a run: which GPU is used first. tests/e2e and tests/distributed open whole runs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from oblr_megatron import opening
from oblr_megatron.checkpoint.resume import find
from oblr_megatron.checkpoint.store import NoSpaceError
from oblr_megatron.config import Config, parse_config
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.memory.select_mode import with_mode
from oblr_megatron.model.published import published
from oblr_megatron.opening import open_sampling
from oblr_megatron.preflight import checklist, inputs
from tests.distributed.launch import run_ranks
from tests.distributed.replayed import config_of, train_here
from tests.tiny import make_hf_dir

TOTAL = 80 * 10**9


@pytest.mark.parametrize(
    ("saved", "changed", "mode"),
    [
        ("inline", {}, "inline"),
        ("two_pass", {}, "two_pass"),
        ("inline", {"algo": {"baseline": "optimal"}}, "stash"),
        ("inline", {"gradnorm": {"sample_fraction": 0.5}}, "two_pass"),
        ("inline", {"algo": {"kl_coefficient": 0.01}}, "two_pass"),
    ],
)
def test_a_resumed_run_keeps_its_mode_if_other_settings_allow_it(
    saved: str, changed: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "free_memory", lambda _: 2**45)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table = {"run_dir": "run", "model": {"path": "model"}, "data": {"train": "rows.jsonl"}}
    before = with_mode(Config.model_validate(table), saved).model_dump(mode="json")
    checkpoints: Any = [SimpleNamespace(state={"config": before})]
    model: Any = SimpleNamespace(config=published("Qwen3-0.6B"))
    assert inputs.choose_mode(model, Config.model_validate(table | changed), checkpoints, 1).mode == mode


@pytest.mark.parametrize(
    ("checkpoint", "refused"),
    [
        ({"every_steps": 2}, True),
        ({"every_steps": 0, "best_metric": "eval/held/accuracy"}, True),
        ({"every_steps": 0, "exit_before_timeout_s": 60}, True),
        ({"every_steps": 0}, False),
    ],
)
def test_a_run_that_saves_for_any_reason_needs_room(
    checkpoint: dict[str, Any], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checklist, "check_space", Mock(side_effect=NoSpaceError("1 GiB needed, 0 GiB free")))
    monkeypatch.setattr(checklist, "checkpoint_bytes", Mock())
    table = {"run_dir": str(tmp_path), "model": {"path": "model"}, "data": {"train": "rows.jsonl"}}
    evaluate = {"data": {"held": "held.jsonl"}, "every_steps": 1}
    config = parse_config(table | {"checkpoint": checkpoint, "evaluate": evaluate})
    with pytest.raises(UserError, match="1 GiB needed") if refused else nullcontext():
        checklist.check_room(config, Mock())


def test_a_run_does_not_begin_without_the_checkpoint_it_names(tmp_path: Path) -> None:
    config = parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "model"},
            "data": {"train": "rows.jsonl"},
            "checkpoint": {"resume": str(tmp_path / "deleted")},
        }
    )
    model: Any = SimpleNamespace()
    with pytest.raises(UserError, match=r"the checkpoint does not exist \[.*deleted\]"):
        find(config, model)


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

    monkeypatch.setattr(inputs, "resolve", resolve)
    monkeypatch.setattr(opening, "preflight", lambda config, ranks: inputs.select_mode(model, config, ranks))
    monkeypatch.setattr(opening, "check_run_dir", lambda *_, **__: None)
    monkeypatch.setattr(opening, "run_lock", lambda _: pytest.MonkeyPatch.context())
    model: Any = SimpleNamespace(config={})
    config = Config.model_validate({"run_dir": "run", "model": {"path": "model"}, "data": {"train": "rows.jsonl"}})
    with pytest.raises(UserError, match="enough"), open_sampling(config):
        pass
    assert calls[0] == ("set_device", 3)
    assert ("get_device_properties", 3) in calls and ("resolve", TOTAL) in calls
    assert not [name for name, *_ in calls if name == "mem_get_info"]  # it creates a context, also in the launcher


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (OSError(28, "No space left on device"), "No space left on device. Fix: free space, then call "),
        (UserError("not JSON", where="config.json", fix="restore it"), "not JSON [config.json]. Fix: restore it"),
        (IndexError("list index out of range"), "IndexError('list index out of range'). Fix: call "),
    ],
)
def test_a_report_that_fails_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, line: str
) -> None:
    """A finished run stays finished, and a failed one keeps its own error."""

    def write_report(_: Path) -> Path:
        raise fault

    for name, action in (("write_report", write_report), ("write_config", Mock()), ("recorded", nullcontext)):
        monkeypatch.setattr(opening, name, action)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    said: list[str] = []
    sampling: Any = SimpleNamespace(
        config=SimpleNamespace(run_dir=tmp_path),
        parallel=SimpleNamespace(rank=0),
        trackers=Mock(),
        display=SimpleNamespace(message=said.append),
    )
    with opening.started(sampling):
        pass
    with pytest.raises(RunError, match="an engine died"), opening.started(sampling):
        raise RunError("an engine died")
    assert len(said) == 2 and all(one.startswith("warning: cannot write the report: ") and line in one for one in said)


@pytest.mark.slow
def test_ranks_that_read_other_rows_end_with_one_line(tmp_path: Path) -> None:
    """Before any engine is started."""
    make_hf_dir(tmp_path / "model", head_dim=32)
    outcomes = run_ranks(_with_own_rows, 2, tmp_path)
    assert [status for status, _ in outcomes] == [2, 2]
    said = "".join(said for _, said in outcomes)
    assert said.count("error: ") == 1 and "rank 1 reads other rows than rank 0 [config: data.train]. Fix: " in said, (
        said
    )
    assert not (tmp_path / "run").exists()


def _with_own_rows(directory: Path) -> tuple[int, str]:
    """A run that would sample; each rank has another file."""
    rows = directory / f"rows{dist.get_rank()}.jsonl"
    rows.write_text("".join(json.dumps({"question": "t2", "answer": f"t{dist.get_rank()}"}) + "\n" for _ in range(8)))
    config = config_of(directory, directory / "run", f"data.train={rows}")
    return train_here(config.model_copy(update={"rollout": config.rollout.model_copy(update={"replay": None})}))
