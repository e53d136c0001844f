"""The record of a step, and the metrics computed from it by pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from oblr_megatron.algo import panel
from oblr_megatron.algo.advantage import energies
from oblr_megatron.algo.baseline import baseline_values, mixed_groups, sanitize_norms, variance_ratio_vs_rloo
from oblr_megatron.algo.formulas import NO_HISTORY, History
from oblr_megatron.algo.weighting import tempering
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import facts_of
from oblr_megatron.observe.performance.utilization import working_s
from oblr_megatron.rewards.base import RewardResult
from oblr_megatron.types import GradientStats, Prompt, Sample, Scored

MAX_SHOWN = 200  # characters of a text on the console


@dataclass(slots=True)
class StepRecord:
    """Results of one step. The arrows of the step loop fill it in; `Sampling.log` completes and writes it.

    Example: StepRecord(done=12, metrics={"lr": 1e-6, ...}, rewards=[RewardResult(...)], samples=[...])
    """

    done: int  # steps of the run that are done when this one ends; 0: the evaluation before the first step
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[RewardResult] = field(default_factory=list)  # one for each batch that was scored
    visits: list[tuple[Sequence[Prompt], Tensor]] = field(default_factory=list)
    """All prompts sampled, in parts, and the unweighted values [n, G] of their main reward."""
    unrewarded: bool = False  # whether the reward failed for every response, so that the step teaches nothing
    prompts: Sequence[Prompt] = ()  # Q, those that the step trains on
    samples: Sequence[Sample] = ()  # N, their responses
    scored: Scored | None = None  # their rewards
    evaluated: bool = False  # whether an evaluation was due, and is complete
    unscored: bool = False  # whether it has no score at all for some set: a resumed run does it again
    clip_factors: list[float] = field(default_factory=list)  # of the updates so far
    stats: GradientStats | None = None  # None until the gradient is computed, and where nothing is trained


def sample_lines(record: StepRecord, count: int) -> list[str]:
    """One line for each of `count` samples of a step, evenly spaced from the highest reward to the lowest.

    Example: "sample  reward 1.00  prompt '12+7='  answer '19'  response 'so it is 19'"
    """
    if not count or record.scored is None:
        return []
    rewards = record.scored.rewards.flatten()
    order = rewards.argsort(descending=True, stable=True).tolist()
    places = dict.fromkeys(round(place * (len(order) - 1) / max(count - 1, 1)) for place in range(count))
    lines = []
    for position in (order[place] for place in places):
        sample = record.samples[position]
        prompt = record.prompts[sample.group]
        end = " (cut at the limit)" if sample.finish_reason == "length" else ""
        lines.append(
            f"sample  reward {float(rewards[position]):.2f}  prompt {quoted(prompt.text)}  "
            f"answer {quoted(prompt.answer)}  response {quoted(sample.text)}{end}"
        )
    return lines


def quoted(text: str) -> str:
    """A text in quotes on one line, without its middle if it is long; control characters are escaped."""
    half = MAX_SHOWN // 2
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:half]} ... {text[-half:]}")


def of_norms(norms_sq: Tensor, exact_sq: Tensor) -> dict[str, float]:
    """Agreement of a step's estimates [Q, G] with exact norms, where these are known."""
    compared = exact_sq > 0
    return {"gradnorm/estimate_corr": correlation(exact_sq[compared], norms_sq[compared])} if compared.any() else {}


def of_energies(
    algo: AlgoConfig, coefficients: Tensor, norms_sq: Tensor, history: History, kept: Tensor
) -> dict[str, float]:
    """How few responses hold a step's gradient, and how tempering and thinning change it; {} without a gradient.

    Args:
        algo: norm_power and keep are read.
        coefficients: c [Q, G] of the step.
        norms_sq: w [Q, G].
        history: the step's; its mean norm is read.
        kept: [Q, G] weights in c that `algo.keep` gives the responses; ones without it.
    """
    energy = energies(coefficients, norms_sq)
    total, own = float(energy.sum()), energy > 0
    if not total > 0:
        return {}
    largest = energy.flatten().topk(-(-int(own.sum()) // 100)).values
    metrics = {"gradnorm/top_share": float(largest.sum()) / total}
    if algo.norm_power:
        factors = tempering(norms_sq[own], history.running_mean_norm, algo.norm_power)
        before = energy[own] / factors.square()
        metrics |= {"temper/energy": total / float(before.sum()), "temper/factor_max": float(factors.max())}
    if algo.keep < 1:
        metrics["keep/energy"] = total / float((energy[own] / kept[own]).sum())
    return metrics


def of_baseline(
    algo: AlgoConfig,
    scored: Scored,
    norms_sq: Tensor,
    history: History = NO_HISTORY,
    *,
    exact: bool = True,
    weights: Tensor | None = None,
) -> dict[str, float]:
    """Metrics of the run's baseline, and the variance that every other baseline would have had on this batch.

    Args:
        algo: the baseline and its options.
        scored: rewards and lengths of the step.
        norms_sq: [Q, G] w; zeros for groups that were not measured. Without any norm the variances are left out.
        history: what earlier steps tell about the prompts.
        exact: whether w are exact norms or unbiased estimates. Other sources, such as lengths, cannot compare
            baselines.
        weights: [Q, G] w that the run's own baseline reads, where it is not `norms_sq`.
    """
    rewards, lengths = scored.rewards, scored.lengths.to(torch.float64)
    norms_sq = sanitize_norms(norms_sq)
    weights = norms_sq if weights is None else weights
    measured = norms_sq.sum(-1) > 0  # groups with skipped passes have zeros
    values = baseline_values(algo.baseline, rewards, weights, lengths, history)
    metrics = {
        "baseline/spread": panel.spread(values),
        "baseline/self_dependence": panel.self_dependence(algo.baseline, values, rewards, weights, lengths, history),
    }
    if not measured.any():
        return metrics
    if exact:
        if facts_of(algo.baseline).divisor == "one":
            ratio = variance_ratio_vs_rloo(rewards[measured], norms_sq[measured], values[measured])
            share = panel.own_share(algo.baseline, rewards)
            metrics["baseline/variance_ratio_vs_rloo"] = ratio / (1 - share) ** 2 if share < 1 else math.nan
        ratios = panel.variance_ratios(rewards, norms_sq, lengths, algo.baseline, history)
        metrics |= {f"baseline/{name}/variance_ratio": ratio for name, ratio in ratios.items()}
    if algo.keep < 1:
        measured = norms_sq > 0  # single responses were left out
    flat = norms_sq[measured].flatten()
    return metrics | {
        "gradnorm/sq_mean": float(flat.mean()),
        "gradnorm/sq_max": float(flat.max()),
        "gradnorm/length_corr": correlation(flat, lengths[measured].flatten()),
    }


def of_rewards(rewards: Tensor) -> dict[str, float]:
    """Mean and standard deviation of rewards [S, G], and the share of groups with unequal rewards."""
    mixed = mixed_groups(rewards)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "groups/mixed_fraction": float(mixed.double().mean()),
    }


def of_scoring(results: Sequence[RewardResult]) -> dict[str, float]:
    """Timeouts of a step's rewards; where reward terms are added, mean and standard deviation of each term."""
    metrics: dict[str, float] = {"reward/timeouts": sum(result.timeouts for result in results)}
    for name in results[0].terms if results else ():
        values = [value for result in results for value in result.terms[name]]
        metrics |= {f"rewards/{name}/mean": statistics.fmean(values), f"rewards/{name}/std": statistics.pstdev(values)}
    return metrics


def of_step(
    samples: Sequence[Sample], scored: Scored, stats: GradientStats | None, timing: Mapping[str, float]
) -> dict[str, float]:
    """Rewards, lengths, gradient (if there is one) and speed of a step."""
    tokens = int(scored.lengths.sum())
    working = working_s(timing)
    metrics = of_rewards(scored.rewards) | {
        "reward/failures": scored.failures,
        "response_length/mean": float(scored.lengths.double().mean()),
        "response_length/truncated_fraction": statistics.fmean(s.finish_reason == "length" for s in samples),
        **timing,
        "perf/tokens_per_s": tokens / working,
        "perf/samples_per_s": len(samples) / working,
    }
    return metrics if stats is None else metrics | _of_gradient(stats)


def of_episodes(samples: Sequence[Sample]) -> dict[str, float]:
    """Failures of a step's episodes, their turns, and the share of tokens that the environment wrote."""
    tokens = sum(len(sample.response_ids) for sample in samples)
    return {
        "environment/failures": sum(sample.finish_reason == "failed" for sample in samples),
        "environment/timeouts": sum(sample.finish_reason == "late" for sample in samples),
        "environment/turns_mean": statistics.fmean(sample.turns for sample in samples),
        "environment/observed_fraction": 1 - sum(sample.length for sample in samples) / max(tokens, 1),
    }


def _of_gradient(stats: GradientStats) -> dict[str, float]:
    metrics = {"loss": stats.loss, "grad_norm": stats.sq_norm**0.5}
    if stats.num_tokens:  # 0: no sample had a gradient, so its pass measured nothing
        metrics |= {
            "entropy": stats.entropy,
            "rollout/logprob_abs_diff": stats.logprob_abs_diff,
            "rollout/truncated_ratio_fraction": stats.truncated_ratio_fraction,
            "rollout/weight_mean": stats.weight_mean,
        }
        if stats.unrecorded_fraction is not None:
            metrics["rollout/unrecorded_fraction"] = stats.unrecorded_fraction
        if stats.kl is not None:
            metrics["kl/mean"] = stats.kl
        if stats.rejection is not None:
            metrics |= {f"rollout_corr/{name}": value for name, value in asdict(stats.rejection).items()}
        if stats.clipping is not None:
            metrics |= {f"actor/{name}": value for name, value in asdict(stats.clipping).items()}
    if stats.routers is not None:
        metrics |= {f"moe/{name}": value for name, value in asdict(stats.routers).items() if value is not None}
    return metrics


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson correlation of two [n] tensors; NaN where one of them is constant."""
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])
