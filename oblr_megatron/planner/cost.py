"""The predicted cost of a whole step. Imports no torch.

found = predict(Setting(hf_config, config, world_size=64, machine=Machine(device_named("h100"))))
found.seconds, found.phases["gradient"].seconds, found.phases["gradient"].bound_by
"""

from __future__ import annotations

from oblr_megatron.planner.sampling_cost import push_phase, rollout_phase
from oblr_megatron.planner.setting import Prediction, Setting, prediction_of
from oblr_megatron.planner.training_cost import training_phases


def predict(setting: Setting) -> Prediction:
    """Predict a step's cost; `checks.layout.check_layout` must have accepted the layout."""
    phases = {"rollout": rollout_phase(setting), **training_phases(setting), "push": push_phase(setting)}
    return prediction_of(setting, phases)
