"""Charts of a study: valid files, colours by role.

Not covered: how the charts look.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np

from studies.curve_plots import INK, PEER, draw_curves, write_charts
from studies.results import Key, Result
from studies.summary import ArmSummary, TaskSummary
from studies.sweep import Cell


def task_of(num_arms: int, spread: float = 0.0) -> TaskSummary:
    """Curves that end `spread` apart. With 0 all names have the same preferred place."""
    steps = np.arange(0.0, 11.0)
    arms = []
    for place in range(num_arms):
        name = f"arm_{place}"
        runs = [
            Result(
                Key("sums", name, Cell(8, 8, 1e-3), seed),
                steps,
                0.2 + (0.05 + spread * place) * steps / 10 + 0.01 * seed,
                steps,
                10,
                steps,
                steps,
                {},
            )
            for seed in range(3)
        ]
        cell, swept = Cell(8, 8, 1e-3), {Cell(8, 8, 1e-3): runs, Cell(8, 8, 1e-2): runs[:1], Cell(32, 2, 1e-3): runs}
        arms.append(ArmSummary(name, "toy", place % 2 == 1, False, cell, False, runs, swept))
    return TaskSummary("sums", arms, arms[0], 0.22, arms[1])


def test_every_task_gets_its_files(tmp_path: Path) -> None:
    """And with the same runs the same ones."""
    paths = write_charts([task_of(2)], tmp_path)
    assert {path.name for path in paths} == {f"{n}.{k}" for n in ("curves_sums", "savings") for k in ("svg", "png")}
    for path in paths:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            pixels = plt.imread(path)
            assert pixels[..., :3].min() < 0.3 and pixels.shape[1] > 1000
    before = [path.read_bytes() for path in paths]
    write_charts([task_of(2)], tmp_path)
    assert [path.read_bytes() for path in paths] == before


def test_every_arm_has_a_panel() -> None:
    figure = draw_curves(task_of(4))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title("left") for axes in shown] == [f"arm_{place}" for place in range(4)]
    thick = [[line.get_color() for line in axes.lines if line.get_linewidth() > 1.5] for axes in shown]
    assert thick[0] == [INK] and thick[1] == [PEER] and all(len(colours) == 1 for colours in thick)
    assert all(any(line.get_color() == INK for line in axes.lines) for axes in shown)  # every panel shows the reference
    plt.close(figure)
