"""The table of metric names: unit and meaning of every name in metrics.jsonl.

`METRICS` is the only list of names. The writer refuses a name that is not in it; docs/metrics.md is tested against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Record = dict[str, float | None]
"""One step of metrics.jsonl, value by name; None if a value was not finite."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name of metrics.jsonl. Example: Metric("entropy", "nats", "mean entropy of ...")."""

    name: str  # "<set>" stands for the name of an evaluation set, "<term>" of a reward, ...
    unit: str  # "" for pure numbers
    meaning: str  # one line


METRICS: tuple[Metric, ...] = (
    Metric("step", "", "steps of the run that are done, counted from 1; 0 is the evaluation before training"),
    Metric("reward/mean", "", "mean reward of all responses sampled for the step"),
    Metric("reward/std", "", "standard deviation of the rewards of all responses sampled for the step"),
    Metric(
        "reward/failures",
        "responses",
        "responses that could not be scored, timeouts included; they, or their term of a sum, count 0",
    ),
    Metric(
        "reward/timeouts",
        "responses",
        "responses not scored within reward.timeout_s, and late episodes; part of reward/failures",
    ),
    Metric("rewards/<term>/mean", "", "mean of one term of a weighted reward, before its weight"),
    Metric("rewards/<term>/std", "", "standard deviation of that term"),
    Metric("response_length/mean", "tokens", "mean response length, the end-of-sequence token included"),
    Metric(
        "response_length/truncated_fraction",
        "",
        "share of responses cut at rollout.max_response_tokens, or at rollout.environment.max_turns",
    ),
    Metric("groups/mixed_fraction", "", "share of all sampled prompts with unequal rewards in their group"),
    Metric("groups/dropped", "groups", "groups of equal rewards that dynamic sampling left out of the step"),
    Metric("groups/unused", "groups", "mixed groups that dynamic sampling drew but did not use"),
    Metric(
        "entropy",
        "nats",
        "entropy of the sampling distribution, mean over tokens with an advantage; over all with algo.kl_coefficient",
    ),
    Metric("kl/mean", "nats", "divergence from the reference model, mean over those tokens; with algo.kl_coefficient"),
    Metric("moe/aux_loss", "", "load-balancing loss over those tokens, mean over layers, before its weight"),
    Metric("moe/z_loss", "", "mean square of the routers' log-sum-exp over those tokens, before its weight"),
    Metric("moe/max_load", "", "largest load of an expert over the mean load of its layer, from those tokens"),
    Metric("moe/route_mismatch_fraction", "", "share of their routers' own choices that routing replay replaced"),
    Metric("rollout/logprob_abs_diff", "nats", "mean |trainer's log-prob - vLLM's| over those tokens"),
    Metric("rollout/truncated_ratio_fraction", "", "share of those tokens' ratios cut at rollout.importance_cap"),
    Metric("rollout/unrecorded_fraction", "", "share of those tokens that algo.center leaves out; see center_tokens"),
    Metric("rollout/weight_mean", "", "mean over those tokens of their weights, after caps, rejection and centering"),
    Metric("rollout_corr/rollout_rs_masked_fraction", "", "share of those tokens that rollout.rejection left out"),
    Metric("rollout_corr/rollout_rs_seq_masked_fraction", "", "share of their responses that lost a token to it"),
    Metric("rollout_corr/kl", "nats", "mean of vLLM's log-prob - trainer's over those tokens; with rollout.rejection"),
    Metric("actor/pg_clipfrac", "", "share of those tokens' ratios beyond their bound; with algo.updates_per_batch"),
    Metric("actor/pg_clipfrac_lower", "", "share of those tokens' ratios above algo.clip_dual, at negative advantages"),
    Metric("actor/ppo_kl", "nats", "mean of log pi_old - log pi over those tokens, pi_old before the step's updates"),
    Metric("rollout/dynamic_batches", "", "batches that dynamic sampling drew for the step; at least 1"),
    Metric("rollout/staleness_max", "updates", "weight updates since the step's oldest sample was generated"),
    Metric("rollout/waves", "count", 'parts that the prompts came in, with rollout.overlap = "stream"'),
    Metric("rollout/speculation_accepted", "tokens", "tokens of a draft that were accepted, mean over drafts"),
    Metric("rollout/speculation_below", "sequences", "most sequences sampled with drafts, mean over engines"),
    Metric("rollout/restarts", "", "engines restarted, or servers reconnected, since the previous step"),
    Metric("environment/turns_mean", "turns", "turns of the policy in an episode, mean over the step's samples"),
    Metric("environment/observed_fraction", "", "share of the response tokens that the environment wrote"),
    Metric(
        "environment/failures",
        "episodes",
        "episodes that raised or returned nonsense; they have their tokens so far, and the reward 0",
    ),
    Metric("environment/timeouts", "episodes", "episodes that were late, or blocked the others and have no tokens"),
    Metric("gradnorm/sq_mean", "", "mean squared norm w of a response's own gradient, where measured"),
    Metric("gradnorm/sq_max", "", "largest squared norm of a response's own gradient"),
    Metric(
        "gradnorm/top_share",
        "",
        "share of sum c^2 w that 1% of the responses with a part in it hold (at least one), those with most",
    ),
    Metric("gradnorm/length_corr", "", "correlation of w with response length over the step's responses"),
    Metric("gradnorm/estimate_corr", "", "correlation of estimated with exact w (gradnorm.check_every)"),
    Metric(
        "gradnorm/nonfinite",
        "responses",
        "responses with a norm or loss that is not finite; they are left out of the gradient",
    ),
    Metric("temper/energy", "", "sum c^2 w over its value without tempering; with algo.norm_power"),
    Metric("temper/factor_max", "", "largest factor of a response's coefficient under tempering"),
    Metric("keep/tokens", "", "share of the response tokens that went through the gradient pass; with algo.keep"),
    Metric("keep/energy", "", "factor of thinning on the noise: sum c^2 w over its estimate without thinning"),
    Metric("baseline/variance_ratio_vs_rloo", "", "E|A score|^2 under the run's baseline over that under rloo"),
    Metric("baseline/<name>/variance_ratio", "", "the same for another baseline, corrected for self-dependence"),
    Metric("baseline/spread", "", "standard deviation over prompts of the run's baseline, averaged over each group"),
    Metric("baseline/self_dependence", "", "change of a response's baseline per unit of its own reward"),
    Metric(
        "pool/<source>/mean", "", "mean reward of a data source over the steps so far, weighted as the baseline asks"
    ),
    Metric(
        "pool/trust", "", "trust in a prompt's own earlier rewards: 0, the pool alone; 1, their full weight by norms"
    ),
    Metric("pool/effective_samples", "responses", "(sum w)^2 / sum w^2: responses that the pools' new sums rest on"),
    Metric("pool/pull", "", "weight of the pool in the baseline optimal_pooled"),
    Metric("snr/signal_sq", "", "this step's estimate of the squared norm of the true gradient (may be negative)"),
    Metric("snr/noise_trace", "", "this step's estimate of the trace of one prompt's gradient covariance"),
    Metric("snr/shrink_raw", "", "this step's signal over squared gradient norm, neither averaged nor clamped"),
    Metric("snr/shrink_ema", "", "averaged, clamped shrink factor; scales the rate under the snr schedule"),
    Metric(
        "snr/snr",
        "",
        "averaged signal over averaged noise of one prompt's gradient; absent without a signal, and with plugin",
    ),
    Metric("snr/between", "", "averaged part of the noise that differences between prompts cause"),
    Metric("snr/within", "", "averaged part of the noise that responses to the same prompt cause"),
    Metric("snr/best_group_size", "responses", "group_size of the least noise at equal samples"),
    Metric(
        "snr/critical_batch_size",
        "prompts",
        "averaged noise over averaged signal; absent without a signal, and with plugin",
    ),
    Metric("loss", "", "policy-gradient loss; only its gradient is meaningful"),
    Metric("lr", "", "learning rate of the step"),
    Metric(
        "optimizer/clip_factor",
        "",
        "factor of optimizer.clip_grad on the gradient, median over the updates; 1: not clipped",
    ),
    Metric("grad_norm", "", "norm of the gradient over all parameters, before clipping"),
    Metric("timing_s/rollout", "s", "sampling the responses"),
    Metric("timing_s/reward", "s", "scoring the responses"),
    Metric("timing_s/gradnorm", "s", "norms of the responses' own gradients"),
    Metric("timing_s/gradient", "s", "policy-gradient forward and backward passes"),
    Metric("timing_s/optimizer", "s", "gradient clipping and the optimizer update"),
    Metric("timing_s/push", "s", "sending the new weights to vLLM"),
    Metric("timing_s/evaluate", "s", "evaluation, in steps that have one"),
    Metric("timing_s/checkpoint", "s", "waiting for the previous step's checkpoint: its copy, or a save in progress"),
    Metric("timing_s/step", "s", "wall-clock time of the whole step, evaluation included"),
    Metric("perf/tokens_per_s", "tokens/s", "response tokens of the step per second, without evaluation"),
    Metric("perf/samples_per_s", "samples/s", "responses of the step per second, without evaluation"),
    Metric("perf/throughput", "tokens/s", "prompt and response tokens per second and rank, without evaluation"),
    Metric("perf/mfu/actor", "", "training FLOPs over the devices' peak during the training phases"),
    Metric("perf/mfu/with_norms", "", "the same with a separate norms pass counted as useful FLOPs"),
    Metric("perf/ranks/<phase>/max_s", "s", "longest own time (without waiting) of any rank in a phase"),
    Metric("perf/ranks/<phase>/min_s", "s", "shortest own time of any rank in a phase"),
    Metric("perf/ranks/<phase>/slowest", "", "rank with the longest own time, counted from 0"),
    Metric("perf/slowest_rank", "", "rank with the longest pace: own training time, on a GPU that of a fixed product"),
    Metric("perf/slowest_rank_ratio", "", "that rank's pace over the median rank's"),
    Metric("perf/peak_memory_bytes", "bytes", "largest memory of any trainer process so far"),
    Metric("perf/peak_memory_rank", "", "rank of that process"),
    Metric("weights/version", "", "version of the weights in vLLM after the step"),
    Metric("data/epoch", "", "completed passes over the training rows"),
    Metric(
        "data/skipped",
        "rows",
        "rows left out: unreadable, incomplete, too long, repeated, contradicted, or overlapping a benchmark",
    ),
    Metric("eval/<set>/accuracy", "", "share of the set's prompts answered correctly by the greedy response"),
    Metric("eval/<set>/mean_at_k", "", "mean score of k sampled responses per prompt"),
    Metric("eval/<set>/pass_at_k", "", "share of prompts answered correctly by at least one of k sampled responses"),
    Metric("eval/<set>/maj_at_k", "", "share of prompts where the most frequent answer is correct; ties count in part"),
    Metric("eval/<set>/response_length", "tokens", "mean length of the evaluation's responses, greedy and sampled"),
    Metric("eval/<set>/truncated_fraction", "", "share of the evaluation's responses cut at the token limit"),
    Metric("eval/<set>/unscored", "responses", "responses of the evaluation without a score; they count as wrong"),
)

_NAMED = {"eval": "<set>", "rewards": "<term>", "baseline": "<name>", "perf/ranks": "<phase>", "pool": "<source>"}
_POSITION = {metric.name: position for position, metric in enumerate(METRICS)}


def describe(name: str) -> Metric:
    """The table's entry for a name in a record, e.g. "eval/gsm8k/accuracy".

    Raises:
        KeyError: the name is not in the table.
    """
    return METRICS[_POSITION[_table_name(name)]]


def in_table_order(names: Iterable[str]) -> list[str]:
    """The names sorted as in METRICS.

    Raises:
        KeyError: a name is not in the table.
    """
    return sorted(names, key=lambda name: (_POSITION[_table_name(name)], name))


def _table_name(name: str) -> str:
    """Example: "eval/gsm8k/accuracy" -> "eval/<set>/accuracy". The part in the middle may contain slashes."""
    for prefix, middle in _NAMED.items():
        if name.startswith(f"{prefix}/") and "/" in name.removeprefix(f"{prefix}/"):
            return f"{prefix}/{middle}/{name.rpartition('/')[2]}"
    return name
