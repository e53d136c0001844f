"""The charts of a report with their captions, and how they are drawn from a run's values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oblr_megatron.formatting import duration
from oblr_megatron.observe.report.axes import Axis
from oblr_megatron.observe.report.chart import Curve, Panel, Rule, draw_panel, draw_stack, line_of
from oblr_megatron.observe.report.costs import MARKED, RANKS, THROUGHPUT, TIME, UTILIZATION
from oblr_megatron.observe.report.history import Array, History
from oblr_megatron.observe.report.panel import VARIANCE, batch_size, every_baseline, group_size, pools
from oblr_megatron.observe.report.ranks import memory_of_ranks
from oblr_megatron.observe.report.specs import ChartSpec, CurveSpec, PanelSpec, Section, chart, panel, strip
from oblr_megatron.timing import PHASES


def sections(history: History) -> Iterator[Section]:
    """All sections of the report in order; some charts depend on what the run evaluated and measured."""
    evaluations = [_evaluation_chart(name) for name in history.evaluation_sets()] or [EVALUATION_MISSING]
    speculation = [SPECULATION] if len(history.points("rollout/speculation_below")[1]) else []
    episodes = [EPISODES] if len(history.points("environment/turns_mean")[1]) else []
    experts = [EXPERTS] if len(history.points("moe/max_load")[1]) else []
    yield Section("Learning", (REWARD, *evaluations, RESPONSE_LENGTH, *episodes, ENTROPY, *experts))
    yield Section(
        "Signal, noise and learning rate", (SHRINK, LEARNING_RATE, SIGNAL, batch_size(history), group_size(history))
    )
    of_pools = [pools(history)] if any("pool/pull" in r or "pool/trust" in r for r in history.records) else []
    yield Section("Baselines", (VARIANCE, every_baseline(history), *of_pools))
    rejection = [REJECTION] if len(history.points("rollout_corr/kl")[1]) else []
    clipping = [CLIPPING] if len(history.points("actor/ppo_kl")[1]) else []
    agreement = (GRADIENT, *clipping, SAMPLE_NORMS, MISMATCH, *rejection, SOURCES, *speculation)
    yield Section("Gradients, and agreement with vLLM", agreement)
    yield Section("Cost", (TIME, RANKS, UTILIZATION, THROUGHPUT))


REWARD = chart(
    "Reward",
    "Mean reward of each step's responses: dots are single steps, the line is their running average. The strip shows "
    "the share of prompts with unequal rewards in their group; only these give a gradient.",
    "A flat or falling line, or mixed groups near 0: the task is already solved, or too hard.",
    panel("", CurveSpec("reward/mean", "mean reward"), include=(0.0, 1.0)),
    strip("", CurveSpec("groups/mixed_fraction", "mixed groups", colour=3), include=(0.0, 1.0)),
)

EVALUATION_MISSING = chart("Held-out accuracy", "", "")


def _evaluation_chart(name: str) -> ChartSpec:
    curves = (
        CurveSpec(f"eval/{name}/accuracy", "greedy", "marks", 1),
        CurveSpec(f"eval/{name}/mean_at_k", "sampled, mean@k", "marks", 2),
        CurveSpec(f"eval/{name}/pass_at_k", "sampled, pass@k", "marks", 3),
        CurveSpec(f"eval/{name}/maj_at_k", "sampled, maj@k", "marks", 4),
    )
    return chart(
        f"Held-out accuracy: {name}",
        "Share of held-out prompts answered correctly: by the greedy response, by the average of k sampled responses "
        "(mean@k), by at least one of them (pass@k), and by their most frequent answer (maj@k). The strips show mean "
        "response length, the share of responses cut at the token limit, and the responses that could not be scored.",
        "Accuracy that stalls while the reward rises (memorisation), or pass@k that falls while mean@k rises (loss of "
        "diversity).",
        panel("", *curves, include=(0.0, 1.0)),
        strip("tokens", CurveSpec(f"eval/{name}/response_length", "mean length", "marks", 5), include=(0.0,)),
        strip("", CurveSpec(f"eval/{name}/truncated_fraction", "truncated", "marks", 5), include=(0.0, 0.1)),
        strip("responses", CurveSpec(f"eval/{name}/unscored", "unscored", "marks", 5), include=(0.0, 1.0)),
    )


RESPONSE_LENGTH = chart(
    "Response length",
    "Mean response length, and the share of responses cut at the token limit.",
    "Length that grows while the reward does not, or a truncated share that grows: truncated answers earn nothing.",
    panel("tokens", CurveSpec("response_length/mean", "mean length"), include=(0.0,)),
    strip("", CurveSpec("response_length/truncated_fraction", "truncated", colour=2), include=(0.0, 0.1)),
)

ENTROPY = chart(
    "Entropy",
    "Entropy of the next-token distribution, averaged over response tokens. It falls as the policy becomes certain. "
    "With a KL penalty, the strip shows the divergence from the reference model.",
    "A drop to near 0 while the reward is still low (collapse), or a steady rise (the policy degenerates).",
    panel("nats", CurveSpec("entropy", "entropy"), include=(0.0,)),
    strip("nats", CurveSpec("kl/mean", "divergence", colour=3), include=(0.0,)),
)

EXPERTS = chart(
    "Experts",
    "How evenly the routers spread tokens: the largest load of any expert (1 if all loads are equal), and the "
    "balancing loss (1 if all experts are equally likely). The strips show the routers' z-loss, and the share of their "
    "choices that routing replay replaced by the engine's.",
    "A load that approaches the number of experts (the router uses only a few), or a z-loss that keeps growing.",
    panel("", CurveSpec("moe/max_load", "fullest expert"), CurveSpec("moe/aux_loss", "balancing loss"), include=(1.0,)),
    strip("", CurveSpec("moe/z_loss", "z-loss", colour=3), include=(0.0,)),
    strip("", CurveSpec("moe/route_mismatch_fraction", "replaced routes", colour=2), include=(0.0,)),
)

SHRINK = chart(
    "Shrink factor",
    "Share of the squared gradient norm that is signal: near 0 the batch is mostly noise; near 1 more responses would "
    "not help. Dots are single-step estimates, which scatter widely and may be negative. The line is the averaged, "
    "clamped value that scales the learning rate.",
    "Under the snr schedule, a line that falls far: the learning rate falls with it; use more prompts per step.",
    panel(
        "",
        CurveSpec("snr/shrink_raw", "single steps", "dots", 5),
        CurveSpec("snr/shrink_ema", "averaged", "line", 1),
        include=(0.0,),
        rules=(("algo.snr.floor", "floor"),),
    ),
)

LEARNING_RATE = chart(
    "Learning rate",
    "Learning rate of each step, after warm-up and, under the snr schedule, after scaling by the shrink factor.",
    "A rate at its lower end long before the reward settles, or one that swings from step to step.",
    panel("", CurveSpec("lr", "learning rate", "line"), include=(0.0,), rules=(("optimizer.lr", "optimizer.lr"),)),
)

SIGNAL = chart(
    "Signal and noise",
    "Unbiased estimate of the true gradient's squared norm; single steps may be negative. The strip shows the noise: "
    "the estimated variance of one prompt's gradient. With rollout.max_staleness, the second strip is 1 in steps with "
    "stale samples: their importance ratios are cut, and both estimates have a bias.",
    "Noise that grows by orders of magnitude, or signal that vanishes while the reward still changes.",
    panel("", CurveSpec("snr/signal_sq", "signal, squared norm"), rules=(Rule(0.0, "", forced=True),)),
    strip("", CurveSpec("snr/noise_trace", "noise, trace", colour=2), log=True),
    strip("", CurveSpec("snr/biased", "stale samples", "line", 3), include=(0.0, 1.0)),
)

GRADIENT = chart(
    "Gradient norm",
    "Norm of the full gradient before clipping. The strip shows the loss, of which only the gradient is meaningful, "
    "and the factor of the clipping.",
    "Spikes that keep growing, or every step above the clipping threshold: clipping then sets the step size.",
    panel("", CurveSpec("grad_norm", "gradient norm"), include=(0.0,), rules=(("optimizer.clip_grad", "clip"),)),
    strip("", CurveSpec("loss", "loss", colour=3), CurveSpec("optimizer/clip_factor", "clip factor", colour=2)),
)

SAMPLE_NORMS = chart(
    "Gradient norms of single responses",
    "Mean and largest squared gradient norm of the step's responses, the weights of the optimal baseline. The strip "
    "shows their correlation with response length and, if norms are estimated, of the estimates with exact norms.",
    "A largest norm orders of magnitude above the mean: single responses then dominate their groups.",
    panel(
        "", CurveSpec("gradnorm/sq_max", "largest", colour=2), CurveSpec("gradnorm/sq_mean", "mean", colour=1), log=True
    ),
    strip(
        "",
        CurveSpec("gradnorm/length_corr", "correlation with length", colour=3),
        CurveSpec("gradnorm/estimate_corr", "of estimates with exact norms", colour=1),
        include=(0.0, 1.0),
    ),
)

MISMATCH = chart(
    "Trainer against vLLM",
    "Mean absolute difference between the trainer's and vLLM's log-probabilities of the sampled tokens. Rounding "
    "causes about 1e-6 in float32 and 1e-2 in bfloat16. The strip shows the share of importance ratios cut at the cap.",
    "A sudden rise by orders of magnitude (vLLM serves other weights than the trainer's), or growth from step to step.",
    panel("nats", CurveSpec("rollout/logprob_abs_diff", "mean difference"), log=True),
    strip("", CurveSpec("rollout/truncated_ratio_fraction", "ratios cut", colour=2), include=(0.0, 0.01)),
)

REJECTION = chart(
    "Rejection",
    "Shares of tokens and of responses that rollout.rejection left out, because their importance ratio was outside the "
    "band. The strip shows the mean difference between vLLM's and the trainer's log-probabilities, with its sign.",
    "Shares that grow: the gradient is then that of ever fewer responses. Look for the cause in the mismatch first.",
    panel(
        "",
        CurveSpec("rollout_corr/rollout_rs_seq_masked_fraction", "responses", "line", 3),
        CurveSpec("rollout_corr/rollout_rs_masked_fraction", "tokens", "line", 2),
        include=(0.0, 0.01),
    ),
    strip("nats", CurveSpec("rollout_corr/kl", "vLLM - trainer", "line", 1), include=(0.0,)),
)

CLIPPING = chart(
    "Clipped ratios",
    "Shares of tokens with a ratio to the policy before the step's first update that was beyond its bound, over all "
    "updates of the step. The strip shows the mean fall of their log-probabilities since then.",
    "Shares that grow, or a divergence that jumps: the updates of a batch move the policy too far; use fewer.",
    panel(
        "",
        CurveSpec("actor/pg_clipfrac", "clipped", "line", 2),
        CurveSpec("actor/pg_clipfrac_lower", "dual clip", "line", 3),
        include=(0.0, 0.01),
    ),
    strip("nats", CurveSpec("actor/ppo_kl", "old - new log-prob", "line", 1), include=(0.0,)),
)

SOURCES = chart(
    "Sample staleness and dynamic sampling",
    "Age of the step's oldest sample in weight updates (0 is on-policy), and engine restarts. With dynamic sampling, "
    "the strips show the batches drawn, the groups dropped for equal rewards, and the mixed groups left unused.",
    "Repeated restarts, or batches that stay at rollout.dynamic_sampling_max_batches: few groups are mixed, so the "
    "training groups are not representative of the data.",
    strip(
        "",
        CurveSpec("rollout/staleness_max", "staleness, updates", "line", 1),
        CurveSpec("rollout/restarts", "restarts", "dots", 2),
        CurveSpec("rollout/waves", "waves of a streamed step", "line", 3),
        include=(0.0, 1.0),
    ),
    strip("", CurveSpec("rollout/dynamic_batches", "batches", "line", 3), include=(0.0,)),
    strip(
        "groups",
        CurveSpec("groups/dropped", "dropped", colour=2),
        CurveSpec("groups/unused", "unused", colour=5),
        include=(0.0,),
    ),
)

EPISODES = chart(
    "Episodes",
    "Turns of the policy in an episode, mean over the step's samples. The strips show the share of response tokens "
    "that the environment wrote, and the episodes that gave no sample.",
    "Episodes that fail: the environment raises, hangs or returns nonsense (logs/environment-*.log). Turns at "
    "rollout.environment.max_turns: the policy does not come to an end.",
    strip("turns", CurveSpec("environment/turns_mean", "mean turns", "line", 1), include=(0.0,)),
    strip("", CurveSpec("environment/observed_fraction", "written by the environment", "line", 3), include=(0.0, 1.0)),
    strip(
        "episodes",
        CurveSpec("environment/failures", "failed", "line", 2),
        CurveSpec("environment/timeouts", "late", "line", 5),
        include=(0.0, 1.0),
    ),
)

SPECULATION = chart(
    "Speculation",
    "Tokens of a draft that were accepted, and the most sequences of an engine that are sampled with drafts.",
    "A bound of 0: drafts do not pay on this machine, or the responses do not repeat themselves.",
    strip("tokens", CurveSpec("rollout/speculation_accepted", "accepted of a draft", "line", 1), include=(0.0,)),
    strip("", CurveSpec("rollout/speculation_below", "sequences with drafts", "line", 2), include=(0.0,)),
)


def draw_chart(spec: ChartSpec, history: History, horizontal: Axis) -> str:
    """The panels of a chart, from top to bottom; "" if none of its metrics was logged."""
    if spec is TIME:
        return _draw_time(history, horizontal)
    panels = [panel for panel in (_fill_panel(panel, history) for panel in spec.panels) if panel.curves]
    if spec is THROUGHPUT and (memory := memory_of_ranks(history.directory)).curves:
        panels.append(memory)
    return "".join(draw_panel(panel, horizontal, panel is panels[-1]) for panel in panels)


def _fill_panel(spec: PanelSpec, history: History) -> Panel:
    """The panel with all curves that have a point; on a logarithmic axis, a positive one."""
    curves = []
    for curve in spec.curves:
        steps, values = history.points(curve.metric)
        filled = Curve(curve.label, steps, values * spec.scale, curve.kind, curve.colour)
        if len(line_of(filled, spec.log)[0]):
            curves.append(filled)
    rules = [rule for rule in (_fill_rule(rule, history) for rule in spec.rules) if rule is not None]
    return Panel(spec.unit, curves, spec.log, spec.include, rules, spec.short)


def _fill_rule(rule: Rule | tuple[str, str], history: History) -> Rule | None:
    if isinstance(rule, Rule):
        return rule
    key, label = rule
    value = history.setting(key)
    return Rule(float(value), label) if isinstance(value, (int, float)) and value > 0 else None


def _draw_time(history: History, horizontal: Axis) -> str:
    """Seconds of the training steps by phase, and the rest of each step."""
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
    ranks = _slowest_ranks(list(layers), history)
    values, steps = np.stack(list(layers.values())), history.steps[trained]
    stack = draw_stack(list(layers), steps, values, horizontal, show=duration, step_labels=not ranks.curves)
    return stack + (draw_panel(ranks, horizontal, step_labels=True) if ranks.curves else "")


def _slowest_ranks(phases: list[str], history: History) -> Panel:
    """The slowest rank of the MARKED phases, in the stack's colours; no curve with a single rank."""
    curves = [
        CurveSpec(f"perf/ranks/{phase}/slowest", phase, "dots", position)
        for position, phase in enumerate(phases, start=1)
        if phase in MARKED
    ]
    return _fill_panel(strip("slowest rank", *curves, include=(0.0, 1.0)), history)
