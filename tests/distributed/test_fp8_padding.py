"""Padding to blocks of tokens, or to few lengths of rows, changes no norm, gradient or metric of a step: fp64, 1e-10.

The layers are megatron-core's own, which have no FP8; the padding of an FP8 config is applied all the same.

Not covered: Transformer Engine with padded tokens (tests/gpu); experts, which pad their own tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoConfig

from oblr_megatron.config import Config, ModelConfig, ParallelConfig
from oblr_megatron.model import policy as policy_module
from oblr_megatron.model.policy import build_policy
from oblr_megatron.padding import FP8_TOKENS, PLANNED_TOKENS, Padding, padding_of
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_gradnorm_modes import RTOL, config_of, relative_difference, step_of
from tests.tiny import make_hf_dir

PLANNED = "none"  # no FP8, but the rows of Transformer Engine's attention
CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any], str, str]]] = {  # layout, options, recipe, mode
    1: [
        ({}, {}, "tensorwise", "two_pass"),
        ({}, {"packing": "packed"}, "mxfp8", "bookkeep"),
        ({}, {}, PLANNED, "bookkeep"),
    ],
    2: [
        ({"tp": 2, "sp": True}, {"packing": "packed"}, "blockwise", "two_pass"),
        ({"cp": 2}, {"packing": "packed"}, "tensorwise", "two_pass"),
        ({"pp": 2, "vp": 2}, {}, "tensorwise", "stash"),  # with fillers of one token
    ],
}


def with_recipe(config: Config, recipe: str) -> Config:
    """FP8 in fp64, which the config checks would refuse."""
    if recipe == PLANNED:
        return config
    model = config.model.model_copy(update={"fp8": "hybrid", "fp8_recipe": recipe})
    return config.model_copy(update={"model": model})


def padded_and_not(paths: dict[bool, str], cases: list[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = []
    for sizes, options, recipe, mode in cases:
        path = paths["pp" in sizes]
        with layout(**sizes) as parallel:
            config = config_of(path, {"mode": mode}, 2, **options)
            wide = with_recipe(config, recipe)
            plain = step_of(path, parallel, config)
            with patch.object(policy_module, "padding_of", partial(_padding, planned=recipe == PLANNED)):
                policy = build_policy(AutoConfig.from_pretrained(path), wide.model, parallel, wide.parallel)
                assert policy.padding.row % (PLANNED_TOKENS if recipe == PLANNED else FP8_TOKENS[recipe]) == 0
                found.append((plain, step_of(path, parallel, wide)))
    return found


def _padding(model: ModelConfig, parallel: ParallelConfig, *, planned: bool, **_: bool) -> Padding:
    return padding_of(model, parallel, transformer_engine=planned)


@pytest.mark.parametrize("world_size", [1, 2])
def test_padding_counts_for_nothing(world_size: int, tmp_path: Path) -> None:
    paths = {deep: str(make_hf_dir(tmp_path / f"{deep}", num_hidden_layers=4 if deep else 2)) for deep in (False, True)}
    for results in run_ranks(padded_and_not, world_size, paths, CASES[world_size]):
        for case, (plain, padded) in zip(CASES[world_size], results, strict=True):
            assert relative_difference(padded["norms"], plain["norms"]) <= RTOL, case
            assert padded["tokens"] == plain["tokens"], case
            for name, value in plain["stats"].items():
                assert padded["stats"][name] == pytest.approx(value, rel=RTOL), (case, name)
            for name, gradient in plain["gradient"].items():
                assert relative_difference(padded["gradient"][name], gradient) <= RTOL, (case, name)
