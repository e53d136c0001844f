"""Write summary.md: a study of curves as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from oblr_megatron.formatting import MISSING, flatten
from studies.plan import Plan
from studies.results import COSTS
from studies.statistics import Difference, Interval, holm, t_interval
from studies.summary import ArmSummary, TaskSummary, area, drop, environment, final, final_greedy
from studies.sweep import Cell

Pair = tuple[TaskSummary, ArmSummary, ArmSummary]


def document(plan: Plan, tasks: Sequence[TaskSummary], others: Sequence[Plan] = ()) -> str:
    """The contents of summary.md; `others` are further plans, whose tasks are in the tables."""
    seeds, where = len(plan.seeds), environment()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    settings = "".join(_settings(each, tasks) for each in (plan, *others))
    head = f"""
# Learning curves

{settings}Shape (prompts x responses) and rate are chosen by the mean area over the
sweep's seeds. Written {where["date"]}, {where["machine"]}; {versions}. Runs of rows.jsonl have their own dates.

Accuracy: held-out questions, mean over sampled responses, between 0 and 1. *area*: mean height of the curve.
*drop*: largest fall below the earlier maximum. *target*: an accuracy, {plan.target_share:.0%} of the way from the
start to the best final accuracy of an arm. *samples*: training samples until the curve first reaches the target,
geometric mean over seeds. A run that never reaches it counts with its whole budget (marked >). Ratios of samples are
then lower bounds (>), upper bounds if it is a run of the reference (<), or neither if both have such runs (~).
Brackets: 95% intervals over seeds, by Student's t. Comparisons are paired by seed; p is
two-sided, from sign flips ({seeds} pairs: {2 / 2**seeds:.2g} or more). *Holm*: p corrected over the tasks of that
table. Other p values are not corrected. A best peer is chosen from the same results, in its favour. Where the
reference is ahead of it, p is the largest over all peers.
""".lstrip()
    greedy = """
The same by greedy accuracy, with the shapes and rates that were chosen by sampled accuracy. Tasks on which every arm
ends below the start are left out.
"""
    rising = [each for task in tasks if (each := task.greedy()).rises]
    lower = "\nBy sampled accuracy, with a target from the best final accuracy of a peer:\n"
    pairs = dict.fromkeys(pair for each in (plan, *others) for pair in each.pairs)
    parts = [
        overview(compared(tasks), over_peers=True),
        _titled(greedy, overview(compared(rising), over_peers=True)),
        _titled(lower, overview(compared([task.to_the_peers_target() for task in tasks]), over_peers=True)),
        *(overview(both(tasks, *pair)) for pair in pairs),
        savings(tasks),
        *map(section, tasks),
    ]
    return head + "".join(parts)


def _titled(title: str, text: str) -> str:
    return title + text if text else ""


def _settings(plan: Plan, tasks: Sequence[TaskSummary]) -> str:
    step, rates = plan.samples_per_step, ", ".join(map(str, plan.sweep_seeds))
    names = [task.task for task in tasks if task.task in plan.tasks]
    starts = [f"{name} as in {plan.recipes[name]}" for name in names if name in plan.recipes]
    own = [f"model.{key} = {value}" for key, value in flatten(plan.model).items()] if starts else []
    if len(starts) < len(names):
        starts.append(f'skill "{plan.skill}", start {plan.start_seed}')
    return f"""{", ".join(names)}: {plan.num_steps * step:,} samples per run in steps of {step} responses.
{len(plan.seeds)} seeds, sweep's seeds {rates}, {", ".join(starts + own)}.
A curve has a point every {plan.evaluate_every * step} samples, and is linear between them.
"""


def overview(rows: Sequence[Pair], *, over_peers: bool = False) -> str:
    """Two arms on each task: samples to the target, with Holm's correction over the tasks.

    With `over_peers` the second arm is the best peer, and p is that of a lead over all peers.
    """
    tests = [task.lead(ours) if over_peers else task.saving(ours, other) for task, ours, other in rows]
    header = ["task", "target", "arm", "samples", "against", "samples", "times fewer samples", "pairs", "p", "Holm"]
    cells = [
        [
            *(task.task, number(task.target), *_cost(task, ours), *_cost(task, other)),
            *(_ratio(test, task.bound(ours, other)), str(test.pairs), probability(test.p), probability(corrected)),
        ]
        for (task, ours, other), test, corrected in zip(rows, tests, holm([test.p for test in tests]), strict=True)
    ]
    return "\n" + table(header, cells) if cells else ""


def compared(tasks: Sequence[TaskSummary]) -> list[Pair]:
    """The reference and the best peer of each task where both have runs."""
    return [
        (task, task.reference, task.best_peer)
        for task in tasks
        if task.best_peer is not None and task.best_peer is not task.reference and task.reference.runs
    ]


def both(tasks: Sequence[TaskSummary], ours: str, other: str) -> list[Pair]:
    """Two arms of each task where both have runs."""
    found = [(task, task.named(ours), task.named(other)) for task in tasks]
    return [(task, first, second) for task, first, second in found if first and second]


def _cost(task: TaskSummary, arm: ArmSummary) -> list[str]:
    shape = arm.cell.shape if arm.cell else MISSING
    return [f"{arm.arm} {shape}", samples(task, arm)]


def samples(task: TaskSummary, arm: ArmSummary) -> str:
    """Example: "1,293", or ">4,120 (2 of 10 never)"."""
    missed = arm.missed(task.target)
    found = f"{arm.samples(task.target):,.0f}"
    return f">{found} ({missed} of {len(arm.runs)} never)" if missed else found


def _ratio(test: Difference, bound: str) -> str:
    """Example: "1.19 [1.11, 1.27]". A lower bound has a lower end alone, an upper bound an upper end."""
    interval = test.interval
    low = "" if bound in ("<", "~") else f"{interval.low:.2f}"
    high = "" if bound in (">", "~") else f"{interval.high:.2f}"
    known = not math.isnan(interval.low) and (low or high)
    return f"{bound}{interval.mean:.2f}" + (f" [{low}, {high}]".replace("[, ", "[to ") if known else "")


def savings(tasks: Sequence[TaskSummary]) -> str:
    """Every arm on every task: its samples to the target, relative to the reference's."""
    seen = [task for task in tasks if task.reference.runs]
    names = list(dict.fromkeys(arm.arm for task in seen for arm in task.seen))
    if not seen or len(names) < 2:
        return ""
    rows = []
    for name in names:
        arms = [next((arm for arm in task.seen if arm.arm == name), None) for task in seen]
        ratios = [
            task.saving(task.reference, arm).interval.mean if arm else math.nan
            for task, arm in zip(seen, arms, strict=True)
        ]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))  # NaN if a task has no ratio
        bounds = [task.bound(task.reference, arm) if arm else "" for task, arm in zip(seen, arms, strict=True)]
        cells = [
            MISSING if math.isnan(ratio) else f"{mark}{ratio:.2f}" for mark, ratio in zip(bounds, ratios, strict=True)
        ]
        marks = set(filter(None, bounds))
        mark = marks.pop() if len(marks) == 1 else "~" * bool(marks)
        rows.append([name, MISSING if math.isnan(mean) else f"{mark}{mean:.2f}", *cells])
    meaning = ">: some seeds never reach it, <: some of the reference, ~: some of both"
    head = f"\nSamples to the target relative to the reference's ({meaning}); mean: geometric, over all tasks.\n\n"
    return head + table(["arm", "mean", *(task.task for task in seen)], rows)


def section(task: TaskSummary) -> str:
    """One task: level and stability, paired differences, sweep."""
    peer = task.best_peer.arm if task.best_peer else MISSING
    target = f"Target: {number(task.target)}. Reference: {task.reference.arm}. Best peer: {peer}."
    parts = [f"\n## {task.task}\n\n{target}\n"]
    if task.seen:
        sampled, greedy = np.mean([(run.accuracy[0], run.greedy[0]) for arm in task.seen for run in arm.runs], axis=0)
        parts[0] += f"At the start: {number(sampled)} sampled, {number(greedy)} greedy.\n"
        parts += [levels(task), trainers(task), differences(task), diversity(task), costs(task)]
    return "\n".join([*parts, sweeps(task)])


def levels(task: TaskSummary) -> str:
    """Level and stability of every arm, sorted by area."""
    header = [
        "arm",
        "shape",
        "rate",
        "seeds",
        "samples",
        "area",
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
        rows.append(
            [
                arm.arm + (" (peer)" if arm.peer else ""),
                arm.cell.shape if arm.cell else MISSING,
                (f"{arm.cell.lr:g}" if arm.cell else MISSING) + (" (edge)" if arm.on_edge else ""),
                str(len(arm.runs)),
                samples(task, arm),
                level(t_interval(areas)),
                level(t_interval(finals)),
                f"{arm.of(final_greedy).mean():.3f}",
                f"{areas.min():.3f}",
                f"{finals.min():.3f}",
                f"{drops.mean():.3f}",
                f"{drops.max():.3f}",
            ]
        )
    return table(header, rows)


def trainers(task: TaskSummary) -> str:
    """What arms of other trainers do not share with the rest; empty without such arms."""
    names = [arm.arm for arm in task.seen if arm.backend.startswith("trl_")]
    what = (
        "TRL's trainer with its own loss, advantages and ratio clip. Of `algo` it reads `kl_coefficient` alone. "
        "Its Adam also steps when a gradient is zero. It samples and evaluates with transformers, with other random "
        "numbers."
    )
    return f"{', '.join(names)}: {what}\n" if names else ""


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


def diversity(task: TaskSummary) -> str:
    """Entropy of a token and pass@k where the accuracy first reaches the target; empty if no backend reports them.

    Backend "train" has no entropy here: its metric is that of the samples with an advantage, which differ by arm.
    """
    rows = []
    for arm in task.seen:
        reached = len(arm.runs) - arm.missed(task.target)
        solved = [run.when(task.target, run.solved) for run in arm.runs]
        entropy = [math.nan if arm.backend == "train" else run.when(task.target, run.entropy) for run in arm.runs]
        if not np.isnan(solved).all():
            rows.append([arm.arm, str(reached), *(level_of_known(values) for values in (entropy, solved))])
    header = ["arm", "seeds that reach it", "entropy there", "pass@k there"]
    return "At the target:\n\n" + table(header, rows) if rows else ""


def costs(task: TaskSummary) -> str:
    """Seconds, memory and norm of the gradient: median over steps, then over seeds; empty if all are of toy runs."""
    rows = []
    for arm in task.seen:
        step, gradient, push, memory, norm = np.median(
            [[run.costs[name] for name in COSTS] for run in arm.runs], axis=0
        )
        values = ((step, ".1f"), (gradient, ".1f"), (push, ".2f"), (memory / 1e9, ".1f"), (norm, ".2f"))
        rows.append([arm.arm, *(MISSING if math.isnan(value) else f"{value:{form}}" for value, form in values)])
    if all(arm.backend == "toy" for arm in task.seen):
        return ""
    title = (
        "Medians of a step, next to the other runs of `--jobs`. Longer gradients than `clip_grad` are cut to it.\n\n"
    )
    return title + table(["arm", "step s", "gradient s", "push s", "peak memory GB", "gradient norm"], rows)


def sweeps(task: TaskSummary) -> str:
    """Mean area of every cell tried; the chosen cell is bold."""
    rates = sorted({cell.lr for arm in task.arms for cell in arm.sweep})
    if not rates:
        return ""
    rows = [
        [arm.arm, f"{shape[0]}x{shape[1]}", *(_swept(arm, Cell(*shape, rate)) for rate in rates)]
        for arm in task.arms
        for shape in sorted({cell[:2] for cell in arm.sweep}, reverse=True)
    ]
    return "Sweep: mean area by learning rate.\n\n" + table(["arm", "shape", *(f"{rate:g}" for rate in rates)], rows)


def _swept(arm: ArmSummary, cell: Cell) -> str:
    if cell not in arm.sweep:
        return ""
    runs, seeds = arm.sweep[cell], max(map(len, arm.sweep.values()))
    text = number(sum(map(area, runs)) / len(runs)) if runs else "not finished"
    if 0 < len(runs) < seeds:  # such a cell is not chosen
        text += f" ({len(runs)} of {seeds} runs)"
    return f"**{text}**" if cell == arm.cell else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def level_of_known(values: Sequence[float]) -> str:
    """`level` of the values that are not NaN, or a dash."""
    known = np.array([value for value in values if not math.isnan(value)])
    return level(t_interval(known)) if len(known) else MISSING


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
