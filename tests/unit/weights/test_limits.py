"""Mixtures of experts that cannot be pushed or read back are refused before anything is started.

Does not cover a mixture in a GPU engine.
"""

from typing import Any

import pytest

from oblr_megatron.config import Config, parse_config
from oblr_megatron.errors import UserError
from oblr_megatron.weights.limits import check_pushable
from tests.tiny import tiny_config, tiny_moe_config

MIXTURE, DENSE = tiny_moe_config().to_dict(), tiny_config().to_dict()


def config(**sections: dict[str, Any]) -> Config:
    return parse_config({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}} | sections)


def test_a_cpu_engine_takes_no_mixture() -> None:
    with pytest.raises(
        UserError, match=r"cannot be sent a mixture .* \[m\]; run it on GPUs, or train on saved samples"
    ):
        check_pushable(MIXTURE, config(), on_gpu=False)
    check_pushable(MIXTURE, config(), on_gpu=True)
    check_pushable(MIXTURE, config(rollout={"replay": "saved"}), on_gpu=False)
    check_pushable(DENSE, config(weights={"verify": True}), on_gpu=False)


def test_a_mixtures_experts_are_not_read_back() -> None:
    with pytest.raises(UserError, match=r"weights\.verify cannot read a mixture's experts back"):
        check_pushable(MIXTURE, config(weights={"verify": True}), on_gpu=True)
