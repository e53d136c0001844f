"""Saves that succeed and fail on several ranks: every rank gets the same outcome, and the best checkpoint exists.

Not covered: the contents of a checkpoint (test_resume.py), a full disk (test_full_disk.py).
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import api as validation
from torch.distributed.checkpoint import default_planner, filesystem

from oblr_megatron.checkpoint import store
from oblr_megatron.checkpoint.distributed import training_state
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.saver import Best, Saver
from oblr_megatron.checkpoint.store import checkpoints_of, read_manifest
from oblr_megatron.checks.run_dir import CHECKPOINTS
from oblr_megatron.config import OptimizerConfig, parse_config
from oblr_megatron.errors import RunError
from oblr_megatron.model.optimizer import PolicyOptimizer
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy
from tests.tiny import make_hf_dir, make_moe_hf_dir

METRIC = "eval/set/accuracy"


def config_of(path: Path, run_dir: Path, *, deadline_s: float = 1800, **checkpoint: Any) -> Any:
    table = {"run_dir": str(run_dir), "model": {"path": str(path)}, "data": {"train": "t"}, "checkpoint": checkpoint}
    table["evaluate"] = {"data": {"set": "s", "other": "o"}, "every_steps": 1}
    table |= {"parallel": {"distributed_timeout_s": deadline_s}, "rollout": {"push_timeout_s": 5}}
    return parse_config(table)


def obstructed(stage: Callable[..., Any]) -> Callable[..., Any]:
    """A `stage` after which the last rank cannot write its file."""

    def staged(state: Any, directory: Path, *, copy: bool) -> Any:
        write = stage(state, directory, copy=copy)
        (directory / f"__{torch.distributed.get_world_size() - 1}_0.distcp").mkdir(exist_ok=True)
        return write

    return staged


def saves(path: Path, run_dir: Path) -> list[Any]:
    """Five saves: good, one that rank 1 cannot write, good, not the best, not the best; keep_last 1."""
    said: list[Any] = []
    with layout(tp=2) as parallel:
        policy = load_policy(path, parallel)
        optimizer = PolicyOptimizer(policy, OptimizerConfig())
        config = config_of(path, run_dir, every_steps=0, keep_last=1, best_metric=METRIC)
        saver = Saver(config, parallel, check_hf_dir(path))
        whole = saver._writer.stage
        for step, value in enumerate([0.5, 0.7, 0.6, 0.4, 0.3], start=1):
            saver._writer.stage = obstructed(whole) if step == 2 else whole  # type: ignore[method-assign]
            said.append(saver.due(step, 10, {METRIC: value}))
            saver.save(step, training_state(policy, optimizer), {"step": step}, {METRIC: value})
            saved = saver.wait()
            assert saved is not None and saver.wait() is None, "told once"
            said += [saved.failure is None, saver.best]
            if saved.failure is not None:
                assert saved.failure.startswith("rank 1 cannot write the checkpoint: "), saved.failure
            torch.distributed.barrier()
            said.append([read_manifest(found).step for found in checkpoints_of(run_dir)])
            assert not list((run_dir / "checkpoints").glob(".*"))
            torch.distributed.barrier()  # the next save removes what others are reading
    return said


def test_the_best_is_one_that_was_saved(tmp_path: Path) -> None:
    first, second = run_ranks(saves, 2, make_hf_dir(tmp_path / "model"), tmp_path / "run")
    assert first == second
    assert first == [
        *(True, True, Best(1, 0.5), [1]),
        *(True, False, Best(1, 0.5), [1]),
        *(True, True, Best(3, 0.6), [3]),
        *(False, True, Best(3, 0.6), [4, 3]),
        *(False, True, Best(3, 0.6), [5, 3]),
    ]


def test_a_best_that_was_not_saved_keeps_no_other_from_being_saved(tmp_path: Path) -> None:
    """0.5 is saved, 0.7 is not, and 0.6 is due, although nobody has waited for the failed save."""
    first, second = run_ranks(_unsaved_best, 2, make_hf_dir(tmp_path / "model"), tmp_path / "run")
    assert first == second == (False, True, Best(1, 0.5))


def _unsaved_best(path: Path, run_dir: Path) -> tuple[bool, bool, Best | None]:
    """Whether 0.4 and 0.6 are due after the failure, and the best then."""
    with layout(tp=2) as parallel:
        policy = load_policy(path, parallel)
        optimizer = PolicyOptimizer(policy, OptimizerConfig())
        saver = Saver(config_of(path, run_dir, every_steps=0, best_metric=METRIC), parallel, check_hf_dir(path))
        saver.save(1, training_state(policy, optimizer), {}, {METRIC: 0.5})
        saver.wait()
        saver._writer.stage = obstructed(saver._writer.stage)  # type: ignore[method-assign]
        saver.save(2, training_state(policy, optimizer), {}, {METRIC: 0.7})
        found = saver.due(3, 10, {METRIC: 0.4}), saver.due(4, 10, {METRIC: 0.6}), saver.best
        saver.wait()
        return found


def test_the_best_is_carried_into_a_run_that_holds_it(tmp_path: Path) -> None:
    """Not into a new directory, and not to another metric or meaning of it: exporting or comparing it would fail."""
    best = Best(20, 0.8)
    found = run_ranks(_carried, 2, make_hf_dir(tmp_path / "model"), tmp_path)
    assert found == [[best, None, None, None, best, None, None]] * 2


def _carried(path: Path, directory: Path) -> list[Best | None]:
    """The best of a run that goes on, of one in a new directory, under another metric, under none, evaluated at other
    steps, in another way, with another reward."""
    (directory / "old" / CHECKPOINTS / store.step_name(20)).mkdir(parents=True, exist_ok=True)
    before = config_of(path, directory / "old", best_metric=METRIC).model_dump(mode="json")
    cases: list[tuple[str, str, list[str]]] = [
        ("old", METRIC, []),
        ("new", METRIC, []),
        ("old", "eval/other/accuracy", []),
        ("old", "", []),
        ("old", METRIC, ["evaluate.every_steps=7", "num_steps=9"]),
        ("old", METRIC, ["evaluate.samples_per_prompt=4"]),
        ("old", METRIC, ["reward.name=exact_match"]),
    ]
    with layout() as parallel:
        return [
            Saver(
                parse_config(config_of(path, directory / name, best_metric=metric).model_dump(), "here", changed),
                parallel,
                check_hf_dir(path),
                {"step": 20, "best": [20, 0.8], "config": before},
            ).best
            for name, metric, changed in cases
        ]


def test_a_damaged_checkpoint_does_not_displace_the_one_that_the_run_resumed_from(tmp_path: Path) -> None:
    model = make_hf_dir(tmp_path / "model")
    assert run_ranks(_resumed_at_20, 1, model, tmp_path) == [[[60, 40, 20], [80, 60], [40, 20], [60, 40]]]


def _resumed_at_20(path: Path, directory: Path) -> list[list[int]]:
    """Steps on disk with keep_last 2 after each save of a run that resumed at 20, because a bit of 40 is wrong."""
    found = []
    with layout() as parallel:
        policy = load_policy(path, parallel)
        state = training_state(policy, PolicyOptimizer(policy, OptimizerConfig()))
        for name, steps in (("past", (60, 80)), ("again", (40, 60))):
            config = config_of(path, directory / name, keep_last=2)
            for resumed, saves in ((None, (20, 40)), ({"step": 20, "best": None}, steps)):
                saver = Saver(config, parallel, check_hf_dir(path), resumed)
                for step in saves:
                    saver.save(step, state, {"step": step}, {})
                    saver.wait()
                    found += [[read_manifest(path).step for path in checkpoints_of(directory / name)]] * bool(resumed)
    return found


def test_what_is_due(tmp_path: Path) -> None:
    assert run_ranks(_due, 1, make_hf_dir(tmp_path / "model"), tmp_path / "run")[0] == [3, 6, 8]


def _due(path: Path, run_dir: Path) -> list[int]:
    with layout() as parallel:
        saver = Saver(config_of(path, run_dir, every_steps=3), parallel, check_hf_dir(path))
        return [step for step in range(1, 9) if saver.due(step, 8, {METRIC: float(step)})]


STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("error", [RunError("read-only"), STALE], ids=["run", "os"])
def test_an_older_checkpoint_that_cannot_be_removed_fails_no_save(tmp_path: Path, error: Exception) -> None:
    said = run_ranks(_refused, 1, make_hf_dir(tmp_path / "model"), tmp_path / "run", "prune", error)[0]
    assert said == ([None, None], [2, 1])


def test_any_error_of_the_file_system_is_told_to_every_rank(tmp_path: Path) -> None:
    said = run_ranks(_refused, 2, make_hf_dir(tmp_path / "model"), tmp_path / "run", "check_space", STALE)
    assert said == [([str(STALE)] * 2, [])] * 2


def _refused(path: Path, run_dir: Path, name: str, error: Exception) -> tuple[list[str | None], list[int]]:
    """Two saves with a function of the store that raises an error: the failures, and the steps on disk."""

    def refuse(*_: object) -> None:
        raise error

    setattr(store, name, refuse)
    with layout() as parallel:
        policy = load_policy(path, parallel)
        optimizer = PolicyOptimizer(policy, OptimizerConfig())
        saver = Saver(config_of(path, run_dir, keep_last=1), parallel, check_hf_dir(path))
        failures = []
        for step in (1, 2):
            saver.save(step, training_state(policy, optimizer), {}, {})
            saver.close()  # waits, and forgets nothing
            saved = saver.wait()
            assert saved is not None
            failures.append(saved.failure)
    return failures, [read_manifest(found).step for found in checkpoints_of(run_dir)]


def test_a_save_reads_nothing_of_the_model_directory(tmp_path: Path) -> None:
    """A config.json that is damaged while the run trains would raise on the first rank alone."""
    model = make_hf_dir(tmp_path / "model")
    before = (model / "config.json").read_text()
    run_ranks(_damaged_model, 2, model, tmp_path / "run")
    (saved,) = checkpoints_of(tmp_path / "run")
    assert json.loads((saved / "hf" / "config.json").read_text()) == json.loads(before)
    assert (saved / "hf" / "tokenizer.json").is_file()


def _damaged_model(path: Path, run_dir: Path) -> None:
    with layout(tp=2) as parallel:
        policy = load_policy(path, parallel)
        state = training_state(policy, PolicyOptimizer(policy, OptimizerConfig()))
        model = check_hf_dir(path)
        assert model.copied  # as preflight reads it
        torch.distributed.barrier()
        (path / "config.json").write_text("{")
        (path / "tokenizer.json").unlink(missing_ok=True)
        saver = Saver(config_of(path, run_dir), parallel, model)
        saver.save(1, state, {}, {})
        saved = saver.wait()
        assert saved is not None and saved.failure is None and saver.newest == 1


def test_the_thread_leaves_the_gpu_alone_and_compares_no_pairs_of_experts(tmp_path: Path) -> None:
    """On a machine with GPUs. Its current one is another rank's in a new thread, and its stream that of training."""
    model = make_moe_hf_dir(tmp_path / "model")
    assert run_ranks(_in_thread_on_gpus, 2, model, tmp_path / "run") == [None, None]


def _in_thread_on_gpus(path: Path, run_dir: Path) -> str | None:
    """The failure of a save."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("not in this thread")

    with layout(ep=2) as parallel:
        policy = load_policy(path, parallel)
        state = training_state(policy, PolicyOptimizer(policy, OptimizerConfig()))
        saver = Saver(config_of(path, run_dir), parallel, check_hf_dir(path))
        torch.cuda.is_available = lambda: True
        for name in ("_lazy_init", "current_device", "current_stream", "stream", "synchronize"):
            setattr(torch.cuda, name, refuse)
        filesystem._OverlappingCpuLoader = default_planner._check_box_overlap = refuse  # type: ignore[assignment,misc]
        validation.validate_non_overlapping_shards_metadata = refuse
        saver.save(1, state, {}, {})
        saved = saver.wait()
        assert saved is not None
        return saved.failure


def test_a_directory_that_a_rank_cannot_see_is_removed(tmp_path: Path) -> None:
    """The disk of the last rank is another one. Rank 0 leaves no empty directory behind."""
    said = run_ranks(_unseen, 2, make_hf_dir(tmp_path / "model"), tmp_path / "run")
    assert said[0] == said[1] and "rank 1 cannot see" in said[0]
    assert not list((tmp_path / "run" / CHECKPOINTS).iterdir())


def _unseen(path: Path, run_dir: Path) -> str:
    with layout(tp=2) as parallel:
        policy = load_policy(path, parallel)
        state = training_state(policy, PolicyOptimizer(policy, OptimizerConfig()))
        saver = Saver(config_of(path, run_dir), parallel, check_hf_dir(path))
        if parallel.rank == 1:
            os.path.isdir = Path.is_dir = lambda _: False  # type: ignore[assignment,method-assign]
        saver.save(1, state, {}, {})
        saved = saver.wait()
        return str(saved)


def test_the_deadline_of_a_save_begins_with_it(tmp_path: Path) -> None:
    """The last rank's write hangs. Steps go on until the deadline; then no rank waits once more."""
    said = run_ranks(_hanging, 2, make_hf_dir(tmp_path / "model"), tmp_path / "run", deadline_s=120)
    assert said == [["DeadlineError"] * 2] * 2


def _hanging(path: Path, run_dir: Path) -> list[str]:
    """The errors of `report` and of `wait`, after a deadline of 7 s."""
    with layout(tp=2) as parallel:
        policy = load_policy(path, parallel)
        optimizer = PolicyOptimizer(policy, OptimizerConfig())
        saver = Saver(config_of(path, run_dir, deadline_s=7), parallel, check_hf_dir(path))
        if parallel.rank == 1:
            saver._writer._write = lambda *_: threading.Event().wait()  # type: ignore[assignment,method-assign,return-value]
        state = training_state(policy, optimizer)
        torch.distributed.barrier()  # the deadline begins on the first rank that comes to the save
        saver.save(1, state, {}, {})
        errors = []
        with pytest.raises(RuntimeError) as caught:
            while saver.report() is None:
                time.sleep(0.05)
        errors.append(type(caught.value).__name__)
        with pytest.raises(RuntimeError) as caught:
            saver.wait()
        errors.append(type(caught.value).__name__)
        saver.close()
        return errors


def test_a_rank_that_never_comes_to_a_save_is_a_missed_deadline(tmp_path: Path) -> None:
    """gloo's own error would be a traceback. The line names the peers."""
    said = run_ranks(_absent, 2, make_hf_dir(tmp_path / "model"), tmp_path / "run")[0]
    assert said.startswith("DeadlineError") and "the other ranks" in said


def _absent(path: Path, run_dir: Path) -> str:
    with layout(tp=2) as parallel:
        policy = load_policy(path, parallel)
        state = training_state(policy, PolicyOptimizer(policy, OptimizerConfig()))
        saver = Saver(config_of(path, run_dir, deadline_s=7), parallel, check_hf_dir(path))
        if parallel.rank == 1:
            return ""
        with pytest.raises(RuntimeError) as caught:
            saver.save(1, state, {}, {})
        return repr(caught.value)
