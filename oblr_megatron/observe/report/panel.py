"""Charts about baselines and batch size: gradient variance under every baseline, and batch size against noise."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from oblr_megatron.algo.noise_split import compared_with_best
from oblr_megatron.formatting import number
from oblr_megatron.observe.alarm_window import CRITICAL, critical_size, planned
from oblr_megatron.observe.report.history import Array, RunHistory
from oblr_megatron.observe.report.specs import Chart, ChartRule, Curve, chart, panel, strip

RATIO = "/variance_ratio"
MOST_SOURCES = 8  # as many colours as the page has
ACROSS_PROMPTS = ("none", "batch_mean")  # keep the variance between prompts, so their ratios are much larger

VARIANCE = chart(
    "Variance under the baseline relative to RLOO",
    "Gradient variance under this run's baseline divided by the variance under RLOO (the leave-one-out mean), from the "
    "same responses. Below 1 the baseline helps. The strip shows the baseline's standard deviation over prompts.",
    "An average that stays above 1: rloo would need fewer samples. A spread well above that of the rewards: single "
    "responses dominate their groups.",
    panel("", Curve("baseline/variance_ratio_vs_rloo", "variance ratio"), rules=(ChartRule("rloo", 1.0, forced=True),)),
    strip("", Curve("baseline/spread", "spread", colour=3), include=(0.0,)),
)


def every_baseline(history: RunHistory) -> Chart:
    """A line for each baseline with a logged variance ratio, and their ranking at the end of the run."""
    names = sorted({name for record in history.records for name in record if name.endswith(RATIO)})
    curves = [Curve(name, _short(name), "average", colour) for colour, name in enumerate(names, start=1)]
    return chart(
        "Variance under every baseline",
        "Gradient variance that other baselines would have had, divided by the variance under rloo, as running "
        "averages. It is computed from the rewards and gradient norms of the run's own responses. The strip shows "
        f"baselines that keep the variance between prompts.{_order(history, names)}",
        "A line that stays below the run's own baseline: that baseline would be better here.",
        panel(
            "",
            *(curve for curve in curves if curve.label not in ACROSS_PROMPTS),
            rules=(ChartRule("rloo", 1.0, forced=True),),
        ),
        strip(
            "",
            *(curve for curve in curves if curve.label in ACROSS_PROMPTS),
            log=True,
            rules=(ChartRule("rloo", 1.0, forced=True),),
        ),
    )


def batch_size(history: RunHistory) -> Chart:
    """The critical batch size against the run's num_prompts, with advice; not with algo.updates_per_batch."""
    prompts = planned(history.setting).noise_prompts
    rules = (ChartRule("num_prompts", float(prompts), forced=True),) if prompts else ()
    return chart(
        "Batch size",
        "Critical batch size in prompts: running average of the noise over that of the signal. At this batch size half "
        "of the squared gradient is signal; far smaller batches waste steps, far larger ones waste samples. The strip "
        f"shows the signal-to-noise ratio of one prompt.{batch_advice(history)}",
        "A line far above num_prompts while the reward still changes: steps are then mostly noise. Steps "
        "without a signal have no point.",
        panel("prompts", Curve(CRITICAL, "critical", "line"), log=True, rules=rules),
        strip("", Curve("snr/snr", "signal to noise", "line", 3), log=True),
    )


def group_size(history: RunHistory) -> Chart:
    """The noise of one prompt's gradient by cause, with advice on group_size."""
    size = history.setting("group_size")
    rules = (ChartRule("group_size", float(size), forced=True),) if size else ()
    return chart(
        "Noise by cause",
        "Running averages of the noise of one prompt's gradient: the part that differences between prompts cause, and "
        "the part that responses to the same prompt cause. A baseline and the group size change the second part only. "
        f"The strip shows the group size of the least noise at equal samples.{group_advice(history)}",
        "A best group size far from group_size.",
        panel(
            "",
            Curve("snr/between", "between prompts", "line", 1),
            Curve("snr/within", "within a prompt", "line", 2),
        ),
        strip("", Curve("snr/best_group_size", "best group size", "line", 3), rules=rules),
    )


def pools(history: RunHistory) -> list[Chart]:
    """Predictions of pooled baselines from earlier steps; [] for other baselines."""
    names = sorted({name for record in history.records for name in record if name.startswith("pool/")})
    if not names:
        return []
    logged = Counter(name for record in history.records for name in record if name.startswith("pool/"))
    means = sorted([name for name, _ in logged.most_common() if name.endswith("/mean")][:MOST_SOURCES])
    figure = chart(
        "Pools of earlier rewards",
        "Mean reward of each data source over the steps so far, weighted as the baseline asks: the next step's "
        "baseline of a prompt that is new. The strip shows the weight of a prompt's own history, and the pool's weight "
        "in optimal_pooled.",
        "A history with a weight near 1: prompts differ much and change slowly, so that their own past predicts best.",
        panel("", *(Curve(name, name[5:-5], "line", place) for place, name in enumerate(means, 1)), include=(0.0,)),
        strip("", Curve("pool/trust", "history", "line", 2), Curve("pool/pull", "pull", "line", 3)),
        strip("responses", Curve("pool/effective_samples", "that a step's sums rest on", "average", 1), include=(0.0,)),
    )
    return [figure]


def batch_advice(history: RunHistory) -> str:
    """Advice on num_prompts from the last third of the critical batch sizes; "" without one or with several updates.

    A step of Q prompts is worth Q / (Q + B) noiseless steps, where B is the critical size (arXiv 1812.06162, eq. 2.11).
    """
    sizes = np.array([size for record in history.records if (size := critical_size(record)) is not None])
    prompts = planned(history.setting).noise_prompts
    if not len(sizes) or not prompts:
        return ""
    critical = float(np.median(_last_third(sizes)))
    if critical == math.inf:
        return " Over most of the last third the averages show no signal: the steps are noise at this batch size."
    now, twice = prompts / (prompts + critical), 2 * prompts / (2 * prompts + critical)
    advice = "The batch size is about right"
    if prompts < critical / 2:
        advice = f"The batch is small: {2 * prompts:,} prompts would make a step worth {twice / now:.1f} times as much"
    elif prompts > 2 * critical:
        half = prompts / 2 / (prompts / 2 + critical)
        advice = f"The batch is large: half as many prompts would keep {half / now:.0%} of a step's worth"
    return (
        f" Over the last third it was about {number(round(critical))} prompts. A step of {prompts:,} prompts is worth "
        f"{now:.0%} of a noiseless one. {advice}."
    )


def group_advice(history: RunHistory) -> str:
    """Advice on group_size from the last third of the split of the noise (algo/noise_split.py); "" if not logged."""
    names = ("snr/between", "snr/within", "snr/best_group_size")
    courses, size = [history.points(name)[1] for name in names], history.setting("group_size")
    if not size or any(not len(values) for values in courses):
        return ""
    between, within, best = (float(np.median(_last_third(values))) for values in courses)
    if between <= 0 or within <= 0:
        return ""
    target, times = compared_with_best(between, within, size, best)
    advice = "so group_size is about right"
    if times > 1.1:
        more = "lower" if target < size else "raise"
        other = "raise" if target < size else "lower"
        advice = f"now it is {times:.1f} times as large: {more} group_size and {other} num_prompts"
    return (
        f" Differences between prompts cause {between / (between + within):.0%} of the noise. At equal samples it is "
        f"least with group_size {target}, {advice}."
    )


def _order(history: RunHistory, names: list[str]) -> str:
    """Means over the last third, smallest first: " Over the last third: optimal 0.93, opo 0.95, ..."."""
    logged = {_short(name): history.points(name)[1] for name in names}
    means = {name: float(_last_third(values).mean()) for name, values in logged.items() if len(values)}
    if not means:
        return ""
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in sorted(means.items(), key=lambda item: item[1]))
    return f" Over the last third: {listed}."


def _last_third(values: Array) -> Array:
    return values[-(len(values) // 3 + 1) :]


def _short(name: str) -> str:
    """ "baseline/opo/variance_ratio" -> "opo"."""
    return name.removeprefix("baseline/").removesuffix(RATIO)
