"""Runs of two ranks: slow ranks differ from waiting ranks, every rank's seconds and memory are kept, profiles are made.

The slow rank computes alone before the gradient of every step. Not covered: GPUs, where a rank's pace is measured with
a fixed product; nsys.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oblr_megatron import opening
from oblr_megatron.config import Config
from oblr_megatron.gradient.loss_fn import PassMetrics
from tests.distributed.launch import run_ranks
from tests.distributed.replayed import STEPS, config_of, make_inputs, train, train_here

EXTRA_S = 0.3  # that rank 1 computes for itself in a step
TRAINED = ("gradient", "optimizer")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_with_a_slow_rank(config: Config) -> tuple[int, str]:
    """A run in which rank 1 has more to compute than rank 0, on devices with a peak."""
    original = PassMetrics.stats

    def burdened(self: PassMetrics, *args: Any, **kwargs: Any) -> Any:
        end = time.thread_time() + EXTRA_S
        while dist.get_rank() == 1 and time.thread_time() < end:
            pass
        return original(self, *args, **kwargs)

    PassMetrics.stats = burdened  # type: ignore[method-assign]
    opening.peak_flops = lambda *_: 1e11  # a CPU has none
    return train_here(config)


@pytest.fixture(scope="module")
def lopsided(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with a slow rank 1; rank 0 is profiled in its steps 2 and 3."""
    run_dir = tmp_path_factory.mktemp("lopsided") / "run"
    profile = ("log.profile=torch", "log.profile_step_start=2", "log.profile_step_end=4")
    config = config_of(inputs, run_dir, "checkpoint.export_hf=false", *profile)
    outcomes = run_ranks(train_with_a_slow_rank, 2, config)
    assert [status for status, _ in outcomes] == [0, 0], outcomes[0][1]
    return run_dir


def test_the_rank_that_computes_is_told_from_the_one_that_waits(lopsided: Path) -> None:
    """Rank 1 takes EXTRA_S longer before each gradient; rank 0 waits for it and does not."""
    for line in lines(lopsided / "logs" / "ranks.jsonl")[1:]:
        own, pace = line["own_s"]["gradient"], line["pace_s"]
        assert own[1] >= EXTRA_S and pace[1] > pace[0] + EXTRA_S / 2
    found = lines(lopsided / "metrics.jsonl")[1:]
    assert {record["perf/slowest_rank"] for record in found} == {1}
    assert {record["perf/ranks/gradient/slowest"] for record in found} == {1}


def test_every_rank_s_share_of_a_step_is_kept(lopsided: Path) -> None:
    table, found = lines(lopsided / "logs" / "ranks.jsonl"), lines(lopsided / "metrics.jsonl")
    assert [line["step"] for line in table] == list(range(1, STEPS + 1)) == [record["step"] for record in found]
    for line, record in zip(table, found, strict=True):
        for phase in TRAINED:
            own = line["own_s"][phase]
            assert record[f"perf/ranks/{phase}/max_s"] == pytest.approx(max(own), rel=1e-3)
            assert record[f"perf/ranks/{phase}/min_s"] == pytest.approx(min(own), rel=1e-3)
        assert line["wall_s"]["gradient"][0] == pytest.approx(record["timing_s/gradient"], rel=1e-3)
        peaks = line["memory_bytes"]["peak"]
        assert len(peaks) == 2 and min(peaks) >= max(1, min(line["memory_bytes"]["allocated"]))
        assert record["perf/peak_memory_bytes"] == max(peaks)
        assert peaks[int(record["perf/peak_memory_rank"])] == max(peaks)
        pace = line["pace_s"]
        assert record["perf/slowest_rank_ratio"] == pytest.approx(max(pace) / (sum(pace) / 2), rel=1e-3)


def test_devices_are_used_to_a_share_of_their_peak(lopsided: Path) -> None:
    for record in lines(lopsided / "metrics.jsonl"):
        assert 0 < record["perf/mfu/actor"] < 1
        assert record["perf/mfu/with_norms"] == record["perf/mfu/actor"], "bookkeep takes no pass for norms"
        assert record["perf/throughput"] > record["perf/tokens_per_s"] / 2, "prompts count as well"


def test_a_profile_names_the_phases_of_its_steps_on_its_rank_alone(lopsided: Path) -> None:
    assert [path.name for path in (lopsided / "profile").iterdir()] == ["rank_0.json.gz"]
    with gzip.open(lopsided / "profile" / "rank_0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for phase in ("rollout", "reward", "gradient", "optimizer", "push"):
        assert ranges.count(f"oblr/{phase}") >= 2, f"{phase} of two steps"
    assert ranges.count("oblr/optimizer") == 2
    assert any(event["name"] == "aten::mm" for event in events), "what the phases are made of"


def test_a_resumed_run_goes_on_with_its_table_and_its_profile(inputs: Path, tmp_path: Path) -> None:
    """From the checkpoint of step 4, in the middle of the steps to profile."""
    run_dir = tmp_path / "run"
    profile = ("log.profile=torch", "log.profile_step_start=3", "log.profile_step_end=6")
    train(config_of(inputs, run_dir, "num_steps=4"))
    assert not (run_dir / "profile").exists()
    with (run_dir / "logs" / "ranks.jsonl").open("a") as file:
        file.write('{"step": 5, "wall_s"')  # it was killed while it wrote
    said = train(config_of(inputs, run_dir, "checkpoint.resume=newest", *profile))
    assert said.count(f"profile: {run_dir}/profile/rank_0.json.gz; open it at") == 1
    assert [line["step"] for line in lines(run_dir / "logs" / "ranks.jsonl")] == list(range(1, STEPS + 1))
    with gzip.open(run_dir / "profile" / "rank_0.json.gz", "rt") as file:
        assert file.read().count('"oblr/optimizer"') == 2, "steps 4 and 5"
    assert "perf/slowest_rank" not in lines(run_dir / "metrics.jsonl")[-1], "there is one rank"
