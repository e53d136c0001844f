"""What the planner says about `rollout.overlap`: formulas by hand, their limits, and the division of GPUs.

Not covered: how close a prediction is to a measured step (tools/bench/overlap.py measures a CPU).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from oblr_megatron.cli import main
from oblr_megatron.errors import UserError
from oblr_megatron.extras.planner.cost import hidden_seconds
from oblr_megatron.extras.planner.sampling_cost import push_phase, rollout_phase
from oblr_megatron.extras.planner.search import KEEP_FREE, _splits, best_split
from oblr_megatron.extras.planner.setting import Phase, Setting
from oblr_megatron.memory.engine import device_bytes_held, server_push_bytes
from tests.unit.extras.planner.settings import setting
from tests.unit.extras.planner.test_search import request


def overlapped(mode: str, *, wave_tokens: int | None = None, **parallel: Any) -> Setting:
    rollout = {"overlap": mode, "max_staleness": 1, "wave_tokens": wave_tokens, "sleep_level": 0}
    return setting(8, {"rollout": rollout}, **parallel)


def phases(full: float, tail: float, trained: float) -> dict[str, Phase]:
    terms = {"weights read": full, "longest response": tail}
    return {"rollout": Phase(terms), "norms": Phase({}), "gradient": Phase({"products": trained})}


def test_one_step_takes_the_longer_of_both() -> None:
    for trained in (3.0, 10.0, 40.0):
        hidden = hidden_seconds(overlapped("one_step"), phases(6.0, 4.0, trained))
        assert 10 + trained - hidden == pytest.approx(max(10.0, trained))


def test_a_streamed_step_by_hand() -> None:
    """A quarter of the tokens is a wave. Sampling takes 6 + 4 s."""
    asked = overlapped("stream", wave_tokens=setting(8).tokens // 4)
    for trained, whole in ((8.0, 10 + 2.0), (40.0, 1.5 + 40.0)):
        hidden = hidden_seconds(asked, phases(6.0, 4.0, trained))
        assert 10 + trained - hidden == pytest.approx(whole)


def test_waves_fill_and_drain_a_pipeline() -> None:
    few = overlapped("stream", wave_tokens=1000, pipeline_model_parallel_size=4)
    one = overlapped("stream", wave_tokens=1000)
    found = hidden_seconds(few, phases(1.0, 0.0, 40.0)) - hidden_seconds(one, phases(1.0, 0.0, 40.0))
    assert found == pytest.approx(-40 * 3 / 16)


def test_one_wave_hides_nothing_and_none_neither() -> None:
    everything = overlapped("stream", wave_tokens=10**9)
    for asked in (everything, overlapped("none")):
        assert hidden_seconds(asked, phases(6.0, 4.0, 8.0)) == pytest.approx(0)


def test_engines_of_their_own_sample_with_their_own_gpus() -> None:
    shared = setting(8)
    apart = replace(shared, engine_gpus=32)
    assert rollout_phase(apart).seconds < rollout_phase(shared).seconds
    assert rollout_phase(apart).seconds == rollout_phase(replace(shared, world_size=32)).seconds
    assert push_phase(apart).terms["network"] > 0 == push_phase(shared).terms["network"]


def test_the_best_division_uses_all_gpus_and_every_plan_fits() -> None:
    asked = request("Qwen3-0.6B", gpus=4, prompts=24)
    plans = {}
    for mode in ("stream", "one_step"):
        found, used = best_split(asked, mode)
        assert used.gpus + used.engine_gpus == 4 and used.engine_gpus > 0
        for plan in found.plans:
            assert plan.sections["rollout"]["overlap"] == mode and plan.prediction.hidden > 0
            buckets = server_push_bytes(used.hf_config, plan.config)
            assert plan.training_bytes == plan.memory.total + buckets <= used.machine.device.memory_bytes - KEEP_FREE
            servers = plan.config.rollout.model_copy(update={"servers": ("http://a:1",)})
            run = plan.config.model_copy(update={"rollout": servers})
            assert device_bytes_held(used.hf_config, run, on_gpu=True) == KEEP_FREE + buckets, "as a dry run counts"
        plans[mode] = found.plans[0].prediction
        parts = sum(phase.seconds for phase in plans[mode].phases.values())
        assert plans[mode].seconds == pytest.approx(parts - plans[mode].hidden)
    assert plans["one_step"].seconds <= plans["stream"].seconds * 1.001, "the longer half is a lower bound"


@pytest.mark.parametrize(
    ("gpus", "engines"),
    [(2, [1]), (8, [1, 2, 3, 4, 5, 6, 7]), (9, [1, 2, 3, 4, 5, 6, 7]), (12, [1, 3, 4, 6, 7, 9, 10]), (16, [8])],
)
def test_whole_nodes_are_divided_where_there_are_two(gpus: int, engines: list[int]) -> None:
    splits = list(_splits(request("Qwen3-0.6B", gpus=gpus), "stream"))
    assert [(split.gpus, split.engine_gpus) for split in splits] == [(gpus - some, some) for some in engines]


def test_a_single_gpu_cannot_be_divided() -> None:
    with pytest.raises(UserError, match="one GPU cannot train and sample"):
        best_split(request("Qwen3-0.6B", gpus=1), "stream")


def test_the_command_names_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "--model", "Qwen3-0.6B", "--gpus", "2", "--sequence-length", "2048", "--prompts", "16"]
    assert main([*ask, "--overlap", "stream", "--top", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["gpus"], record["engine_gpus"]) == (1, 1)
    assert record["plans"][0]["hidden_s"] > 0
    assert main([*ask, "--overlap", "stream", "--top", "1"]) == 0
    assert "engines on 1 more" in capsys.readouterr().out
