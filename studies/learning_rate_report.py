"""Write the results of `study learning_rate`: tables per task (learning_rate.md) and a chart (.svg, .png)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oblr_megatron.formatting import MISSING, number
from studies.plotting import COLOURS, INK, save, styled
from studies.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.learning_rate import Line

MARKS = ("o", "s", "^", "D", "v")  # one per batch size

HEAD = """# The rate that Theorem 4 predicts, and the best rate

SGD. *predicted*: 1/C times shrink(N), with 1/C measured at the point. *found*: the rate with the largest mean gain of J
over batches of N prompts [95% interval over batches]. *kept*: share of that gain at each rule's rate. *local* is the
predicted rate; *shrink* uses 1/C of the first point; *constant* is the rate found for this N at the first point. A dash
means that no rate gains.
"""
HEADER = ("step", "N", "S", "tr(H)", "shrink", "1/C", "predicted", "found", "gain", "kept: local", "shrink", "constant")


def write(lines: Sequence[Line], out: Path) -> str:
    """Write the files; returns the tables."""
    text = document(lines)
    (out / "learning_rate.md").write_text(text, encoding="utf-8")
    with styled():
        save(draw(lines), out / "learning_rate")
    return text


def document(lines: Sequence[Line]) -> str:
    """All tables as Markdown."""
    parts = [HEAD]
    for task in dict.fromkeys(line.task for line in lines):
        own = [line for line in lines if line.task == task]
        parts.append(f"## {task}, {own[0].skill}\n\n" + table(HEADER, [_cells(line, kept(line, own)) for line in own]))
    return "\n".join(parts)


def kept(line: Line, lines: Sequence[Line]) -> dict[str, float]:
    """Rule -> share of the largest gain at the rule's rate: negative if the rate does harm, NaN if no rate gains.

    Args:
        line: the point and batch size.
        lines: all lines of the task, including the first point's.
    """
    first = next(each for each in lines if each.num_prompts == line.num_prompts)
    rates = {"local": line.predicted, "shrink": first.inverse_c * line.shrink, "constant": first.best}
    most = gain_at(line, line.best)
    return {rule: gain_at(line, rate) / most if most > 0 else math.nan for rule, rate in rates.items()}


def gain_at(line: Line, rate: float) -> float:
    """Mean gain at any rate: linear in log eta between measured rates, constant beyond them."""
    return float(np.interp(np.log(rate), np.log(line.rates), line.gains))


def _cells(line: Line, shares: dict[str, float]) -> list[str]:
    found = f"{number(line.best, 2)} [{number(line.low, 2)}, {number(line.high, 2)}]"
    numbers = [number(value, 2) for value in (line.signal, line.noise, line.shrink, line.inverse_c, line.predicted)]
    percent = [MISSING if math.isnan(share) else f"{share:.0%}" for share in shares.values()]
    gain = number(gain_at(line, line.best), 2)
    return [str(line.step), str(line.num_prompts), *numbers, found, gain, *percent]


def draw(lines: Sequence[Line]) -> Figure:
    """Draw found over predicted rates on equal log axes: colours are tasks, marks batch sizes, larger marks later."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.0, 5.0), layout="constrained")
    tasks, sizes, steps = ([*dict.fromkeys(values)] for values in zip(*map(_kind, lines), strict=True))
    for line in lines:
        colour, mark = COLOURS[tasks.index(line.task) % len(COLOURS)], MARKS[sizes.index(line.num_prompts) % len(MARKS)]
        axes.plot([line.predicted] * 2, [line.low, line.high], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(line.predicted, line.best, mark, color=colour, markersize=4 + 2 * steps.index(line.step))
    for task, colour in zip(tasks, COLOURS, strict=False):
        axes.plot([], [], "o", color=colour, label=task)
    for size, mark in zip(sizes, MARKS, strict=False):
        axes.plot([], [], mark, color=INK, fillstyle="none", label=f"N = {size}")
    ends = [min(line.predicted for line in lines) / 2, max(line.predicted for line in lines) * 2]
    axes.plot(ends, ends, color=INK, linewidth=0.8, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted rate: 1/C times shrink(N)")
    axes.set_ylabel("best rate, by line search")
    axes.set_title("SGD: larger marks are later on the path")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _kind(line: Line) -> tuple[str, int, int]:
    return line.task, line.num_prompts, line.step
