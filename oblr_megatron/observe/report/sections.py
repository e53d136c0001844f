"""The charts of a report with their captions, and how they are drawn from a run's values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oblr_megatron.observe.report.axes import Axis
from oblr_megatron.observe.report.chart import draw_panel, draw_stack, line_of
from oblr_megatron.observe.report.costs import MARKED, RANKS, THROUGHPUT, TIME, UTILIZATION, memory_of_ranks
from oblr_megatron.observe.report.history import Array, RunHistory
from oblr_megatron.observe.report.panel import VARIANCE, batch_size, every_baseline, group_size, pools
from oblr_megatron.observe.report.specs import Chart, ChartRule, Curve, Panel, chart, panel, strip
from oblr_megatron.timing import PHASES


def sections(history: RunHistory) -> dict[str, list[Chart]]:
    """The charts of the report in order, by the heading of their section."""
    evaluations = [_evaluation_chart(name) for name in history.evaluation_sets()] or [EVALUATION_MISSING]
    return {
        "Learning": [REWARD, *evaluations, RESPONSE_LENGTH, EPISODES, ENTROPY, EXPERTS],
        "Signal, noise and learning rate": [SHRINK, LEARNING_RATE, SIGNAL, batch_size(history), group_size(history)],
        "Baselines": [VARIANCE, every_baseline(history), *pools(history)],
        "Gradients, and agreement with vLLM": [
            *(GRADIENT, CLIPPING, SAMPLE_NORMS, ENERGY, MISMATCH, WEIGHTS, REJECTION, SOURCES, SPECULATION),
        ],
        "Cost": [TIME, RANKS, UTILIZATION, THROUGHPUT],
    }


REWARD = chart(
    "Reward",
    "Mean reward of each step's responses: dots are single steps, the line is their running average. The strip shows "
    "the share of prompts with unequal rewards in their group; only these give a gradient.",
    "A flat or falling line, or mixed groups near 0: the task is already solved, or too hard.",
    panel("", Curve("reward/mean", "mean reward"), include=(0.0, 1.0)),
    strip("", Curve("groups/mixed_fraction", "mixed groups", colour=3), include=(0.0, 1.0)),
)

EVALUATION_MISSING = chart("Held-out accuracy", "", "")


def _evaluation_chart(name: str) -> Chart:
    curves = (
        Curve(f"eval/{name}/accuracy", "greedy", "marks", 1),
        Curve(f"eval/{name}/mean_at_k", "sampled, mean@k", "marks", 2),
        Curve(f"eval/{name}/pass_at_k", "sampled, pass@k", "marks", 3),
        Curve(f"eval/{name}/maj_at_k", "sampled, maj@k", "marks", 4),
    )
    return chart(
        f"Held-out accuracy: {name}",
        "Share of held-out prompts answered correctly: by the greedy response, by the average of k sampled responses "
        "(mean@k), by at least one of them (pass@k), and by their most frequent answer (maj@k). The strips show mean "
        "response length, the share of responses cut at the token limit, and the responses that could not be scored.",
        "Accuracy that stalls while the reward rises (memorisation), or pass@k that falls while mean@k rises (loss of "
        "diversity).",
        panel("", *curves, include=(0.0, 1.0)),
        strip("tokens", Curve(f"eval/{name}/response_length", "mean length", "marks", 5), include=(0.0,)),
        strip("", Curve(f"eval/{name}/truncated_fraction", "truncated", "marks", 5), include=(0.0, 0.1)),
        strip("responses", Curve(f"eval/{name}/unscored", "unscored", "marks", 5), include=(0.0, 1.0)),
    )


RESPONSE_LENGTH = chart(
    "Response length",
    "Mean response length, and the share of responses cut at the token limit.",
    "Length that grows while the reward does not, or a truncated share that grows: truncated answers earn nothing.",
    panel("tokens", Curve("response_length/mean", "mean length"), include=(0.0,)),
    strip("", Curve("response_length/truncated_fraction", "truncated", colour=2), include=(0.0, 0.1)),
)

ENTROPY = chart(
    "Entropy",
    "Entropy of the next-token distribution, averaged over tokens with an advantage. It falls as the policy becomes "
    "certain. With a KL penalty, the strip shows the divergence from the reference model.",
    "A drop to near 0 while the reward is still low (collapse), or a steady rise (the policy degenerates).",
    panel("nats", Curve("entropy", "entropy"), include=(0.0,)),
    strip("nats", Curve("kl/mean", "divergence", colour=3), include=(0.0,)),
)

EXPERTS = chart(
    "Experts",
    "How evenly the routers spread tokens: the largest load of any expert (1 if all loads are equal), and the "
    "balancing loss (1 if all experts are equally likely). The strips show the routers' z-loss, and the share of their "
    "choices that routing replay replaced by the engine's.",
    "A load that approaches experts / experts per token (the router uses only a few), or a z-loss that keeps growing.",
    panel("", Curve("moe/max_load", "fullest expert"), Curve("moe/aux_loss", "balancing loss"), include=(1.0,)),
    strip("", Curve("moe/z_loss", "z-loss", colour=3), include=(0.0,)),
    strip("", Curve("moe/route_mismatch_fraction", "replaced routes", colour=2), include=(0.0,)),
    optional=True,
)

SHRINK = chart(
    "Shrink factor",
    "Share of the squared gradient norm that is signal: near 0 the batch is mostly noise; near 1 more responses would "
    "not help. Dots are single-step estimates, which scatter widely and may be negative. The line is the averaged, "
    "clamped value that scales the learning rate. With the estimator plugin pure noise gives about 1/2.",
    "Under the snr schedule, a line that falls far: the learning rate falls with it; use more prompts per step.",
    panel(
        "",
        Curve("snr/shrink_raw", "single steps", "dots", 5),
        Curve("snr/shrink_ema", "averaged", "line", 1),
        include=(0.0,),
        rules=(ChartRule("floor", setting="algo.snr.floor"),),
    ),
)

LEARNING_RATE = chart(
    "Learning rate",
    "Learning rate of each step, with the warm-up factor and, under the snr schedule, the shrink factor.",
    "A rate at its lower end long before the reward settles, or one that swings from step to step.",
    panel(
        "",
        Curve("lr", "learning rate", "line"),
        include=(0.0,),
        rules=(ChartRule("optimizer.lr", setting="optimizer.lr"),),
    ),
)

SIGNAL = chart(
    "Signal and noise",
    "Estimate of the true gradient's squared norm; single steps may be negative. It is unbiased with the estimators "
    "folds and prompts; plugin's contains the noise. The strip shows the noise: the estimated variance of one prompt's "
    "gradient. Where rollout/staleness_max is above 0 importance ratios are cut, and both estimates have a bias.",
    "Noise that grows by orders of magnitude, or signal that vanishes while the reward still changes.",
    panel("", Curve("snr/signal_sq", "signal, squared norm"), rules=(ChartRule("", 0.0, forced=True),)),
    strip("", Curve("snr/noise_trace", "noise, trace", colour=2), log=True),
)

GRADIENT = chart(
    "Gradient norm",
    "Norm of the full gradient before clipping. The strip shows the loss, of which only the gradient is meaningful, "
    "and the factor of the clipping.",
    "Spikes that keep growing, or every step above the clipping threshold: clipping then sets the step size.",
    panel(
        "",
        Curve("grad_norm", "gradient norm"),
        include=(0.0,),
        rules=(ChartRule("clip", setting="optimizer.clip_grad"),),
    ),
    strip("", Curve("loss", "loss", colour=3), Curve("optimizer/clip_factor", "clip factor", colour=2)),
)

SAMPLE_NORMS = chart(
    "Gradient norms of single responses",
    "Mean and largest squared gradient norm of the step's responses, the weights of the optimal baseline. The strip "
    "shows their correlation with response length and, if norms are estimated, of the estimates with exact norms.",
    "A largest norm orders of magnitude above the mean: single responses then dominate their groups.",
    panel("", Curve("gradnorm/sq_max", "largest", colour=2), Curve("gradnorm/sq_mean", "mean", colour=1), log=True),
    strip(
        "",
        Curve("gradnorm/length_corr", "correlation with length", colour=3),
        Curve("gradnorm/estimate_corr", "of estimates with exact norms", colour=1),
        include=(0.0, 1.0),
    ),
)

ENERGY = chart(
    "Responses that hold the gradient",
    "Share of sum c^2 w, the gradient's energy, that 1% of the responses hold; with algo.norm_power the energy over "
    "that without tempering; with algo.keep the share of the response tokens in the gradient pass. The strip shows the "
    "largest factor of tempering, and the energy with algo.keep over that without.",
    "A share above a half: the gradient is that of single responses. algo.norm_power tempers them.",
    panel(
        "",
        Curve("gradnorm/top_share", "1% of the responses", colour=2),
        Curve("temper/energy", "tempered over untempered", "average", 1),
        Curve("keep/tokens", "tokens in the pass", "average", 3),
        include=(0.0, 1.0),
    ),
    strip(
        "",
        Curve("temper/factor_max", "largest factor of tempering", "average", 1),
        Curve("keep/energy", "energy by thinning", "average", 3),
        include=(1.0,),
        log=True,
    ),
)

MISMATCH = chart(
    "Trainer against vLLM",
    "Mean absolute difference between the trainer's and vLLM's log-probabilities of the sampled tokens. Rounding "
    "causes about 1e-6 in float32 and 1e-2 in bfloat16. The strip shows the share of importance ratios cut at the cap.",
    "A sudden rise by orders of magnitude (vLLM serves other weights than the trainer's), or growth from step to step.",
    panel("nats", Curve("rollout/logprob_abs_diff", "mean difference"), log=True),
    strip("", Curve("rollout/truncated_ratio_fraction", "ratios cut", colour=2), include=(0.0, 0.01)),
)

WEIGHTS = chart(
    "Weights of the scores",
    "Mean importance weight of the sampled tokens, after the cap, rejection and centering; 1 without mismatch. The "
    "strip shows the share of tokens that algo.center leaves out.",
    "A mean far below 1: the gradient is that much shorter. A share above 2%: raise algo.center_tokens.",
    panel("", Curve("rollout/weight_mean", "mean weight"), include=(1.0,)),
    strip("", Curve("rollout/unrecorded_fraction", "not recorded", colour=2), include=(0.0, 0.01)),
)

REJECTION = chart(
    "Rejection",
    "Shares of tokens and of responses that rollout.rejection left out, because their importance ratio was outside the "
    "band. The strip shows the mean difference between vLLM's and the trainer's log-probabilities, with its sign.",
    "Shares that grow: the gradient is then that of ever fewer responses. Look for the cause in the mismatch first.",
    panel(
        "",
        Curve("rollout_corr/rollout_rs_seq_masked_fraction", "responses", "line", 3),
        Curve("rollout_corr/rollout_rs_masked_fraction", "tokens", "line", 2),
        include=(0.0, 0.01),
    ),
    strip("nats", Curve("rollout_corr/kl", "vLLM - trainer", "line", 1), include=(0.0,)),
    optional=True,
)

CLIPPING = chart(
    "Clipped ratios",
    "Shares of tokens with a ratio to the policy before the step's first update that was beyond its bound, over all "
    "updates of the step. The strip shows the mean fall of their log-probabilities since then.",
    "Shares that grow, or a divergence that jumps: the updates of a batch move the policy too far; use fewer.",
    panel(
        "",
        Curve("actor/pg_clipfrac", "clipped", "line", 2),
        Curve("actor/pg_clipfrac_lower", "dual clip", "line", 3),
        include=(0.0, 0.01),
    ),
    strip("nats", Curve("actor/ppo_kl", "old - new log-prob", "line", 1), include=(0.0,)),
    optional=True,
)

SOURCES = chart(
    "Sample staleness and dynamic sampling",
    "Age of the step's oldest sample in weight updates (0 is on-policy), and engine restarts. With dynamic sampling, "
    "the strips show the batches drawn, the groups dropped for equal rewards, and the mixed groups left unused.",
    "Repeated restarts, or batches that stay at the most of 4: few groups are mixed, so the "
    "training groups are not representative of the data.",
    strip(
        "",
        Curve("rollout/staleness_max", "staleness, updates", "line", 1),
        Curve("rollout/restarts", "restarts", "dots", 2),
        Curve("rollout/waves", "waves of a streamed step", "line", 3),
        include=(0.0, 1.0),
    ),
    strip("", Curve("rollout/dynamic_batches", "batches", "line", 3), include=(0.0,)),
    strip(
        "groups",
        Curve("groups/dropped", "dropped", colour=2),
        Curve("groups/unused", "unused", colour=5),
        include=(0.0,),
    ),
)

EPISODES = chart(
    "Episodes",
    "Turns of the policy in an episode, mean over the step's samples. The strips show the share of response tokens "
    "that the environment wrote, and the episodes that failed or were late, with reward 0.",
    "Episodes that fail: the environment raises, hangs or returns nonsense (logs/environment-*.log). Turns at "
    "rollout.environment.max_turns: the policy does not come to an end.",
    strip("turns", Curve("environment/turns_mean", "mean turns", "line", 1), include=(0.0,)),
    strip("", Curve("environment/observed_fraction", "written by the environment", "line", 3), include=(0.0, 1.0)),
    strip(
        "episodes",
        Curve("environment/failures", "failed", "line", 2),
        Curve("environment/timeouts", "late", "line", 5),
        include=(0.0, 1.0),
    ),
    optional=True,
)

SPECULATION = chart(
    "Speculation",
    "Tokens of a draft that were accepted, and the most sequences of an engine that are sampled with drafts.",
    "A bound of 0: drafts do not pay on this machine, or the responses do not repeat themselves.",
    strip("tokens", Curve("rollout/speculation_accepted", "accepted of a draft", "line", 1), include=(0.0,)),
    strip("", Curve("rollout/speculation_below", "sequences with drafts", "line", 2), include=(0.0,)),
    optional=True,
)


def draw_chart(spec: Chart, history: RunHistory, horizontal: Axis) -> str:
    """The panels of a chart, from top to bottom; "" if none of its metrics was logged."""
    if spec is TIME:
        return _draw_time(history, horizontal)
    panels = [_filled(panel, history) for panel in spec.panels]
    if spec is THROUGHPUT:
        panels.append(memory_of_ranks(history.directory))
    panels = [panel for panel in panels if panel.curves]
    return "".join(draw_panel(panel, horizontal, panel is panels[-1]) for panel in panels)


def _filled(panel: Panel, history: RunHistory) -> Panel:
    """The panel with all curves that have a point; on a logarithmic axis, a positive one."""
    curves = []
    for curve in panel.curves:
        steps, values = history.points(curve.metric)
        filled = replace(curve, steps=steps, values=values * panel.scale)
        if len(line_of(filled, panel.log)[0]):
            curves.append(filled)
    return replace(panel, curves=curves, rules=[_with_setting(rule, history) for rule in panel.rules])


def _with_setting(rule: ChartRule, history: RunHistory) -> ChartRule:
    """The rule at the value of its setting; it stays NaN, and is not drawn, without a positive one."""
    value = history.setting(rule.setting) if rule.setting else None
    return replace(rule, value=float(value)) if isinstance(value, (int, float)) and value > 0 else rule


def _draw_time(history: RunHistory, horizontal: Axis) -> str:
    """Seconds of the training steps by phase and the rest of each step; the slowest rank of the MARKED phases."""
    trained = np.isfinite(history.values("timing_s/step")) & (history.steps > 0)
    if not trained.any():
        return ""
    layers: dict[str, Array] = {}
    for phase in PHASES:
        seconds = np.nan_to_num(history.values(f"timing_s/{phase}")[trained])
        if seconds.any():
            layers[phase] = np.maximum(seconds, 0.0)
    rest = np.maximum(history.values("timing_s/step")[trained] - sum(layers.values()), 0.0)
    layers.pop("evaluate", None)
    layers["other"] = rest
    curves = [
        Curve(f"perf/ranks/{phase}/slowest", phase, "dots", colour)
        for colour, phase in enumerate(layers, start=1)
        if phase in MARKED
    ]
    ranks = _filled(strip("slowest rank", *curves, include=(0.0, 1.0)), history)  # no curve with a single rank
    stack = draw_stack(layers, history.steps[trained], horizontal, step_labels=not ranks.curves)
    return stack + (draw_panel(ranks, horizontal, step_labels=True) if ranks.curves else "")
