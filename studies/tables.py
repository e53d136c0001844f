"""Write summary.md: a study of curves as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oblr_megatron.formatting import MISSING
from studies.plan import Plan
from studies.statistics import Difference, Interval, bootstrap_interval, t_interval
from studies.summary import ArmSummary, TaskSummary, area, drop, environment, final, final_greedy


def document(plan: Plan, tasks: Sequence[TaskSummary]) -> str:
    """The contents of summary.md."""
    seeds, samples = len(plan.seeds), plan.num_steps * plan.num_prompts * plan.group_size
    where = environment()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    rates = ", ".join(map(str, plan.sweep_seeds))
    head = [
        "# Learning curves",
        "",
        f"{samples:,} samples per run: {plan.num_steps} steps of {plan.num_prompts} x {plan.group_size} responses;",
        f'{seeds} seeds, skill "{plan.skill}"; rates chosen by the mean area over the sweep\'s seeds {rates}.',
        f"{where['date']}, {where['machine']}; {versions}.",
        "",
        "Accuracy: held-out questions, mean over sampled responses, between 0 and 1. *area*: mean height of the curve.",
        "*drop*: largest fall below the earlier maximum. Brackets: 95% intervals over seeds, by Student's t (*boot*:",
        "percentile bootstrap). Differences are paired by seed; p is two-sided, from sign flips",
        f"({seeds} pairs: {2 / 2**seeds:.2g} or more). Neither is corrected for multiple comparisons.",
        "",
    ]
    return "\n".join(head) + overview(tasks) + "".join(section(task) for task in tasks)


def overview(tasks: Sequence[TaskSummary]) -> str:
    """The reference and the best peer of each task: area, worst seed, largest drop."""
    header = ["task", "arm", "area", "worst seed", "largest drop", "best peer", "area", "worst seed", "largest drop"]
    rows = [
        [task.task, *_stability(task.reference), *_stability(peer), *_against(task.reference, peer)[:2]]
        for task in tasks
        if (peer := task.best_peer) is not None and peer is not task.reference and task.reference.runs
    ]
    return "\n" + table([*header, "difference of area", "p"], rows) if rows else ""


def _stability(arm: ArmSummary) -> list[str]:
    areas = arm.of(area)
    return [arm.arm, *map(number, (float(areas.mean()), float(areas.min()), float(arm.of(drop).max())))]


def section(task: TaskSummary) -> str:
    """One task: level and stability, paired differences, sweep."""
    peer = task.best_peer.arm if task.best_peer else MISSING
    parts = [f"\n## {task.task}\n\nReference: {task.reference.arm}. Best peer by mean area: {peer}.\n"]
    if task.seen:
        parts += [levels(task), differences(task)]
    return "\n".join([*parts, sweeps(task)])


def levels(task: TaskSummary) -> str:
    """Level and stability of every arm, sorted by area."""
    header = [
        "arm",
        "rate",
        "seeds",
        "area",
        "boot",
        "final",
        "final, greedy",
        "worst seed: area",
        "final",
        "drop: mean",
        "largest",
    ]
    rows = []
    for arm in sorted(task.seen, key=lambda arm: -float(arm.of(area).mean())):
        areas, finals, drops = arm.of(area), arm.of(final), arm.of(drop)
        boot = bootstrap_interval(areas)
        rows.append(
            [
                arm.arm + (" (peer)" if arm.peer else ""),
                f"{arm.lr:g}" + (" (edge)" if arm.on_edge else ""),
                str(len(arm.runs)),
                level(t_interval(areas)),
                ends(boot),
                level(t_interval(finals)),
                f"{arm.of(final_greedy).mean():.3f}",
                f"{areas.min():.3f}",
                f"{finals.min():.3f}",
                f"{drops.mean():.3f}",
                f"{drops.max():.3f}",
            ]
        )
    return table(header, rows)


def differences(task: TaskSummary) -> str:
    """Every arm minus the reference, and minus the best peer."""
    others = [other for other in (task.reference, task.best_peer) if other is not None and other.runs]
    header = [
        "arm",
        *(name for other in others for name in (f"area - {other.arm}'s", "p", f"final - {other.arm}'s", "p")),
    ]
    rows = [[arm.arm, *(cell for other in others for cell in _against(arm, other))] for arm in task.seen]
    return table(header, rows) if others else ""


def _against(arm: ArmSummary, other: ArmSummary) -> list[str]:
    if arm is other:
        return [MISSING] * 4
    both = [arm.against(other, metric) for metric in (area, final)]
    return [cell for difference in both for cell in (signed(difference), probability(difference.p))]


def sweeps(task: TaskSummary) -> str:
    """Mean area of every rate tried; the chosen rate is bold."""
    rates = sorted({rate for arm in task.arms for rate in arm.sweep})
    if not rates:
        return ""
    rows = [[arm.arm, *(_swept(arm, rate) for rate in rates)] for arm in task.arms if arm.sweep]
    return "Sweep: mean area by learning rate.\n\n" + table(["arm", *(f"{rate:g}" for rate in rates)], rows)


def _swept(arm: ArmSummary, rate: float) -> str:
    if rate not in arm.sweep:
        return ""
    runs = arm.sweep[rate]
    text = number(sum(map(area, runs)) / len(runs)) if runs else "failed"
    return f"**{text}**" if rate == arm.lr else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def level(interval: Interval) -> str:
    """Example: "0.612 [0.601, 0.623]"."""
    return f"{interval.mean:.3f} {ends(interval)}".rstrip()


def ends(interval: Interval) -> str:
    """Example: "[0.601, 0.623]"; empty without an interval."""
    return "" if math.isnan(interval.low) else f"[{interval.low:.3f}, {interval.high:.3f}]"


def signed(difference: Difference) -> str:
    """Example: "+0.012 [-0.003, +0.027]"."""
    interval = difference.interval
    if math.isnan(interval.mean):
        return MISSING
    inside = "" if math.isnan(interval.low) else f" [{interval.low:+.3f}, {interval.high:+.3f}]"
    return f"{interval.mean:+.3f}{inside}"


def number(value: float) -> str:
    """Three decimals, or a dash."""
    return MISSING if math.isnan(value) else f"{value:.3f}"


def probability(value: float) -> str:
    """Three digits, or a dash."""
    return MISSING if math.isnan(value) else f"{value:.3g}"
