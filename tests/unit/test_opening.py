"""Opening a run: which GPU is used first. tests/e2e and tests/distributed open whole runs."""

from __future__ import annotations

import json
from contextlib import chdir, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from oblr_megatron import opening
from oblr_megatron.checkpoint.resume import Checkpoint, changes, check_fits, find
from oblr_megatron.checkpoint.store import NoSpaceError
from oblr_megatron.config import Config
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.memory.select_mode import with_mode
from oblr_megatron.model.published import published
from oblr_megatron.opening import open_sampling, remove_later_steps
from oblr_megatron.preflight import checklist, inputs
from tests.distributed.launch import run_ranks
from tests.distributed.replayed import config_of, train_here
from tests.tiny import make_hf_dir
from tests.unit.configs import config_with

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
    checkpoints: Any = [SimpleNamespace(state={"config": with_mode(config_with(), saved).model_dump(mode="json")})]
    model: Any = SimpleNamespace(config=published("Qwen3-0.6B"))
    assert inputs.choose_mode(model, config_with(**changed), checkpoints, 1).mode == mode


@pytest.mark.parametrize(
    ("checkpoint", "refused"),
    [
        ({"every_steps": 2}, True),
        ({"every_steps": 0, "best_metric": "eval/held/accuracy"}, True),
        ({"every_steps": 0, "exit_before_timeout_s": 60}, True),
        ({"every_steps": 0, "export_hf": True}, True),
        ({"every_steps": 0}, False),
    ],
)
def test_a_run_that_saves_for_any_reason_needs_room(
    checkpoint: dict[str, Any], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checklist, "check_space", Mock(side_effect=NoSpaceError("1 GiB needed, 0 GiB free")))
    monkeypatch.setattr(checklist, "checkpoint_bytes", Mock(return_value=14))
    evaluate = {"data": {"held": "held.jsonl"}, "every_steps": 1}
    config = config_with(run_dir=tmp_path, checkpoint={"export_hf": False} | checkpoint, evaluate=evaluate)
    with pytest.raises(UserError, match="1 GiB needed") if refused else nullcontext():
        checklist.check_room(config, Mock(num_bytes=2))


def test_all_checkpoints_and_the_exports_need_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is 14 bytes, an export 2. The third checkpoint is written before the first is removed."""
    asked = Mock()
    monkeypatch.setattr(checklist, "check_space", asked)
    monkeypatch.setattr(checklist, "checkpoint_bytes", Mock(return_value=14))
    best = {"checkpoint": {"best_metric": "eval/held/accuracy"}, "evaluate": {"data": {"held": "h"}, "every_steps": 1}}
    for steps, more in ((50, {}), (100, {}), (150, {}), (150, best)):
        checklist.check_room(config_with(run_dir=tmp_path, num_steps=steps, **more), Mock(num_bytes=2))
    assert [call.args[1] for call in asked.call_args_list] == [14 + 2, 2 * 14 + 2, 3 * 14, 4 * 14]
    asked.reset_mock()
    monkeypatch.setattr(checklist, "checkpoints_of", Mock(return_value=[Path("step_2"), Path("step_1")]))
    for more in ({}, best):  # the next save removes one, or one is the best
        checklist.check_room(config_with(run_dir=tmp_path, num_steps=150, **more), Mock(num_bytes=2))
    assert [call.args[1] for call in asked.call_args_list] == [14, 2 * 14]


def test_room_is_asked_for_where_an_export_is_and_partial_ones_count_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path("/dev/shm")
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    asked = Mock()
    monkeypatch.setattr(checklist, "check_space", asked)
    monkeypatch.setattr(checklist, "checkpoint_bytes", Mock(return_value=14))
    (tmp_path / ".hf_best.node-1-1-0.partial").mkdir()
    (tmp_path / ".hf_best.node-1-1-0.partial" / "model").write_bytes(b"x" * 9000)
    with TemporaryDirectory(dir=other) as larger:
        (tmp_path / "hf").symlink_to(larger)
        best = {"best_metric": "eval/held/accuracy"}
        evaluate = {"data": {"held": "h"}, "every_steps": 1}
        config = config_with(run_dir=tmp_path, num_steps=1, checkpoint=best | {"every_steps": 0}, evaluate=evaluate)
        checklist.check_room(config, Mock(num_bytes=2))
    first, second = asked.call_args_list
    assert (first.args, first.kwargs["freed"] >= 9000) == ((tmp_path / "checkpoints", 14 + 2), True)
    assert (second.args, second.kwargs) == ((other, 2), {"freed": 0})


def test_every_setting_that_changed_since_the_checkpoint_is_named() -> None:
    """Also entries of tables that come or go, but no key that only one version of this package knows."""
    given = ["rollout.vllm={enforce_eager=true}", "evaluate.data={a='a.jsonl'}", "rollout.temperature=0.5"]
    before, now = config_with("seed=1"), config_with(*given, "seed=1")
    saved: Any = SimpleNamespace(state={"config": before.model_dump(mode="json") | {"removed": 3}})
    names = [line.partition(" ")[0] for line in changes(saved, now)]
    assert {"rollout.vllm.enforce_eager", "evaluate.data.a.path", "rollout.temperature"} <= set(names)
    assert "rollout.vllm.enforce_eager not set -> True" in changes(saved, now)
    back: Any = SimpleNamespace(state={"config": now.model_dump(mode="json")})
    assert "rollout.vllm.enforce_eager True -> not set" in changes(back, before) and changes(back, now) == []
    assert not {"removed", "seed"} & set(names)


OTHERS = {
    "seed": "1",
    "data.shuffle": "false",
    "model.dtype": "bfloat16",
    "optimizer.name": "sgd",
    "algo.aggregation": "token_mean",
    "algo.schedule": "cosine",
    "algo.snr.estimator": "momentum",
    "algo.snr.reference": "one",
    "model.lora.rank": "2",
    "model.lora.alpha": "64",
    "model.lora.targets": "['o_proj']",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_on_which_the_state_depends_must_be_that_of_the_checkpoint(name: str) -> None:
    adapted = ["model.lora.rank=8"] if name.startswith("model.lora.") else []
    before, now = config_with(*adapted), config_with(*adapted, f"{name}={OTHERS[name]}")
    manifest: Any = SimpleNamespace(state={"config": before.model_dump(mode="json")})
    with pytest.raises(UserError, match=f"the checkpoint was made with {name} .*, but the config has"):
        check_fits(Checkpoint(Path("step_00000004"), manifest), now, Mock())


def test_a_run_does_not_begin_without_the_checkpoint_it_names(tmp_path: Path) -> None:
    config = config_with(run_dir=tmp_path / "run", checkpoint={"resume": str(tmp_path / "deleted")})
    with pytest.raises(UserError, match=r"the checkpoint does not exist \[.*deleted\]"):
        find(config, Mock())


@pytest.mark.parametrize(("rank", "others"), [(0, "ranks 1 to 3"), (2, "rank 0")])
def test_a_wait_says_for_whom(rank: int, others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "worker-0")
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert opening._absent(rank, 4).startswith(f"rank {rank} waits for {others} at worker-0:29511 ")


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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")

    def resolve(*_: Any, free_bytes: int, **options: Any) -> None:
        calls.append(("resolve", free_bytes))
        raise UserError("enough was seen")

    monkeypatch.setattr(inputs, "resolve", resolve)
    monkeypatch.setattr(opening, "preflight", lambda config, ranks: inputs.select_mode(model, config, ranks))
    monkeypatch.setattr(opening, "check_run_dir", lambda *_, **__: None)
    monkeypatch.setattr(opening, "run_lock", lambda _: pytest.MonkeyPatch.context())
    model: Any = SimpleNamespace(config={})
    with pytest.raises(UserError, match="enough"), open_sampling(config_with()):
        pass
    assert calls[0] == ("set_device", 3)
    assert ("get_device_properties", 3) in calls and ("resolve", TOTAL) in calls
    assert not [name for name, *_ in calls if name == "mem_get_info"]  # it creates a context, also in the launcher
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="LOCAL_RANK is 3, but this process sees 1 GPU "), open_sampling(config_with()):
        pass


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
        config=config_with(run_dir=str(tmp_path)),
        stop=SimpleNamespace(closing=False),
        parallel=SimpleNamespace(rank=0),
        alarms=Mock(),
        trackers=Mock(),
        display=SimpleNamespace(message=said.append),
    )
    with opening.started(sampling):
        sampling.alarms.start.assert_called_once()
    with pytest.raises(RunError, match="an engine died"), opening.started(sampling):
        raise RunError("an engine died")
    assert len(said) == 2 and all(one.startswith("warning: cannot write the report: ") and line in one for one in said)


DIFFERENCES = {
    "rows": "reads other rows than rank 0 [config: data.train]",
    "weights": "has other weights than rank 0 [config: model.path]",
    "baseline": "has another file than rank 0 [config: algo.baseline: ",
    "rate": "has other settings than rank 0 [config: optimizer]",
}


@pytest.mark.parametrize("differs", DIFFERENCES)
def test_what_ranks_must_have_in_common(differs: str, tmp_path: Path) -> None:
    facts = []
    for rank in range(2):
        make_hf_dir(tmp_path / f"model{rank}", head_dim=32, seed=rank)
        with chdir(tmp_path):
            config = _config_of(rank, tmp_path, differs)
            facts.append(inputs.preflight(config, 1, owns_run_dir=False).facts(config))
    inputs.check_same([facts[0], facts[0]])
    with pytest.raises(UserError) as error:
        inputs.check_same(facts)
    assert f"rank 1 {DIFFERENCES[differs]}" in str(error.value)


@pytest.mark.slow
def test_ranks_that_differ_end_with_one_line(tmp_path: Path) -> None:
    """Before any engine is started."""
    make_hf_dir(tmp_path / "model0", head_dim=32)
    outcomes = run_ranks(_that_differs, 2, tmp_path)
    assert [status for status, _ in outcomes] == [2, 2]
    said = "".join(line for _, line in outcomes)
    assert said.count("error: ") == 1 and f"rank 1 {DIFFERENCES['rate']}. Fix: copy the same files" in said, said
    assert not (tmp_path / "run").exists()


def _that_differs(directory: Path) -> tuple[int, str]:
    own = directory / f"rank{dist.get_rank()}"
    own.mkdir()
    (own / "model0").symlink_to(directory / "model0")
    with chdir(own):
        return train_here(_config_of(dist.get_rank(), directory, "rate"))


def _config_of(rank: int, directory: Path, differs: str) -> Config:
    """A run that would sample, of files in the current directory; the second rank's differ in one way."""
    own = {name: rank * (differs == name) for name in DIFFERENCES}
    Path("model").unlink(missing_ok=True)
    Path("model").symlink_to(f"model{own['weights']}")
    row = json.dumps({"question": "t2", "answer": f"t{own['rows']}"})
    Path("rows.jsonl").write_text(f"{row}\n" * 8)
    Path("mine.py").write_text(
        "from oblr_megatron import baseline\n\n@baseline(over='nothing')\n"
        f"def constant(rewards, norms_sq, lengths, history):\n    return 0 * rewards + {own['baseline']}\n"
    )
    overrides = ["data.train=rows.jsonl", "data.deduplicate=false", "model.path=model", "algo.schedule=constant"]
    overrides += ["algo.baseline=mine.py:constant", f"optimizer.lr={1e-3 * (1 + own['rate'])}"]
    config = config_of(directory, directory / "run", *overrides)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"replay": None})})


def test_what_lies_behind_the_step_of_a_resume_is_removed(tmp_path: Path) -> None:
    for name in ("rollouts/step_000030.parquet", "rollouts/step_000031.parquet", "rollouts/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for step in (20, 40):
        (tmp_path / f"evaluations/step_{step:06}").mkdir(parents=True)
        (tmp_path / f"evaluations/step_{step:06}/math.jsonl").touch()
    remove_later_steps(tmp_path, 30)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert left == ["evaluations/step_000020/math.jsonl", "rollouts/notes.txt", "rollouts/step_000030.parquet"]
    remove_later_steps(tmp_path / "new", 0)
