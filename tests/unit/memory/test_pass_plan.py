"""How many samples the busiest replica has, and the warning if other replicas wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from oblr_megatron.config import Config, ModelConfig, ParallelConfig, parse_config
from oblr_megatron.memory.pass_plan import Layout, idle_replicas, needs_single_samples, samples_of_a_rank
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.norms.rules import classify
from oblr_megatron.norms.two_pass import rules_need_single_samples
from tests.tiny import DENSE, tiny_config_of, tiny_moe_config
from tests.unit.configs import config_with

PROMPTS, GROUP = 12, 4


def config_of(folds: int, estimator: str = "folds", **gradnorm: Any) -> Config:
    snr = {"num_folds": folds, "estimator": estimator}
    gradnorm = {"mode": "two_pass"} | gradnorm
    return config_with(num_prompts=PROMPTS, group_size=GROUP, algo={"snr": snr}, gradnorm=gradnorm)


@pytest.mark.parametrize(
    ("folds", "replicas", "sharing", "prompts_of_the_first", "share"),
    [
        (12, 2, 2, 12, "50%"),  # one prompt a fold: the second replica never has one
        (4, 4, 2, 4, "25%"),  # 3 prompts for two replicas
        (4, 2, 2, 8, "25%"),
        (2, 4, 4, 4, "25%"),  # 6 prompts for four replicas: 2, 2, 1, 1
        (6, 2, 2, 6, None),
        (4, 4, 1, 3, None),
    ],
)
def test_uneven_prompts_give_a_warning(
    folds: int, replicas: int, sharing: int, prompts_of_the_first: int, share: str | None
) -> None:
    config, layout = config_of(folds), Layout(replicas=replicas, block=sharing)
    assert samples_of_a_rank(config, layout) == prompts_of_the_first * GROUP
    line = idle_replicas(config, layout)
    if share is None:
        assert line is None
    else:
        assert line is not None and line.startswith(f"replicas idle {share} of the gradient: ")
        assert line.endswith(f"a multiple of {sharing}")


def test_the_warning_counts_what_an_update_divides() -> None:
    """3 prompts an update for 4 replicas."""
    algo = {"baseline": "rloo", "updates_per_batch": 4, "snr": {"estimator": "momentum", "num_folds": 1}}
    table = config_of(12).model_dump(mode="json") | {"gradnorm": {}, "algo": algo}
    line = idle_replicas(parse_config(table), Layout(replicas=4, block=1))
    assert line is not None and line.startswith("replicas idle 25% ")


@pytest.mark.parametrize(("replicas", "prompts", "share"), [(4, 3, None), (5, 3, "20%"), (8, 2, "25%")])
def test_without_folds_any_number_of_replicas_divides_the_batch(replicas: int, prompts: int, share: str | None) -> None:
    config, layout = config_of(12, estimator="momentum"), Layout(replicas=replicas, block=1)
    assert samples_of_a_rank(config, layout) == prompts * GROUP
    line = idle_replicas(config, layout)
    assert line is None if share is None else line is not None and line.startswith(f"replicas idle {share} ")


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "targets": ["q_proj"]}, {"rank": 2}], ids=["all", "q", "adapters"])
@pytest.mark.parametrize("hf_config", [*map(tiny_config_of, DENSE), tiny_moe_config()], ids=[*DENSE, "moe"])
def test_the_plan_knows_which_models_need_single_samples(hf_config: Any, lora: dict[str, Any]) -> None:
    """As the rules of the built model's parameters say. Not covered: models with Transformer Engine's layers."""
    config, model = ParallelConfig(), ModelConfig.model_validate({"path": "unused", "lora": lora})
    policy = build_policy(hf_config, model, initialize(config), config)
    planned = needs_single_samples(hf_config.to_dict(), model.lora, transformer_engine=False)
    shutdown()
    assert planned is rules_need_single_samples(classify(policy))
    with_engine = needs_single_samples(hf_config.to_dict(), model.lora, transformer_engine=True)
    assert with_engine is (planned or not lora), "adapters are layers of our own"
