"""The predicted cost of a whole step, and the seconds that `rollout.overlap` hides. Imports no torch.

    cost = predict(Setting(hf_config, config, world_size=64, machine=PlannerMachine(device_named("h100"))))
    cost.seconds, cost.phases["gradient"].seconds, cost.phases["gradient"].bound_by

Overlap has engines on GPUs of their own. R is the sampling time. R_full is its part with a full batch. The rest waits
for the longest responses. T is the time of norms and gradient. s is the share of a step's tokens in one wave
(`memory.pass_plan.tokens_of_a_wave`).

    none        R + T
    stream      max(R, s R_full + (1 - s) T') + s T'     prompts are finished at an even pace until R_full; the first
                                                         wave comes after s of that, and the last one after R
    one_step    max(R, T)                                optimizer and push follow, as in all modes

T' = T (1 + (p - 1) / (4 p)) for p pipeline stages, because each wave fills and drains the pipeline. Not modelled: waves
pad their rows more than a whole batch does.
"""

from __future__ import annotations

from collections.abc import Mapping

from oblr_megatron.extras.planner.sampling_cost import LONGEST, push_phase, rollout_phase
from oblr_megatron.extras.planner.setting import Phase, Prediction, Setting
from oblr_megatron.extras.planner.training_cost import training_phases
from oblr_megatron.memory.pass_plan import MICROBATCHES_OF_A_FLUSH, Layout, tokens_of_a_wave


def predict(setting: Setting, rollout: Phase | None = None) -> Prediction:
    """Predict a step's cost.

    Args:
        setting: `checks.layout.check_layout` must have accepted its layout.
        rollout: the sampling phase, where it is known already.
    """
    phases = {"rollout": rollout or rollout_phase(setting), **training_phases(setting), "push": push_phase(setting)}
    return Prediction(setting, phases, hidden_seconds(setting, phases))


def hidden_seconds(setting: Setting, phases: Mapping[str, Phase]) -> float:
    """Seconds of the phases that run at the same time as others.

    Returns:
        The sum of rollout, norms and gradient, less the time that they take together; 0 with "none".
    """
    config, rollout = setting.config, phases["rollout"]
    trained = phases["norms"].seconds + phases["gradient"].seconds
    sampled, apart = rollout.seconds, rollout.seconds + trained
    if config.rollout.overlap == "one_step":
        return apart - max(sampled, trained)
    if config.rollout.overlap == "stream":
        replicas = Layout.of(setting.hf_config, config, setting.world_size).replicas
        share = min(1.0, tokens_of_a_wave(config, replicas) / setting.tokens)
        stages = config.parallel.pipeline_model_parallel_size
        waves = trained * (1 + (stages - 1) / (MICROBATCHES_OF_A_FLUSH * stages)) if share < 1 else trained
        full = sampled - rollout.terms.get(LONGEST, 0.0)
        return apart - max(sampled, share * full + (1 - share) * waves) - share * waves
    return 0.0
