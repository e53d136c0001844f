"""The figures of a step, computed from its records: pure, no state."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from oblr_megatron.algo import panel
from oblr_megatron.algo.baseline import baseline_values, mixed_groups, sanitize_norms, variance_ratio_vs_rloo
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.observe.performance.utilization import working_s
from oblr_megatron.rewards.base import RewardResult
from oblr_megatron.types import GradientStats, Sample, Scored


def of_baseline(algo: AlgoConfig, scored: Scored, norms_sq: Tensor, *, exact: bool = True) -> dict[str, float]:
    """What the run's baseline is like, and what each baseline would have done to the variance.

    The latter as far as the norms at hand tell; nothing without norms.

    Args:
        algo: the baseline and its options.
        judged: rewards and lengths of the step.
        norms_sq: [Q, G] w; zeros of groups that were not measured.
        exact: whether w are the responses' own norms, or unbiased estimates, and not stand-ins like their lengths: only
            these tell how another baseline would have fared.
    """
    rewards, lengths = scored.rewards, scored.lengths.to(torch.float64)
    norms_sq, _ = sanitize_norms(norms_sq)
    measured = norms_sq.sum(-1) > 0  # groups whose passes were skipped have none
    values = None if algo.token_wise else baseline_values(algo.baseline, rewards, norms_sq, lengths, algo)
    found = {}
    if values is not None:
        found["baseline/spread"] = panel.spread(values)
        found["baseline/self_dependence"] = panel.self_dependence(
            algo.baseline, values, rewards, norms_sq, lengths, algo
        )
    if not measured.any():
        return found
    if values is not None:
        found["baseline/variance_ratio_vs_rloo"] = variance_ratio_vs_rloo(
            rewards[measured], norms_sq[measured], values[measured]
        )
    if exact:
        ratios = panel.variance_ratios(rewards, norms_sq, lengths, algo)
        found |= {f"baseline/{name}/variance_ratio": ratio for name, ratio in ratios.items()}
    flat = norms_sq[measured].flatten()
    return found | {
        "gradnorm/sq_mean": float(flat.mean()),
        "gradnorm/sq_max": float(flat.max()),
        "gradnorm/length_corr": correlation(flat, lengths[measured].flatten()),
    }


def of_rewards(rewards: Tensor) -> dict[str, float]:
    """Level and spread of rewards [S, G]."""
    mixed = mixed_groups(rewards)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "groups/mixed_fraction": float(mixed.double().mean()),
    }


def of_scoring(results: Sequence[RewardResult]) -> dict[str, float]:
    """What was late in the batches of a step, and level and spread of each reward where several are added."""
    found: dict[str, float] = {"reward/timeouts": sum(result.timeouts for result in results)}
    for name in results[0].terms if results else ():
        values = [value for result in results for value in result.terms[name]]
        found |= {f"rewards/{name}/mean": statistics.fmean(values), f"rewards/{name}/std": statistics.pstdev(values)}
    return found


def of_step(
    samples: Sequence[Sample], scored: Scored, stats: GradientStats | None, timing: Mapping[str, float]
) -> dict[str, float]:
    """Rewards, lengths, gradient (if one was taken) and speed of one step."""
    tokens = int(scored.lengths.sum())
    working = working_s(timing)
    found = of_rewards(scored.rewards) | {
        "reward/failures": scored.failures,
        "response_length/mean": float(scored.lengths.double().mean()),
        "response_length/truncated_fraction": statistics.fmean(s.finish_reason == "length" for s in samples),
        **timing,
        "perf/tokens_per_s": tokens / working,
        "perf/samples_per_s": len(samples) / working,
    }
    return found if stats is None else found | _of_gradient(stats)


def _of_gradient(stats: GradientStats) -> dict[str, float]:
    found = {"loss": stats.loss, "grad_norm": stats.sq_norm**0.5}
    if stats.num_tokens:  # else no sample went through the gradient pass, and nothing of it was measured
        found |= {
            "entropy": stats.entropy,
            "rollout/logprob_abs_diff": stats.logprob_abs_diff,
            "rollout/truncated_ratio_fraction": stats.truncated_ratio_fraction,
        }
        if stats.kl is not None:
            found["kl/mean"] = stats.kl
    if stats.routers is not None:
        found |= {f"moe/{name}": value for name, value in asdict(stats.routers).items()}
    return found


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's coefficient of two [n] tensors; NaN where one of them is constant."""
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])
