"""Figures of the live panel: the variance under every baseline, and the batch size against the noise."""

from __future__ import annotations

import numpy as np

from oblr_megatron.formatting import number
from oblr_megatron.observe.report.chart import Rule
from oblr_megatron.observe.report.history import History
from oblr_megatron.observe.report.specs import CurveSpec, FigureSpec, PanelSpec

RATIO = "/variance_ratio"
ACROSS_PROMPTS = ("none", "batch_mean")  # leave in what prompts differ by: of another order of size

VARIANCE = FigureSpec(
    "Variance under the baseline, relative to RLOO",
    "Gradient variance under this run's baseline divided by that under the plain leave-one-out mean, from the same "
    "responses. Below 1 the baseline helps. The strip shows how far the baseline spreads over the prompts of a step.",
    "An average above 1 for long: the baseline then costs samples, and rloo would serve better. A spread that leaves "
    "that of the rewards behind: single responses rule their groups.",
    (
        PanelSpec(
            "",
            (CurveSpec("baseline/variance_ratio_vs_rloo", "variance ratio"),),
            rules=(Rule(1.0, "rloo", forced=True),),
        ),
        PanelSpec("", (CurveSpec("baseline/spread", "spread", colour=3),), include=(0.0,), short=True),
    ),
)


def every_baseline(history: History) -> FigureSpec:
    """A line for each baseline that the run has figures of, and their order at the end."""
    names = sorted({name for record in history.records for name in record if name.endswith(RATIO)})
    colours = {name: 1 + position for position, name in enumerate(names)}

    def curves(*, across: bool) -> list[CurveSpec]:
        return [
            CurveSpec(name, _short(name), "average", colours[name])
            for name in names
            if (_short(name) in ACROSS_PROMPTS) == across
        ]

    return FigureSpec(
        "Variance under every baseline",
        "What the variance would have been under other baselines, divided by that under rloo: from the rewards and "
        "the gradient norms of the very responses the run has learnt from, as running averages. The strip holds "
        f"baselines that leave in what prompts differ by.{_order(history, names)}",
        "A line that stays below that of the run's own baseline: it would serve better here.",
        (
            PanelSpec("", curves(across=False), rules=(Rule(1.0, "rloo", forced=True),)),
            PanelSpec("", curves(across=True), log=True, rules=(Rule(1.0, "rloo", forced=True),), short=True),
        ),
    )


def batch_size(history: History) -> FigureSpec:
    """The critical batch size against that of the run, and what follows."""
    prompts = history.setting("num_prompts")
    rules = (Rule(float(prompts), "num_prompts", forced=True),) if prompts else ()
    return FigureSpec(
        "Batch size",
        "Critical batch size: noise over signal, in prompts, from the running averages of both. In a "
        "batch of that many prompts half of the squared gradient is signal; far fewer waste steps, far more waste "
        f"samples. The strip shows the signal-to-noise ratio of one prompt.{batch_advice(history)}",
        "A line that climbs far above num_prompts while the reward is far from settled: steps are then mostly noise. "
        "Gaps are steps without a signal.",
        (
            PanelSpec("prompts", (CurveSpec("snr/critical_batch_size", "critical", "line"),), log=True, rules=rules),
            PanelSpec("", (CurveSpec("snr/snr", "signal to noise", "line", 3),), log=True, short=True),
        ),
    )


def batch_advice(history: History) -> str:
    """What the last third of the critical batch sizes says of the run's own, as a sentence; "" where nothing.

    A step of Q prompts is worth Q / (Q + B) of a noiseless one, B the critical size (arXiv 1812.06162, equation 2.11).
    """
    values, prompts = history.points("snr/critical_batch_size")[1], history.setting("num_prompts")
    if not len(values) or not prompts:
        return ""
    critical = float(np.median(values[-(len(values) // 3 + 1) :]))
    now, twice = prompts / (prompts + critical), 2 * prompts / (2 * prompts + critical)
    advice = "the batch is about right"
    if prompts < critical / 2:
        advice = f"noise prevails: with {2 * prompts:,} prompts a step would be worth {twice / now:.1f} times as much"
    elif prompts > 2 * critical:
        half = prompts / 2 / (prompts / 2 + critical)
        advice = f"fewer prompts would do: with half of them a step would still be worth {half / now:.0%} as much"
    return (
        f" Over the last third it was about {number(round(critical))} prompts, and a step takes {prompts:,}, worth "
        f"{now:.0%} of one without noise; {advice}."
    )


def _order(history: History, names: list[str]) -> str:
    """ " Over the last third: optimal_prior 0.93, optimal 0.95, ...", the smallest first."""
    found = {_short(name): history.points(name)[1] for name in names}
    means = {name: float(values[-(len(values) // 3 + 1) :].mean()) for name, values in found.items() if len(values)}
    if not means:
        return ""
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in sorted(means.items(), key=lambda item: item[1]))
    return f" Over the last third: {listed}."


def _short(name: str) -> str:
    """ "baseline/opo/variance_ratio" -> "opo"."""
    return name.removeprefix("baseline/").removesuffix(RATIO)
