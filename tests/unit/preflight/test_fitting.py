"""`fitting`: the settings of a first config, for machines of given sizes. Oracle: the dry run's own check of memory.

tests/e2e/test_first_run.py makes a dry run of a written config on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.memory.pass_plan import longest_sample
from oblr_megatron.memory.select_mode import resolve, with_mode
from oblr_megatron.model.published import published
from oblr_megatron.preflight.device_memory import RankDevice, rank_memory
from oblr_megatron.preflight.dry_run_command import device_of
from oblr_megatron.preflight.examine import check_fits
from oblr_megatron.preflight.fitting import USED_SHARE, choices, fitting, kv_token_bytes
from tests.unit.configs import config_with

SMOLLM2 = {
    **published("Llama-3.1-8B"),
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN = published("Qwen3-0.6B")


def first_config(**changes: Any) -> Config:
    return config_with(num_prompts=32, data={"max_prompt_tokens": 256}, **changes)


def cpu(gigabytes: float) -> RankDevice:
    return RankDevice(on_gpu=False, num_bytes=int(gigabytes * 1e9), transformer_engine=False)


def gpu(gigabytes: float) -> RankDevice:
    return RankDevice(on_gpu=True, num_bytes=int(gigabytes * 1e9), transformer_engine=True)


def fits(config: Config, hf_config: Mapping[str, Any], device: RankDevice) -> bool:
    """The dry run's verdict."""
    on_gpu, te = device.on_gpu, device.transformer_engine
    choice = resolve(hf_config, config, 1, free_bytes=device.num_bytes, on_gpu=on_gpu, transformer_engine=te)
    decided = with_mode(config, choice.mode)
    try:
        check_fits(rank_memory(hf_config, decided, 1, device), decided, device)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("hf_config", "device"),
    [(SMOLLM2, cpu(12)), (SMOLLM2, cpu(14.8)), (SMOLLM2, cpu(24)), (QWEN, cpu(64)), (QWEN, gpu(80))],
    ids=["smollm2 12", "smollm2 14.8", "smollm2 24", "qwen3 64", "qwen3 gpu"],
)
def test_a_machine_gets_the_first_choice_that_leaves_room(hf_config: Mapping[str, Any], device: RankDevice) -> None:
    fit = fitting(first_config(), hf_config, device)
    assert fit is not None and device.num_bytes is not None and fits(fit.config, hf_config, device)
    assert fit.num_bytes <= USED_SHARE[device.on_gpu] * device.num_bytes
    planned = replace(device, num_bytes=int(USED_SHARE[device.on_gpu] * device.num_bytes))
    per_token = kv_token_bytes(hf_config, first_config())
    before = list(choices(first_config(), on_gpu=device.on_gpu, kv_token_bytes=per_token))
    before = before[: before.index(fit.config)]
    assert not any(fits(one, hf_config, planned) for one in before), "the first choice that fits has most to offer"


def test_less_memory_first_takes_smaller_microbatches_then_recomputation_then_shorter_responses() -> None:
    config = first_config(parallel={"micro_batch_tokens": 2000}, rollout={"max_response_tokens": 100})
    taken = [
        (one.rollout.max_response_tokens, one.parallel.recompute_granularity, one.parallel.micro_batch_tokens)
        for one in choices(config, on_gpu=False)
    ]
    assert taken == [
        *((100, again, tokens) for again in ("none", "full") for tokens in (2000, 1000, 500, 356)),
        *((64, again, tokens) for again in ("none", "full") for tokens in (2000, 1000, 500, 320)),
    ]
    assert all(longest_sample(one) <= one.parallel.micro_batch_tokens for one in choices(config, on_gpu=False))
    offloads = [(one.rollout.max_response_tokens, one.optimizer.offload) for one in choices(config, on_gpu=True)]
    assert list(dict.fromkeys(offloads)) == [(n, where) for n in (100, 64) for where in ("none", "sampling")]


def test_a_cpu_engine_has_a_cache_for_many_sequences_before_responses_get_shorter() -> None:
    """A token of Qwen3-0.6B in float32 takes 229,376 bytes: 2,340 tokens fit into the default of 0.5 GiB."""
    config = config_with(num_prompts=32, data={"max_prompt_tokens": 4096}, rollout={"max_response_tokens": 512})
    for gigabytes, sequences, gib in ((128, 32, 31.5), (64, 8, 8.0)):
        fit = fitting(config, QWEN, cpu(gigabytes))
        assert fit is not None and fit.config.rollout.max_response_tokens == 512
        assert fit.config.rollout.kv_cache_gib == gib >= sequences * 4608 * 229_376 / 2**30
    assert {one.rollout.kv_cache_gib for one in choices(config, on_gpu=True, kv_token_bytes=229_376)} == {0.5}


def test_a_gpu_keeps_its_responses_if_state_can_leave_it() -> None:
    """Weights, masters and moments of 3B parameters do not fit next to an engine."""
    device, config = gpu(85), first_config(model={"dtype": "bfloat16"}, algo={"snr": {"num_folds": 8}})
    fit = fitting(config, published("Qwen3-4B") | {"num_hidden_layers": 26}, device)
    assert fit is not None and fit.config.optimizer.offload == "sampling"
    assert fit.config.rollout.max_response_tokens == config.rollout.max_response_tokens


def test_a_small_machine_recomputes_and_a_smaller_one_gets_nothing() -> None:
    """One sample of 2,304 tokens takes 3 GB of activations without recomputation."""
    config = first_config(rollout={"max_response_tokens": 2048})
    fit = fitting(config, SMOLLM2, cpu(12))
    assert fit is not None and fit.config.parallel.recompute_granularity == "full"
    assert fit.config.rollout.max_response_tokens == 2048
    assert fitting(config, SMOLLM2, cpu(4)) is None


@pytest.mark.parametrize(
    ("dtype", "implementation", "fused"),
    [
        ("float32", "auto", False),
        ("bfloat16", "auto", True),
        ("bfloat16", "local", False),
    ],
)
def test_gpus_that_are_not_here_have_the_layers_that_the_run_will_take(
    dtype: str, implementation: str, fused: bool
) -> None:
    config = first_config(model={"dtype": dtype, "transformer_impl": implementation})
    assert device_of(config, 1, 80.0) == RankDevice(True, 80 * 10**9, fused)


def test_without_a_known_size_everything_fits() -> None:
    unknown = RankDevice(on_gpu=False, num_bytes=None, transformer_engine=False)
    fit = fitting(first_config(), SMOLLM2, unknown)
    assert fit is not None and fit.config == first_config()
