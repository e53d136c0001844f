"""A run with real vLLM, stopped by a signal and resumed, has the unbroken run's curve.

Not covered: SIGKILL at random moments (tools/kill_resume.py, tests/e2e/test_kill_resume.py), several ranks and layouts
(tests/distributed/test_resume.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from oblr_megatron.checkpoint.store import checkpoints_of, read_manifest
from tests.distributed.replayed import certain
from tests.e2e.forked import CONFIG, forked_and_signalled, forked_cli

STEPS = 9


def test_stopped_and_resumed_is_unbroken(tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """Metrics, evaluations, the last and the best weights are equal bit for bit."""
    options = {
        "num_steps": STEPS,
        "evaluate__every_steps": 3,
        "evaluate__num_prompts": 16,
        "checkpoint__every_steps": 4,
        "checkpoint__best_metric": "eval/heldout/mean_at_k",
        "gradnorm__mode": "bookkeep",
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    unbroken = forked_cli(["train", CONFIG, *overrides(whole, **options)])
    assert unbroken.returncode == 0, unbroken.stderr[-2000:]

    keys = overrides(parts, **options)
    done = forked_and_signalled(3, parts / "metrics.jsonl", signal.SIGUSR1, ["train", CONFIG, *keys])  # with step 0
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"of {STEPS} (SIGUSR1); continue with --resume" in done.stdout and not (parts / "hf").exists()
    stopped = read_manifest(checkpoints_of(parts)[0]).step
    assert 2 <= stopped < STEPS and [record["step"] for record in certain(parts)] == list(range(stopped + 1))

    resumed = forked_cli(["train", CONFIG, *keys, "--resume"])
    summaries = [
        said.stdout.partition("\nfinished ")[2].splitlines()[0].partition("  ")[2] for said in (resumed, unbroken)
    ]
    assert summaries[0] == summaries[1], "accuracy before and after is that of the whole run"
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert "UserWarning" not in resumed.stderr, resumed.stderr[-2000:]  # of libraries, which a user cannot act on
    assert certain(parts) == certain(whole) and len(certain(whole)) == STEPS + 1
    evaluated = [record["step"] for record in certain(whole) if "eval/heldout/accuracy" in record]
    for name in (f"evaluations/step_{step:06}/heldout.jsonl" for step in evaluated):
        assert (parts / name).read_bytes() == (whole / name).read_bytes() != b"", name
    for name in ("hf", "hf_best"):
        found, expected = (load_file(run_dir / name / "model.safetensors") for run_dir in (parts, whole))
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    best = max(
        (r for r in certain(whole)[1:] if "eval/heldout/mean_at_k" in r), key=lambda r: r["eval/heldout/mean_at_k"]
    )
    assert read_manifest(checkpoints_of(parts)[0]).state["best"] == [best["step"], best["eval/heldout/mean_at_k"]]
    kept = [read_manifest(path).step for path in checkpoints_of(parts)]
    assert kept == sorted({*kept[:2], best["step"]}, reverse=True) and kept[0] == STEPS
