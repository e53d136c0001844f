"""Mixtures of experts that cannot be read back are refused before anything is started.

Does not cover a mixture in a GPU engine.
"""

from typing import Any

import pytest

from oblr_megatron.checks.pushable import check_pushable
from oblr_megatron.config import Config, parse_config
from oblr_megatron.errors import UserError
from tests.tiny import tiny_config, tiny_moe_config

MIXTURE, DENSE = tiny_moe_config().to_dict(), tiny_config().to_dict()


def config(**sections: dict[str, Any]) -> Config:
    return parse_config({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}} | sections)


def test_a_mixture_is_pushed_everywhere_and_read_back_on_a_cpu() -> None:
    check_pushable(MIXTURE, config(), on_gpu=True)
    check_pushable(MIXTURE, config(weights={"verify": True}), on_gpu=False)
    check_pushable(MIXTURE, config(weights={"verify": True}, rollout={"replay": "saved"}), on_gpu=True)
    check_pushable(DENSE, config(weights={"verify": True}), on_gpu=True)


def test_a_mixtures_experts_are_not_read_back_from_a_gpu() -> None:
    with pytest.raises(UserError, match=r"weights\.verify cannot read a mixture's experts back"):
        check_pushable(MIXTURE, config(weights={"verify": True}), on_gpu=True)
