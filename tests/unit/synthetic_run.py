"""A synthetic run directory with plausible metrics, for tests of report and alarms; no number was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

CONFIG = {
    "run_dir": "runs/sums",
    "num_steps": 150,
    "seed": 0,
    "num_prompts": 64,
    "group_size": 8,
    "model": {"path": "models/tiny-qwen3", "dtype": "float32"},
    "data": {"train": [{"path": "data/sums_train.jsonl"}], "template": "{question} <&> ", "chat_template": False},
    "rollout": {"temperature": 1.0, "max_response_tokens": 16, "importance_sampling": "token", "num_engines": None},
    "algo": {"baseline": "optimal", "schedule": "snr", "snr": {"floor": 0.1, "num_folds": 4, "warmup_steps": 10}},
    "optimizer": {"name": "adam", "lr": 1e-3, "clip_grad": 1.0},
    "parallel": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False},
}
ENVIRONMENT = {
    "started": "2030-01-02T03:04:05+00:00",
    "world_size": 2,
    "device": "CPU (x86_64, 2 cores)",
    "versions": {"python": "3.11.2", "oblr-megatron": "0.1.0", "torch": "2.13.0", "megatron-core": "0.16.1"},
}
ZERO = (
    *("reward/failures", "reward/timeouts", "environment/failures", "environment/timeouts", "gradnorm/nonfinite"),
    *("rollout/truncated_ratio_fraction", "rollout/unrecorded_fraction", "rollout_corr/rollout_rs_masked_fraction"),
    *("rollout/staleness_max", "actor/pg_clipfrac_lower", "baseline/self_dependence", "data/skipped"),
    "perf/peak_memory_rank",
)
"""Metrics that are 0 throughout a healthy run."""
RATIOS = {"none": 4.1, "group_mean": 1.0, "batch_mean": 1.7, "opo": 0.99, "optimal": 0.93}


def synthetic_records(num_steps: int = 150, *, evaluate_every: int = 25, seed: int = 0) -> list[dict]:
    """Records of step 0 (evaluation only) and of every training step."""
    draw = np.random.default_rng(seed)
    records: list[dict] = [{"step": 0, **_evaluation(0.0, draw), "timing_s/evaluate": 1.9, "timing_s/step": 1.9}]
    shrink = 0.45
    for step in range(1, num_steps + 1):
        progress = 1 / (1 + math.exp(-9 * (step / num_steps - 0.35)))
        shrink += ((0.5 - 0.32 * progress) - shrink) / 20
        record = {"step": step, **_training(step, num_steps, progress, shrink, draw)}
        if evaluate_every and step % evaluate_every == 0:
            record |= _evaluation(progress, draw) | {"timing_s/evaluate": 1.9 + 0.1 * draw.random()}
            record["timing_s/step"] += record["timing_s/evaluate"]
        records.append(record)
    return records if evaluate_every else records[1:]


def _training(step: int, num_steps: int, progress: float, shrink: float, draw: np.random.Generator) -> dict:
    noise = lambda scale: float(draw.normal(0, scale))  # noqa: E731
    signal, rest = 0.06 * (1 - 0.8 * progress), 2.4 * math.exp(-progress)
    timing = {
        "rollout": 0.72 + abs(noise(0.05)),
        "reward": 0.06 + abs(noise(0.01)),
        "gradnorm": 0.61 + abs(noise(0.03)),
        "gradient": 0.42 + abs(noise(0.02)),
        "optimizer": 0.03,
        "push": 0.05 + abs(noise(0.02)),
    }
    total = sum(timing.values()) + 0.04
    return {
        **dict.fromkeys(ZERO, 0),
        "reward/mean": min(1.0, max(0.0, 0.45 + 0.49 * progress + noise(0.03))),
        "reward/std": math.sqrt(max(0.0, 0.25 - (0.49 * progress - 0.05) ** 2)),
        "rewards/overlong/mean": -0.04 * (1 - progress),
        "rewards/overlong/std": 0.12 * (1 - progress),
        "response_length/mean": 3.2 + 0.5 * progress + noise(0.05),
        "response_length/truncated_fraction": max(0.0, 0.04 * (1 - progress) + noise(0.006)),
        "groups/mixed_fraction": min(1.0, max(0.0, 0.86 - 0.55 * progress + noise(0.05))),
        "groups/dropped": step % 7,
        "groups/unused": step % 3,
        "entropy": 0.62 - 0.47 * progress + noise(0.01),
        "kl/mean": 0.03 * progress * math.exp(noise(0.1)),
        "moe/aux_loss": 1.02 + abs(noise(0.01)),
        "moe/z_loss": 4.1 + noise(0.05),
        "moe/max_load": 1.6 + abs(noise(0.1)),
        "moe/route_mismatch_fraction": 0.02,
        "rollout/logprob_abs_diff": 1.6e-6 * math.exp(noise(0.15)) * (1 + progress),
        "rollout/weight_mean": 1.0,
        "rollout_corr/rollout_rs_seq_masked_fraction": 0.02,
        "rollout_corr/kl": 1e-5,
        "actor/pg_clipfrac": 0.01,
        "actor/ppo_kl": 1e-4,
        "rollout/dynamic_batches": 1 + step % 3,
        "rollout/waves": 5,
        "rollout/speculation_accepted": 1.6 + noise(0.1),
        "rollout/speculation_below": 15,
        "rollout/restarts": int(step == num_steps // 2),
        "environment/turns_mean": 2.4 + noise(0.1),
        "environment/observed_fraction": 0.3 + 0.1 * progress,
        "gradnorm/sq_mean": 31 * math.exp(-0.8 * progress + noise(0.1)),
        "gradnorm/sq_max": 380 * math.exp(-0.3 * progress + noise(0.3)),
        "gradnorm/top_share": 0.4 + noise(0.05),
        "temper/energy": 0.5 + noise(0.05),
        "temper/factor_max": 3.0 + noise(0.2),
        "keep/tokens": 0.5 + noise(0.02),
        "keep/energy": 1.2 + noise(0.02),
        "pool/effective_samples": 14 + noise(1.0),
        "gradnorm/length_corr": 0.31 + noise(0.07),
        "gradnorm/estimate_corr": 0.9 + noise(0.02),
        "baseline/variance_ratio_vs_rloo": 0.93 + noise(0.025),
        **{f"baseline/{name}/variance_ratio": ratio * math.exp(noise(0.03)) for name, ratio in RATIOS.items()},
        "baseline/spread": 0.21 - 0.1 * progress + noise(0.01),
        "snr/signal_sq": signal + noise(0.05),
        "snr/noise_trace": rest * math.exp(noise(0.15)),
        "snr/shrink_raw": min(0.95, shrink + noise(0.35)),
        "snr/shrink_ema": shrink,
        "snr/snr": shrink / (1 - shrink) / CONFIG["num_prompts"],
        "snr/critical_batch_size": CONFIG["num_prompts"] * (1 - shrink) / shrink,
        "snr/between": 90 + noise(3.0),
        "snr/within": 50 + noise(3.0),
        "snr/best_group_size": 3.0 + noise(0.1),
        "pool/sums/mean": 0.3 + 0.4 * progress,
        "pool/trust": 0.1 + noise(0.01),
        "pool/pull": 0.8,
        "optimizer/clip_factor": 1.0,
        "loss": noise(0.02),
        "lr": 1e-3 * min(1.0, step / 10) * (shrink / 0.45) ** 0.5,
        "grad_norm": 0.42 * math.exp(-0.6 * progress + noise(0.2)) * (5 if step == num_steps * 2 // 3 else 1),
        **{f"timing_s/{phase}": seconds for phase, seconds in timing.items()},
        "timing_s/checkpoint": 0.02 * (step % 50 == 1),
        "timing_s/step": total + 0.02 * (step % 50 == 1),
        "perf/tokens_per_s": 64 * 8 * 3.5 / total,
        "perf/samples_per_s": 64 * 8 / total,
        "perf/throughput": 64 * 8 * 9.5 / total / ENVIRONMENT["world_size"],
        "perf/mfu/actor": 0.31 + noise(0.01),
        "perf/mfu/with_norms": 0.49 + noise(0.01),
        **_ranks(timing, draw),
        "perf/peak_memory_bytes": int(6.1e8 + 4e7 * min(1, step / 20)),
        "weights/version": step,
        "data/epoch": step * 64 // 6000,
    }


def _ranks(timing: dict[str, float], draw: np.random.Generator) -> dict[str, float]:
    """Metrics of two ranks that are slower in turn."""
    found: dict[str, float] = {}
    for phase, seconds in timing.items():
        slower = 1 + 0.1 * float(draw.random())
        found[f"perf/ranks/{phase}/max_s"] = 0.9 * seconds
        found[f"perf/ranks/{phase}/min_s"] = 0.9 * seconds / slower
        found[f"perf/ranks/{phase}/slowest"] = int(draw.integers(2))
    return found | {"perf/slowest_rank": 1, "perf/slowest_rank_ratio": slower}


def _evaluation(progress: float, draw: np.random.Generator) -> dict:
    sampled = 0.44 + 0.48 * progress + float(draw.normal(0, 0.01))
    return {
        "eval/sums/accuracy": min(1.0, sampled + 0.05 * (1 - progress)),
        "eval/sums/mean_at_k": sampled,
        "eval/sums/pass_at_k": min(1.0, sampled + 0.3 * (1 - sampled)),
        "eval/sums/maj_at_k": min(1.0, sampled + 0.1 * (1 - sampled)),
        "eval/sums/response_length": 3.2 + 0.4 * progress,
        "eval/sums/truncated_fraction": 0.03 * (1 - progress),
        "eval/sums/unscored": 0,
    }


def write_run(
    run_dir: Path, records: list[dict], config: dict | None = CONFIG, environment: dict | None = ENVIRONMENT
) -> Path:
    """Write the files of a run directory that the report reads."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, table in (("config.json", config), ("environment.json", environment)):
        if table is not None:
            (run_dir / name).write_text(json.dumps(table))
    return run_dir
