"""Charts of a study: valid files, names that do not overlap, colours by role.

Not covered: how the charts look.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from studies.curve_plots import INK, PEER, TOGETHER, apart, draw_curves, draw_differences, write_charts
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


@pytest.mark.parametrize("num_arms", [2, TOGETHER + 1])
def test_every_task_gets_its_files(num_arms: int, tmp_path: Path) -> None:
    """And with the same runs the same ones."""
    paths = write_charts([task_of(num_arms)], tmp_path)
    assert {path.name for path in paths} == {
        f"{n}.{k}" for n in ("curves_sums", "auc_sums", "sweep_sums", "savings") for k in ("svg", "png")
    }
    for path in paths:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            pixels = plt.imread(path)
            assert pixels[..., :3].min() < 0.3 and pixels.shape[1] > 1000
    if num_arms == 2:
        before = [path.read_bytes() for path in paths]
        write_charts([task_of(num_arms)], tmp_path)
        assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.1])
def test_names_at_the_ends_of_curves_do_not_overlap(spread: float) -> None:
    figure = draw_curves(task_of(TOGETHER, spread))
    figure.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without the leader
    assert len(boxes) == TOGETHER
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    edge = figure.get_window_extent()
    assert all(box.x1 <= edge.x1 and box.y1 <= edge.y1 and box.y0 >= edge.y0 for box in boxes)
    plt.close(figure)


def test_many_arms_get_a_panel_each() -> None:
    figure = draw_curves(task_of(TOGETHER + 1))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title("left") for axes in shown] == [f"arm_{place}" for place in range(TOGETHER + 1)]
    thick = [[line.get_color() for line in axes.lines if line.get_linewidth() > 1.5] for axes in shown]
    assert thick[0] == [INK] and thick[1] == [PEER] and all(len(colours) == 1 for colours in thick)
    assert all(any(line.get_color() == INK for line in axes.lines) for axes in shown)  # every panel shows the reference
    plt.close(figure)


def test_differences_are_sorted_and_labelled() -> None:
    figure = draw_differences(task_of(4, spread=0.1))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["arm_1", "arm_2", "arm_3"]  # from the bottom up
    assert [text.get_text() for text in figure.axes[0].texts][-1] == "+0.150   p 0.25"
    plt.close(figure)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_apart_keeps_the_gap_and_the_order(values: list[float]) -> None:
    places = apart(values, 0.05)
    assert len(places) == len(values)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(sorted(places)))
    for (one, here), (other, there) in itertools.combinations(zip(values, places, strict=True), 2):
        assert one == other or (one < other) == (here < there)
    assert np.mean(places) == pytest.approx(np.mean(values), abs=1e-9)
