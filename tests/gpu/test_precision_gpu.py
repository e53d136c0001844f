"""Transformer Engine's layers and FP8 on one GPU.

Logits of the two kinds of layers are compared in bf16, a step in FP8 with the same step in bf16. Each recipe that this
GPU offers runs on lengths that need padding. Passed on an H200 on 2026-11-27, without mxfp8.

Not covered: several GPUs (sequence parallelism's gathers, context parallelism's attention), experts, speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig

from oblr_megatron.checks.machine import RECIPES
from oblr_megatron.data.packing import microbatches
from oblr_megatron.model.policy import Policy
from oblr_megatron.model.precision import this_machine
from oblr_megatron.model.step import run_schedule
from oblr_megatron.preflight import doctor
from oblr_megatron.types import MicroBatch
from tests.gpu.test_gradnorm_gpu import config_of, load, make_samples, needs_te, parallel, path, step_norms

__all__ = ["parallel", "path"]  # fixtures
OF_LOGITS = 3e-2  # of the largest logit: each kind of layers is up to 1.1e-2 from fp32, rounded at other places
OF_FP8 = 0.2  # of a gradient norm's square: e4m3 rounds each factor to 1/16, over the sums of two layers

pytestmark = needs_te


def logits(policy: Policy, batches: list[MicroBatch]) -> Tensor:
    """[tokens that count, V], of all microbatches."""
    found: list[Tensor] = []

    def keep(output: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        found.append(policy.head.logits(output.detach()[batch.mask]).float())
        return output.float().sum() * 0.0, {}

    run_schedule(policy, batches, keep)
    policy.zero_grad()
    return torch.cat(found)


def batches_of(policy: Policy, packing: str) -> list[MicroBatch]:
    options = config_of(Path("unused"), "bfloat16", "two_pass").parallel.model_copy(update={"packing": packing})
    return microbatches(make_samples(), range(4), options, policy.padding)


@pytest.mark.parametrize("packing", ["rows", "packed"])
def test_both_kinds_of_layers_have_the_same_logits(
    path: Path, parallel: Any, packing: str, record_property: Any
) -> None:
    found = {}
    for kind in ("local", "transformer_engine"):
        policy = load(path, parallel, config_of(path, "bfloat16", "two_pass", transformer_impl=kind))
        found[kind] = logits(policy, batches_of(policy, packing))
    error = (found["local"] - found["transformer_engine"]).abs().max() / found["local"].abs().max()
    record_property("relative_error", float(error))
    assert error <= OF_LOGITS


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_step_in_fp8_is_near_that_in_bf16(path: Path, parallel: Any, recipe: str, record_property: Any) -> None:
    """In mode `stash`, which every recipe allows; no length is a multiple of a block."""
    missing = RECIPES[recipe].missing(this_machine())
    if missing is not None:
        pytest.skip(f"needs {missing}")
    plain = config_of(path, "bfloat16", "stash")
    wanted = step_norms(load(path, parallel, plain), plain)
    config = config_of(path, "bfloat16", "stash", fp8="hybrid", fp8_recipe=recipe)
    policy = load(path, parallel, config)
    assert policy.transformer_config.fp8 == "hybrid" and policy.padding.row % 16 == 0
    found = step_norms(policy, config)
    error = ((found - wanted).abs() / wanted).max()
    record_property("relative_difference_to_bf16", float(error))
    print(f"{recipe}: norms differ by at most {error:.1e} from bf16's")
    assert found.isfinite().all() and error <= OF_FP8
    assert not torch.equal(found, wanted), "the products were in FP8"


@pytest.mark.parametrize("packing", ["rows", "packed"])
def test_what_is_padded_for_fp8_is_taken(path: Path, parallel: Any, packing: str) -> None:
    """Lengths that nothing divides; log-probs of the tokens stay near bf16's."""
    if RECIPES["tensorwise"].missing(this_machine()) is not None:
        pytest.skip("needs a GPU with FP8")
    found = {}
    for fp8 in ("none", "hybrid"):
        policy = load(path, parallel, config_of(path, "bfloat16", "two_pass", fp8=fp8))
        found[fp8] = functional.log_softmax(logits(policy, batches_of(policy, packing)), dim=-1)
    assert found["none"].shape == found["hybrid"].shape
    assert (found["none"] - found["hybrid"]).abs().mean() <= 0.05


def test_the_configuration_reaches_the_layers(path: Path, parallel: Any) -> None:
    policy = load(path, parallel, config_of(path, "bfloat16", "two_pass"))
    kinds = {type(module).__name__ for module in policy.modules[0].decoder.modules()}
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= kinds
    local = load(path, parallel, config_of(path, "bfloat16", "two_pass", transformer_impl="local"))
    assert not any(type(module).__name__.startswith("TE") for module in local.modules[0].modules())
    assert AutoConfig.from_pretrained(path).num_hidden_layers == len(local.modules[0].decoder.layers)


def test_doctor_says_so() -> None:
    report = doctor.examine()
    found = {finding.part: finding.used for finding in report.findings}
    assert found["layers"].startswith("Transformer Engine")
    assert found["optimizer"].startswith("transformer_engine")
    assert report.gpus
