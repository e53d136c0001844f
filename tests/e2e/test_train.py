"""Whole runs on real megatron-core and real vLLM.

Every layout takes the same first step, the same seed gives the same curve, the export holds the trained weights, and a
killed rank ends the job. Not covered: a rise in accuracy (the demo fails without one), engine faults
(test_rollout_failures.py), CUDA.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.peft_dir import check_adapter_dir, merge_adapter
from oblr_megatron.checkpoint.store import checkpoints_of
from tests.e2e.conftest import ROOT, environment, records, run, torchrun, wait_for_lines
from tests.e2e.forked import forked

SAME_STEP = ("loss", "gradnorm/sq_mean", "gradnorm/sq_max", "grad_norm", "reward/mean", "entropy", "snr/noise_trace")
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"parallel__tensor_model_parallel_size": 2}),
    "tp2_sp_pp2": (
        4,
        {
            "parallel__tensor_model_parallel_size": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__sequence_parallel": "true",
        },
    ),
    "tp2_pp2": (4, {"parallel__tensor_model_parallel_size": 2, "parallel__pipeline_model_parallel_size": 2}),
}
FOUR = "tp2_sp_pp2"


@pytest.mark.parametrize(
    ("names", "launcher"),
    [(["dp2", FOUR], "fork"), pytest.param(["tp2", "tp2_pp2", FOUR], "torchrun", marks=pytest.mark.nightly)],
)
def test_first_step_is_the_same_in_every_layout(
    tmp_path: Path, overrides: Callable[..., list[str]], saved: Path, names: list[str], launcher: str
) -> None:
    """Loss, per-sample norms and gradient norm are within 1e-5 relative of one rank's, in fp32.

    One rank, two replicas and the four ranks of TP2 x PP2 sample with vLLM. The other layouts replay the samples of one
    rank.
    """
    reference = records(saved)[0]
    assert reference["gradnorm/sq_mean"] > 0 and reference["grad_norm"] > 0
    for name in names:
        ranks, layout = LAYOUTS[name]
        keys = overrides(tmp_path / name, **layout)
        keys += [] if name in ("dp2", FOUR) else ["--replay", str(saved / "rollouts")]
        result = run(torchrun(ranks, keys)) if launcher == "torchrun" else forked(ranks, keys)
        assert result.returncode == 0, f"{name}: {result.stderr[-3000:]}"
        step = records(tmp_path / name)[-1]
        for key in SAME_STEP:
            assert step[key] == pytest.approx(reference[key], rel=1e-5), f"{name}: {key}"


@pytest.mark.nightly
def test_same_seed_same_curve_and_export(tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """Two runs of one seed agree bit for bit, another seed differs; the trainer and vLLM agree on log-probs."""
    curves = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        result = forked(2, overrides(tmp_path / name, num_steps=3, seed=seed))
        assert result.returncode == 0, result.stderr[-3000:]
        curves[name] = [
            {key: value for key, value in step.items() if not key.startswith(("timing_s", "perf"))}
            for step in records(tmp_path / name)
        ]
    assert curves["a"] == curves["b"]
    assert curves["a"] != curves["c"]
    assert [step["weights/version"] for step in curves["a"]] == [1, 2, 3]
    assert all(step["rollout/logprob_abs_diff"] <= 1e-3 for step in curves["a"])
    assert all(math.isfinite(value) for step in curves["a"] for value in step.values())
    _check_export(tmp_path / "a" / "hf", tmp_path / "b" / "hf")


def _check_export(first: Path, second: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    one, two = (Qwen3ForCausalLM.from_pretrained(path).state_dict() for path in (first, second))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert AutoTokenizer.from_pretrained(first).eos_token is not None


@pytest.mark.nightly
def test_a_lora_run_agrees_with_its_engine_on_pushed_adapters_and_merged_weights(
    tmp_path: Path, overrides: Callable[..., list[str]], tiny: Path
) -> None:
    """On two ranks, push after push; the run ends with an adapter that merges to its export."""
    for pushed in ("adapter", "merged"):
        keys = {"model__lora__rank": 4, "rollout__lora": pushed, "parallel__tensor_model_parallel_size": 2}
        result = forked(2, overrides(tmp_path / pushed, num_steps=3, optimizer__lr=0.01, **keys))
        assert result.returncode == 0, result.stderr[-3000:]
        check_lora_run(tmp_path / pushed, tiny / "model")


def check_lora_run(run_dir: Path, model: Path) -> None:
    """Three steps in fp32: engine and trainer agree after each push, and the adapter merges to the export."""
    steps = records(run_dir)
    assert [step["weights/version"] for step in steps] == [1, 2, 3]
    assert all(0 < step["rollout/logprob_abs_diff"] < 1e-4 for step in steps)
    merge_adapter(check_adapter_dir(run_dir / "adapter", check_hf_dir(model)), run_dir / "merged")
    merged, exported, held = (
        load_file(path / "model.safetensors") for path in (run_dir / "merged", run_dir / "hf", model)
    )
    assert merged.keys() == exported.keys()
    assert all((merged[name] - exported[name]).abs().max() < 1e-6 for name in merged)
    moved = {name for name in merged if (merged[name] - held[name]).abs().max() > 1e-4}
    assert {name.split(".")[3] for name in moved} == {"self_attn", "mlp"}, "both learn, and nothing else"


def test_a_reward_that_raises_scores_zero(tmp_path: Path, overrides: Callable[..., list[str]], saved: Path) -> None:
    """Every sample is counted as a failure, and the traceback is shown once. The third such step ends the run."""
    keys = overrides(tmp_path / "run", num_steps=3, reward__name="tests.e2e.rewards:always_raises")
    result = forked(1, [*keys, "--replay", str(saved / "rollouts")])
    assert result.returncode == 1, result.stderr[-3000:]
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert " 3 steps" in error and "ZeroDivisionError: the reward has a bug" in error
    assert len(records(tmp_path / "run")) == 2 and not (tmp_path / "run" / "checkpoints").exists()
    (alarm,) = (line for line in result.stdout.splitlines() if line.startswith("alarm at step 1: "))
    assert "ZeroDivisionError: the reward has a bug" in alarm
    for step in records(tmp_path / "run"):
        assert step["reward/failures"] == 8 * 4
        assert step["reward/mean"] == 0 and step["grad_norm"] == 0
    assert result.stderr.count("ZeroDivisionError: the reward has a bug") == 2, "in the traceback and in the error"


def test_a_reward_that_stops_working_saves_the_run(
    tmp_path: Path, overrides: Callable[..., list[str]], saved: Path
) -> None:
    """It takes the columns of saved rows. The console shows samples of the steps that are done.

    A step without any reward changes no weights and no pool, although "pooled" has an advantage for it.
    """
    keys = {"reward__name": "tests.e2e.rewards:works_for_one_step", "reward__max_failed_steps": 2, "log__samples": 2}
    keys |= {"algo__baseline": "pooled"}
    arguments = [*overrides(tmp_path / "run", num_steps=3, **keys), "--replay", str(saved / "rollouts")]
    result = forked(1, arguments, CALLS=str(tmp_path / "calls"))
    assert result.returncode == 1 and "the reward has stopped working" in result.stderr, result.stderr[-3000:]
    first, second = records(tmp_path / "run")
    assert (first["reward/failures"], second["reward/failures"]) == (0, 32)
    assert second["grad_norm"] > 0 and ["optimizer/clip_factor" in step for step in (first, second)] == [True, False]
    (mean,) = (name for name in first if name.startswith("pool/") and name.endswith("/mean"))
    assert first[mean] == second[mean] > 0 and "which changes no weights" in result.stdout
    assert sum(line.startswith("sample  reward") for line in result.stdout.splitlines()) == 2 * 2
    assert checkpoints_of(tmp_path / "run")[0].name.endswith("2"), "of the last step that was done"


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1], ids=["the one with the engine", "the other"])
def test_killed_rank_ends_the_job(tmp_path: Path, overrides: Callable[..., list[str]], victim: int) -> None:
    """SIGKILL of one rank ends the job within 60 s; the cause is named, and no process is left."""
    job = subprocess.Popen(
        torchrun(2, overrides(tmp_path / "run", num_steps=100_000)),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_lines(2, tmp_path / "run" / "metrics.jsonl", job)
        family = psutil.Process(job.pid).children(recursive=True)
        ranks = {
            int(child.environ()["RANK"]): child
            for child in family
            if child.ppid() == job.pid and "oblr_megatron.step_loop" in child.cmdline()
        }
        assert ranks.keys() == {0, 1}
        ranks[victim].send_signal(signal.SIGKILL)
        _, stderr = job.communicate(timeout=60)
        assert job.returncode != 0
        assert "SIGKILL" in stderr and f"rank      : {victim}" in stderr, stderr[-2000:]
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"left over: {[child.cmdline() for child in alive]}"
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
