"""Presets and recipes for GPUs are as fast as the fastest layout that the planner knows for their GPUs, within 3%.

Not covered: the planner's predictions themselves, which no GPU has confirmed.
"""

from __future__ import annotations

import pytest

from oblr_megatron.config import load_config
from oblr_megatron.config.run import read_table
from oblr_megatron.extras.planner.constants import PlannerMachine
from oblr_megatron.extras.planner.search import search
from oblr_megatron.extras.planner.setting import Request
from oblr_megatron.observe.performance.hardware import device_named
from oblr_megatron.preflight.examine import check_run, model_of
from tools.dry_run_presets import DEVICE, PER_NODE, PRESETS, nodes_of, step_seconds

NEAR = 1.03
RECIPES = (PRESETS.parents[1] / "examples").glob("*_qwen3_*/config.toml")
FILES = {path.stem: path for path in PRESETS.glob("*.toml")} | {path.parent.name: path for path in RECIPES}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_preset_is_the_planners_best(name: str) -> None:
    preset = FILES[name]
    config, gpus = load_config(preset), nodes_of(preset) * PER_NODE
    hf_config, _ = model_of(config.model.path)
    own = step_seconds(hf_config, check_run(hf_config, config, gpus, PER_NODE, DEVICE), gpus)
    machine, mean = PlannerMachine(device_named("h100")), config.rollout.max_response_tokens // 2
    best = search(Request(str(config.model.path), hf_config, gpus, machine, mean, read_table(preset))).plans[0]
    print(f"{name}: {own:.1f} s, the planner's best {best.prediction.seconds:.1f} s ({best.name})")
    assert own <= NEAR * best.prediction.seconds
