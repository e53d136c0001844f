"""Summaries of runs with known curves: levels, pairs, sweeps, missing runs.

test_statistics.py covers the statistics.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oblr_megatron.errors import UserError
from oblr_megatron.formatting import MISSING
from studies.curves import write_summary
from studies.plan import Plan
from studies.results import selection_of
from studies.summary import area, drop, final, summarise
from studies.sweep import Cell
from studies.tables import compared, document, overview, probability
from tests.unit.studies.runs import key_of, write_run

RATES = (1e-3, 1e-2, 1e-1)
ARMS = ("ours", "good", "bad")


def plan_of(**changes: object) -> Plan:
    table = {
        "tasks": ["sums"],
        "seeds": 3,
        "sweep_seeds": [10, 11],
        "num_steps": 4,
        "evaluate_every": 1,
        "learning_rates": list(RATES),
        "reference": "ours",
        "arms": {"ours": {}, "good": {"peer": True}, "bad": {"peer": True}},
    }
    return Plan.model_validate(table | changes)


def curve(height: float) -> list[float]:
    """A curve with area `height`, largest drop 0.2 and final value height - 0.1."""
    return [height - 0.1, height, height + 0.1, height, height - 0.1]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A complete study. All arms choose 1e-2; `good` is 0.02 below `ours` for each seed, `bad` far below."""
    for arm, level in zip(ARMS, (0.5, 0.48, 0.3), strict=True):
        for rate, less in zip(RATES, (0.05, 0.0, 0.1), strict=True):
            for seed in (10, 11):
                write_run(tmp_path, key_of("sums", arm, rate, seed), curve(level - less))
        for seed in range(3):
            write_run(tmp_path, key_of("sums", arm, 1e-2, seed), curve(level + 0.03 * seed))
    return tmp_path


def test_levels_and_pairs(out: Path) -> None:
    (task,) = summarise(plan_of(), out)
    ours, good, bad = task.arms
    assert [arm.cell.lr for arm in task.arms] == [1e-2] * 3 and not ours.on_edge
    assert ours.of(area) == pytest.approx(np.array([0.5, 0.53, 0.56]))
    assert ours.of(final) == pytest.approx(np.array([0.4, 0.43, 0.46]))
    assert bad.of(drop) == pytest.approx(np.array([0.2] * 3))
    difference = good.against(ours, area)
    assert difference.interval.mean == pytest.approx(-0.02) and difference.pairs == 3
    assert difference.interval.high - difference.interval.low == pytest.approx(
        0, abs=1e-9
    )  # seeds shift both arms equally
    assert difference.p == 2 / 2**3
    assert task.best_peer is good


def test_rows_of_an_arm_that_left_a_task_do_not_count(out: Path) -> None:
    """They would set the target, or be the best peer."""
    plan = plan_of()
    bad = plan.arms["bad"].model_copy(update={"tasks": ("walk",)})
    (task,) = summarise(plan.model_copy(update={"arms": {**plan.arms, "bad": bad}}), out)
    assert [arm.arm for arm in task.arms] == ["ours", "good"]


def test_sweep_runs_are_not_compared(out: Path) -> None:
    (task,) = summarise(plan_of(), out)
    assert {run.key.seed for arm in task.arms for run in arm.runs} == {0, 1, 2}
    assert {run.key.seed for runs in task.arms[0].sweep.values() for run in runs} == {10, 11}


def test_only_common_seeds_are_paired(out: Path) -> None:
    (key_of("sums", "good", 1e-2, 1).run_dir(out) / "metrics.jsonl").unlink()
    (task,) = summarise(plan_of(), out)
    assert task.arms[1].against(task.reference, area).pairs == 2 and len(task.arms[1].runs) == 2


def test_a_rate_with_a_run_missing_is_not_chosen(out: Path) -> None:
    (key_of("sums", "good", 1e-2, 11).run_dir(out) / "metrics.jsonl").unlink()
    (task,) = summarise(plan_of(grid_extensions=0), out)
    assert task.arms[1].cell.lr == 1e-3 and task.arms[1].on_edge and not task.arms[1].runs
    assert task.best_peer is task.arms[2]


def test_a_best_rate_on_the_edge_is_marked(out: Path) -> None:
    for seed in (10, 11):
        write_run(out, key_of("sums", "bad", 1e-4, seed), curve(0.4))
    for seed in range(3):
        write_run(out, key_of("sums", "bad", 1e-4, seed), curve(0.4))
    plan = plan_of(learning_rates=[1e-4, 1e-3, 1e-2], grid_extensions=0)
    (task,) = summarise(plan, out)
    assert (task.arms[2].cell.lr, task.arms[2].on_edge) == (1e-4, True)
    assert "| bad (peer) | 16x8 | 0.0001 (edge) | 3 |" in document(plan, [task])


def test_the_files(out: Path) -> None:
    written = write_summary(plan_of(), out)
    names = {path.name for path in written}
    assert names == {"summary.md", "runs.csv"} | {
        f"{n}.{k}" for n in ("curves_sums", "savings") for k in ("svg", "png")
    }
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert len(rows) == 3 * (3 * 2 + 3) and sum(row["phase"] == "main" for row in rows) == 9
    assert float(rows[-1]["area"]) == pytest.approx(0.36)
    text = (out / "summary.md").read_text()
    assert "| ours | 16x8 | 0.01 | 3 | 128 | 0.530 [0.455, 0.605] |" in text
    assert "| good | -0.020 [-0.020, -0.020] | 0.25 | -0.020 [-0.020, -0.020] | 0.25 | – | – | – | – |" in text  # noqa: RUF001
    assert "| good | 16x8 | 0.430 | **0.480** | 0.380 |" in text
    assert "| sums | 0.415 | ours 16x8 | 128 | good 16x8 |" in text


def rising(slope: float, num_steps: int = 4) -> list[float]:
    return [slope * step for step in range(num_steps + 1)]


def test_samples_to_the_target(tmp_path: Path) -> None:
    """Accuracies rise linearly, so that the samples to a target are inversely proportional to the slope."""
    plan = plan_of(
        learning_rates=[1e-2], arms={"ours": {}, "good": {"peer": True}, "more": {"peer": True, "more_samples": 2}}
    )
    for seed in range(3):
        write_run(tmp_path, key_of("sums", "ours", 1e-2, seed), rising(0.2))
        write_run(tmp_path, key_of("sums", "good", 1e-2, seed), rising((0.05, 0.11, 0.15)[seed]))
        write_run(tmp_path, key_of("sums", "more", 1e-2, seed, (16, 8)), rising(0.25))
    (task,) = summarise(plan.model_copy(update={"target_share": 0.5}), tmp_path)
    assert task.target == pytest.approx(0.4) and task.best_peer is task.arms[1]  # a control sets no target
    ours, good, _ = task.arms
    assert ours.samples(task.target) == pytest.approx(2 * 128)
    assert [run.samples_to(task.target) / 128 for run in good.runs] == pytest.approx([np.inf, 0.4 / 0.11, 0.4 / 0.15])
    assert good.missed(task.target) == 1
    saving = task.saving(ours, good)
    assert saving.interval.mean == pytest.approx(
        (4 * 0.4 / 0.11 * 0.4 / 0.15) ** (1 / 3) / 2
    )  # the first counts its budget
    assert saving.p == 2 / 2**3 and saving.interval.low < saving.interval.mean < saving.interval.high
    assert (task.bound(ours, good), task.bound(good, ours), task.bound(good, good)) == (">", "<", "")
    text = document(plan, [task])
    assert f" >{saving.interval.mean:.2f} [{saving.interval.low:.2f}, ] |" in text
    assert f"| good | >{saving.interval.mean:.2f} | >{saving.interval.mean:.2f} |" in text
    assert "| sums | 0.400 | ours 16x8 | 256 | good 16x8 | >" in text and "(1 of 3 never)" in text


def test_a_pair_has_its_own_table_corrected_over_the_tasks_of_both(tmp_path: Path) -> None:
    """Ten seeds, all better: p = 2 / 2^10 on each of two tasks; a third task lacks one of the arms."""
    plan = plan_of(
        tasks=["sums", "walk", "chain"], seeds=10, learning_rates=[1e-2], pairs=[["good", "ours"], ["bad", "ours"]]
    )
    for task, arms in (("sums", ("ours", "good")), ("walk", ("ours", "good")), ("chain", ("ours",))):
        for arm in arms:
            for seed in range(10):
                slope = (0.2 if arm == "good" else 0.15) + 0.001 * seed
                write_run(tmp_path, key_of(task, arm, 1e-2, seed), rising(slope))
    text = document(plan, summarise(plan, tmp_path))
    first, _greedy, _peers, own = text.split("| task | target |")[1:]  # no table for the pair without runs
    assert [line.split(" | ")[:3] for line in own.split("\n")[2:4]] == [
        ["| sums", "0.654", "good 16x8"],
        ["| walk", "0.654", "good 16x8"],
    ]
    assert own.count("| 10 | 0.00195 | 0.00391 |") == 2 and "| ours 16x8 |" in first


def test_entropy_and_pass_at_k_are_read_where_the_target_is_reached(tmp_path: Path) -> None:
    """Between two evaluations they are linear, like the accuracy; a run that misses the target has none.

    The first step's entropy is that of the policy at the start.
    """
    plan = plan_of(learning_rates=[1e-2], arms={"ours": {}}, target_share=0.75)
    for seed, slope in enumerate((0.2, 0.16, 0.05)):
        write_run(tmp_path, key_of("sums", "ours", 1e-2, seed), rising(slope))
    (task,) = summarise(plan, tmp_path)
    assert task.target == pytest.approx(0.75 * 4 * (0.2 + 0.16 + 0.05) / 3)
    assert task.arms[0].runs[0].when(task.target, task.arms[0].runs[0].entropy) == pytest.approx(1 - task.target)
    text = document(plan, [task])
    entropy, solved = f"{1 - task.target:.3f}", f"{task.target + 0.1:.3f}"
    assert f"| ours | 2 | {entropy} [{entropy}, {entropy}] | {solved} [{solved}, {solved}] |" in text
    real = replace(task, arms=[replace(task.arms[0], backend="train")])
    assert f"| ours | 2 | {MISSING} | {solved} [{solved}, {solved}] |" in document(plan, [real])


def test_costs_are_medians_over_steps_and_seeds(out: Path) -> None:
    """A step with an evaluation takes longer and does not count. Toy runs alone have no table."""
    (toy,) = summarise(plan_of(), out)
    assert "gradient norm" not in document(plan_of(), [toy])
    for seed in range(3):
        path = key_of("sums", "ours", 1e-2, seed).run_dir(out) / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records[1:]:
            record.update({"timing_s/step": 30.0 + seed, "timing_s/gradient": 20.0, "timing_s/push": 0.25})
            record |= {"perf/peak_memory_bytes": 4e9, "grad_norm": 1.5}
        records[0]["timing_s/push"] = 25.0
        records[-1]["timing_s/step"] = 300.0
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (task,) = summarise(plan_of(), out)
    arms = [replace(arm, backend="trl_grpo" if arm.arm == "good" else "train") for arm in task.arms]
    text = document(plan_of(), [replace(task, arms=arms)])
    _, _, *rows = text[text.index("| arm | step s") : text.index("Sweep")].strip("\n").splitlines()
    assert "| ours | 31.0 | 20.0 | 0.25 | 4.0 | 1.50 |" in rows and f"| good{f' | {MISSING}' * 5} |" in rows
    assert "good: TRL's trainer with its own loss" in text


@pytest.mark.parametrize(("slope", "bound"), [(0.2, "<"), (0.05, "~")])
def test_a_reference_that_misses_the_target_bounds_ratios_from_above(tmp_path: Path, slope: float, bound: str) -> None:
    """One of three seeds of the reference misses it; the peer's all reach it, or none."""
    plan = plan_of(learning_rates=[1e-2], arms={"ours": {}, "good": {"peer": True}}, target_share=0.9)
    for seed in range(3):
        write_run(tmp_path, key_of("sums", "ours", 1e-2, seed), rising((0.05, 0.2, 0.2)[seed]))
        write_run(tmp_path, key_of("sums", "good", 1e-2, seed), rising(slope))
    (task,) = summarise(plan, tmp_path)
    (ours, good) = task.arms
    assert task.bound(ours, good) == bound
    saving = task.saving(ours, good).interval
    ratio = f"{bound}{saving.mean:.2f}"
    text = document(plan, [task])
    end = f" [to {saving.high:.2f}]" if bound == "<" else ""
    p = task.saving(ours, good).p if saving.mean < 1 else 1.0  # a lead by a ratio that may be smaller is no lead
    assert f"| {ratio}{end} | 3 | {probability(p)} |" in text and f"| good | {ratio} | {ratio} |" in text


def test_the_lead_over_the_best_peer_is_a_lead_over_every_peer(tmp_path: Path) -> None:
    """`near` is the best peer, a little behind with each seed. `far` is behind on the mean, and ahead with one seed."""
    slopes = {"ours": (0.2,) * 5, "near": (0.18, 0.181, 0.182, 0.183, 0.184), "far": (0.21, 0.15, 0.16, 0.15, 0.14)}
    plan = plan_of(seeds=5, learning_rates=[1e-2], arms={name: {"peer": name != "ours"} for name in slopes})
    for name, of_seeds in slopes.items():
        for seed, slope in enumerate(of_seeds):
            write_run(tmp_path, key_of("sums", name, 1e-2, seed), rising(slope))
    (task,) = summarise(plan.model_copy(update={"target_share": 0.5}), tmp_path)
    ours, near, far = task.arms
    assert task.best_peer is near and task.saving(ours, near).p == 2 / 2**5 < task.saving(ours, far).p
    assert task.lead(ours) == replace(task.saving(ours, near), p=task.saving(ours, far).p)
    assert task.lead(far) == task.saving(far, near), "an arm that is behind has no lead"
    for over_peers, other in ((True, far), (False, near)):  # a pair of the plan has its own p
        header, _, row, *_ = overview(compared([task]), over_peers=over_peers).strip().splitlines()
        cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
        assert cells["p"] == probability(task.saving(ours, other).p)


def test_greedy_accuracy_and_targets_of_peers_are_compared_too(tmp_path: Path) -> None:
    """Sampled accuracy rises faster for `ours`, which sets the target, and greedy accuracy for `good`."""
    plan = plan_of(learning_rates=[1e-2], arms={"ours": {}, "good": {"peer": True}})
    for seed in range(3):
        for name, slope, of_greedy in (("ours", 0.2, 0.1), ("good", 0.1, 0.2)):
            path = write_run(tmp_path, key_of("sums", name, 1e-2, seed), rising(slope)) / "metrics.jsonl"
            records = [json.loads(line) for line in path.read_text().splitlines()]
            for record in records:
                record["eval/sums/accuracy"] = 0.1 + of_greedy * record["step"]
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (task,) = summarise(plan.model_copy(update={"target_share": 0.5}), tmp_path)
    lower, greedy = task.to_the_peers_target(), task.greedy()
    assert (task.target, lower.target, greedy.target) == pytest.approx((0.4, 0.2, 0.5)) and greedy.rises
    assert task.saving(*task.arms).interval.mean == pytest.approx(2)
    assert greedy.saving(*greedy.arms).interval.mean == pytest.approx(0.5)
    text = document(plan, [task])
    assert text.index("| sums | 0.400 |") < text.index("greedy accuracy, with") < text.index("| sums | 0.500 |")
    assert text.index("from the best final accuracy of a peer") < text.index("| sums | 0.200 |")


def test_the_best_shape_is_chosen_then_its_rates_are_refined(tmp_path: Path) -> None:
    plan = plan_of(shapes=["16x8", "64x2"], arms={"ours": {}}, grid_extensions=0, grid_refinements=1)
    heights = {(16, 8): (0.3, 0.4, 0.2), (64, 2): (0.35, 0.5, 0.1)}
    for shape, levels in heights.items():
        for rate, level in zip(RATES, levels, strict=True):
            for seed in (10, 11):
                write_run(tmp_path, key_of("sums", "ours", rate, seed, shape), curve(level))
    found = selection_of(plan, tmp_path, "sums", "ours", lambda cell: False)
    assert found.best is None and len(found.cells) == 8
    for rate, level in ((3.16e-3, 0.45), (3.16e-2, 0.6)):
        for seed in (10, 11):
            write_run(tmp_path, key_of("sums", "ours", rate, seed, (64, 2)), curve(level))
    found = selection_of(plan, tmp_path, "sums", "ours", lambda cell: False)
    assert found.best == Cell(64, 2, 3.16e-2) and not found.on_edge


def test_without_the_reference_the_levels_remain(out: Path) -> None:
    written = write_summary(plan_of().only(["bad"]), out)
    assert {path.name for path in written} == {"summary.md", "runs.csv", "curves_sums.svg", "curves_sums.png"}
    assert "| bad (peer) |" in (out / "summary.md").read_text()


def test_nothing_to_summarise(tmp_path: Path) -> None:
    write_run(tmp_path, key_of("sums", "ours", 1e-2, 10), curve(0.5), cut=True)
    with pytest.raises(UserError, match=re.escape(f"[{tmp_path}]")):
        summarise(plan_of(), tmp_path)


def test_a_damaged_run_is_named(out: Path) -> None:
    path = key_of("sums", "ours", 1e-2, 0).run_dir(out) / "metrics.jsonl"
    path.write_text(path.read_text().replace("eval/sums/mean_at_k", "eval/sum/mean_at_k"))
    with pytest.raises(UserError, match="eval/sums/mean_at_k") as caught:
        summarise(plan_of(), out)
    assert str(path.parent) in str(caught.value)
