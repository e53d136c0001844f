"""Which figures a report shows, and what their captions say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oblr_megatron.formatting import duration
from oblr_megatron.observe.report.axes import Axis
from oblr_megatron.observe.report.chart import Curve, Panel, Rule, draw_panel, draw_stack
from oblr_megatron.observe.report.costs import MARKED, RANKS, THROUGHPUT, TIME, UTILIZATION
from oblr_megatron.observe.report.history import Array, History
from oblr_megatron.observe.report.panel import VARIANCE, batch_size, every_baseline
from oblr_megatron.observe.report.ranks import memory_of_ranks
from oblr_megatron.observe.report.specs import CurveSpec, FigureSpec, PanelSpec, Section
from oblr_megatron.timing import PHASES


def sections(history: History) -> Iterator[Section]:
    """All sections of the report in order; some figures depend on what the run has evaluated and measured."""
    evaluations = [_evaluation_chart(name) for name in history.evaluation_sets()] or [EVALUATION_MISSING]
    experts = [EXPERTS] if len(history.points("moe/max_load")[1]) else []
    yield Section("Learning", (REWARD, *evaluations, RESPONSE_LENGTH, ENTROPY, *experts))
    yield Section("Signal, noise and learning rate", (SHRINK, LEARNING_RATE, SIGNAL, batch_size(history)))
    yield Section("Baselines", (VARIANCE, every_baseline(history)))
    yield Section("Gradients, and agreement with vLLM", (GRADIENT, SAMPLE_NORMS, MISMATCH, SOURCES))
    yield Section("Cost", (TIME, RANKS, UTILIZATION, THROUGHPUT))


REWARD = FigureSpec(
    "Reward",
    "Mean reward of each step's responses: dots are single steps, the line is their running average. The strip shows"
    " the share of prompts whose responses did not all earn the same reward; only these carry a gradient.",
    "A flat or falling line, or mixed groups near 0: the task is then solved already or out of reach.",
    (
        PanelSpec("", (CurveSpec("reward/mean", "mean reward"),), include=(0.0, 1.0)),
        PanelSpec("", (CurveSpec("groups/mixed_fraction", "mixed groups", colour=3),), include=(0.0, 1.0), short=True),
    ),
)

EVALUATION_MISSING = FigureSpec("Held-out accuracy", "", "")


def _strip(unit: str, metric: str, label: str, *, include: tuple[float, ...] = (0.0,)) -> PanelSpec:
    return PanelSpec(unit, (CurveSpec(metric, label, "marks", 5),), include=include, short=True)


def _evaluation_chart(name: str) -> FigureSpec:
    curves = (
        CurveSpec(f"eval/{name}/accuracy", "greedy", "marks", 1),
        CurveSpec(f"eval/{name}/mean_at_k", "sampled, mean@k", "marks", 2),
        CurveSpec(f"eval/{name}/pass_at_k", "sampled, pass@k", "marks", 3),
        CurveSpec(f"eval/{name}/maj_at_k", "sampled, maj@k", "marks", 4),
    )
    return FigureSpec(
        f"Held-out accuracy: {name}",
        "Share of held-out prompts answered right: by the greedy response, by the average sampled response, by at "
        "least one of k sampled ones, and by the answer that most of them give. The strips show the mean length of all "
        "these responses, and the share that was cut at the limit.",
        "Held-out accuracy that stalls while the reward rises (memorising), or pass@k falling as mean@k rises "
        "(narrowing).",
        (
            PanelSpec("", curves, include=(0.0, 1.0)),
            _strip("tokens", f"eval/{name}/response_length", "mean length"),
            _strip("", f"eval/{name}/truncated_fraction", "truncated", include=(0.0, 0.1)),
        ),
    )


RESPONSE_LENGTH = FigureSpec(
    "Response length",
    "Mean length of the responses, and the share of them that were cut at the token limit.",
    "A length that runs off while the reward does not move, or a truncated share that climbs: cut answers earn "
    "nothing.",
    (
        PanelSpec("tokens", (CurveSpec("response_length/mean", "mean length"),), include=(0.0,)),
        PanelSpec(
            "",
            (CurveSpec("response_length/truncated_fraction", "truncated", colour=2),),
            include=(0.0, 0.1),
            short=True,
        ),
    ),
)

ENTROPY = FigureSpec(
    "Entropy",
    "How undecided the policy is about the next token, averaged over response tokens. It falls as the policy grows "
    "sure. The strip shows how far the policy has come from the model the run began with, where a penalty holds it.",
    "A sudden drop to near 0 while the reward is still low (collapse), or a steady climb (the policy dissolves).",
    (
        PanelSpec("nats", (CurveSpec("entropy", "entropy"),), include=(0.0,)),
        PanelSpec("nats", (CurveSpec("kl/mean", "divergence", colour=3),), include=(0.0,), short=True),
    ),
)

EXPERTS = FigureSpec(
    "Experts",
    "How evenly the routers of a mixture spread tokens: the load of the fullest expert of any layer, 1 when all have "
    "the same, and the balancing loss, 1 when all are equally likely. The strip is the routers' z-loss.",
    "A load that climbs towards the number of experts (the router collapses onto few), or a z-loss that keeps growing.",
    (
        PanelSpec(
            "",
            (CurveSpec("moe/max_load", "fullest expert"), CurveSpec("moe/aux_loss", "balancing loss")),
            include=(1.0,),
        ),
        PanelSpec("", (CurveSpec("moe/z_loss", "z-loss", colour=3),), include=(0.0,), short=True),
    ),
)

SHRINK = FigureSpec(
    "Shrink factor",
    "Share of the squared gradient norm that is signal and not noise: near 0, the batch says little about where to "
    "go; near 1, more responses would not help. Dots are single steps, which scatter widely and go below 0 by "
    "nature; the line is the averaged, clamped value that governs the learning rate.",
    "A line that rests on the floor for many steps: the learning rate has collapsed, take more prompts a step.",
    (
        PanelSpec(
            "",
            (
                CurveSpec("snr/shrink_raw", "single steps", "dots", 5),
                CurveSpec("snr/shrink_ema", "averaged", "line", 1),
            ),
            include=(0.0,),
            rules=(("algo.snr.floor", "floor"),),
        ),
    ),
)

LEARNING_RATE = FigureSpec(
    "Learning rate",
    "The rate each step was taken with, after warm-up and, under the snr schedule, after scaling by the shrink factor.",
    "A rate pinned to its lower end long before the reward has settled, or one that swings from step to step.",
    (
        PanelSpec(
            "", (CurveSpec("lr", "learning rate", "line"),), include=(0.0,), rules=(("optimizer.lr", "optimizer.lr"),)
        ),
    ),
)

SIGNAL = FigureSpec(
    "Signal and noise",
    "Estimated squared norm of the true gradient; single steps go below 0 by nature, as an unbiased estimate must. The"
    " strip shows the estimated variance of one prompt's gradient, the noise.",
    "Noise growing by orders of magnitude, or signal vanishing while the reward is far from settled.",
    (
        PanelSpec("", (CurveSpec("snr/signal_sq", "signal, squared norm"),), rules=(Rule(0.0, "", forced=True),)),
        PanelSpec("", (CurveSpec("snr/noise_trace", "noise, trace", colour=2),), log=True, short=True),
    ),
)

GRADIENT = FigureSpec(
    "Gradient norm",
    "Norm of the whole gradient before clipping, and the loss. The loss of a policy gradient says little by itself: "
    "only its gradient has a meaning.",
    "Spikes that keep growing, or every step above the clipping threshold: the rate is then set by the clip.",
    (
        PanelSpec(
            "", (CurveSpec("grad_norm", "gradient norm"),), include=(0.0,), rules=(("optimizer.clip_grad", "clip"),)
        ),
        PanelSpec("", (CurveSpec("loss", "loss", colour=3),), short=True),
    ),
)

SAMPLE_NORMS = FigureSpec(
    "Gradient norms of single responses",
    "Mean and largest squared norm of the gradients of the step's single responses: the weights of the optimal "
    "baseline. The strip shows how far plain response length would have foretold them (1: entirely), and, where norms "
    "are estimated, how far the estimates do.",
    "A largest norm that pulls away from the mean by orders of magnitude: single responses then rule their groups.",
    (
        PanelSpec(
            "",
            (CurveSpec("gradnorm/sq_max", "largest", colour=2), CurveSpec("gradnorm/sq_mean", "mean", colour=1)),
            log=True,
        ),
        PanelSpec(
            "",
            (
                CurveSpec("gradnorm/length_corr", "correlation with length", colour=3),
                CurveSpec("gradnorm/estimate_corr", "of estimates with exact norms", colour=1),
            ),
            include=(0.0, 1.0),
            short=True,
        ),
    ),
)

MISMATCH = FigureSpec(
    "Trainer against vLLM",
    "Mean difference between the log-probabilities the trainer and vLLM give to the same sampled tokens. Around 1e-6"
    " in float32 and 1e-2 in bfloat16 is rounding. The strip shows the share of importance ratios cut at the cap.",
    "A sudden rise by orders of magnitude (vLLM serves other weights than the trainer holds) or growth from step to "
    "step.",
    (
        PanelSpec("nats", (CurveSpec("rollout/logprob_abs_diff", "mean difference"),), log=True),
        PanelSpec(
            "",
            (CurveSpec("rollout/truncated_ratio_fraction", "ratios cut", colour=2),),
            include=(0.0, 0.01),
            short=True,
        ),
    ),
)

SOURCES = FigureSpec(
    "Where samples came from",
    "Age of the step's oldest sample in weight updates (0: on-policy), and engines that had to be started anew. The "
    "strips show what dynamic sampling did, where it is on: batches drawn, groups of equal rewards left out, mixed "
    "groups drawn in vain.",
    "Restarts that keep coming, or batches that rest at rollout.dynamic_sampling_max_batches: few groups are mixed "
    "then, and what is trained on says little about the data.",
    (
        PanelSpec(
            "",
            (
                CurveSpec("rollout/staleness_max", "staleness, updates", "line", 1),
                CurveSpec("rollout/restarts", "restarts", "dots", 2),
            ),
            include=(0.0, 1.0),
            short=True,
        ),
        PanelSpec("", (CurveSpec("rollout/dynamic_batches", "batches", "line", 3),), include=(0.0,), short=True),
        PanelSpec(
            "groups",
            (CurveSpec("groups/dropped", "left out", colour=2), CurveSpec("groups/unused", "in vain", colour=5)),
            include=(0.0,),
            short=True,
        ),
    ),
)


def draw_figure(spec: FigureSpec, history: History, horizontal: Axis) -> str:
    """The panels of a figure, from top to bottom; "" if nothing of it was logged."""
    if spec is TIME:
        return _draw_time(history, horizontal)
    panels = [panel for panel in (_fill_panel(panel, history) for panel in spec.panels) if panel.curves]
    if spec is THROUGHPUT and (memory := memory_of_ranks(history.directory)).curves:
        panels.append(memory)
    return "".join(draw_panel(panel, horizontal, panel is panels[-1]) for panel in panels)


def _fill_panel(spec: PanelSpec, history: History) -> Panel:
    """The panel with the curves that have a value; on a logarithmic axis, a positive one."""
    curves = []
    for curve in spec.curves:
        steps, values = history.points(curve.metric)
        if len(values) and (not spec.log or (values > 0).any()):
            curves.append(Curve(curve.label, steps, values * spec.scale, curve.kind, curve.colour))
    rules = [rule for rule in (_fill_rule(rule, history) for rule in spec.rules) if rule is not None]
    return Panel(spec.unit, curves, spec.log, spec.include, rules, spec.short)


def _fill_rule(rule: Rule | tuple[str, str], history: History) -> Rule | None:
    if isinstance(rule, Rule):
        return rule
    key, label = rule
    value = history.setting(key)
    return Rule(float(value), label) if isinstance(value, (int, float)) and value > 0 else None


def _draw_time(history: History, horizontal: Axis) -> str:
    """Phases of the training steps, and what is left of the step outside them."""
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
    strip = _slowest_ranks(list(layers), history)
    values = np.stack(list(layers.values()))
    stack = draw_stack(
        list(layers), history.steps[trained], values, horizontal, show=duration, step_labels=not strip.curves
    )
    return stack + (draw_panel(strip, horizontal, step_labels=True) if strip.curves else "")


def _slowest_ranks(phases: list[str], history: History) -> Panel:
    """Which rank took longest in the MARKED phases, in the stack's colours; without a curve where there is one rank."""
    curves = [
        CurveSpec(f"perf/ranks/{phase}/slowest", phase, "dots", position)
        for position, phase in enumerate(phases, start=1)
        if phase in MARKED
    ]
    return _fill_panel(PanelSpec("slowest rank", curves, include=(0.0, 1.0), short=True), history)
