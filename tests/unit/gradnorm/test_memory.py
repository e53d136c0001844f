"""The estimated memory of a step is that of the tensors which are alive at its fullest moment, counted one by one.

Every tensor that an operator makes is counted until its storage is freed; sizes are small but far from degenerate.
Not covered: what an allocator holds beyond the tensors (tools/bench/memory.py measures whole processes), GPUs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient import TrainingGradient
from oblr_megatron.gradnorm.memory import estimate
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.qwen3 import build_policy
from oblr_megatron.types import Sample
from tests.tiny import tiny_config

GROUP, PROMPT = 4, 4


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages made inside that are still alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        weakref.finalize(storage, self._drop, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    yield initialize(parse_config({"run_dir": ".", "model": {"path": "."}, "data": {"train": "."}}).parallel)
    shutdown()


def config_of(tokens: int, rows: int, prompts: int, gradnorm: dict[str, Any], **parallel: Any) -> Config:
    return parse_config(
        {
            "run_dir": "unused",
            "num_prompts": prompts,
            "group_size": GROUP,
            "model": {"path": "unused", "make_vocab_size_divisible_by": 1},
            "data": {"train": "unused", "max_prompt_tokens": PROMPT},
            "algo": {"baseline": "optimal", "snr": {"num_folds": prompts}},
            "rollout": {"max_response_tokens": tokens - PROMPT},
            "gradnorm": gradnorm,
            "parallel": {"micro_batch_tokens": rows * tokens} | parallel,
        }
    )


def peak_of(hf_config: Qwen3Config, config: Config, parallel: Parallel, tokens: int) -> int:
    """Of the second step, when the optimizer has its state."""
    live = LiveBytes()
    with live:
        policy = build_policy(hf_config, config.model, parallel, config.parallel)
        for name, parameter in policy.named_parameters():
            torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.02)
        optimizer, gradients = PolicyOptimizer(policy, config.optimizer), TrainingGradient(policy, config)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(hf_config.vocab_size, (config.num_prompts * GROUP, tokens), generator=generator).tolist()
    samples = [
        Sample(n // GROUP, tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), (-1.0,) * (tokens - PROMPT), "", "length", 0)
        for n, ids in enumerate(drawn)
    ]
    active = torch.ones(config.num_prompts, dtype=torch.bool)
    coefficients = torch.tensor([[-1.0, 1.0] * (GROUP // 2)] * config.num_prompts, dtype=torch.float64)
    for _ in range(2):
        live.peak = live.now
        with live:
            found = gradients(samples, lambda prompts, _: coefficients[list(prompts)], active)
            optimizer.clip(found.stats.sq_norm)
            optimizer.step(1e-6)
    return live.peak


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two_pass": ({"gradnorm": {"mode": "two_pass"}}, {}),
    "two_pass, rows, folds": ({"gradnorm": {"mode": "two_pass"}, "rows": 2, "prompts": 2}, {}),
    "bookkeep": ({"gradnorm": {"mode": "bookkeep"}}, {}),
    "bookkeep, rows": ({"gradnorm": {"mode": "bookkeep"}, "rows": 2}, {}),
    "stash": ({"gradnorm": {"mode": "stash"}}, {}),
    "stash, bf16": ({"gradnorm": {"mode": "stash", "stash_dtype": "bfloat16"}}, {}),
    "large vocabulary": ({"gradnorm": {"mode": "two_pass"}}, {"vocab_size": 2000}),
    "full recomputation": ({"gradnorm": {"mode": "two_pass"}, "recompute_granularity": "full"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_estimate_is_what_is_alive(case: str, parallel: Parallel) -> None:
    options, sizes = CASES[case]
    tokens = 100
    options = {"rows": 1, "prompts": 1} | options
    config = config_of(tokens, **options)
    defaults = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "vocab_size": 128}
    hf_config = tiny_config(**defaults | sizes, max_position_embeddings=1024)
    found = estimate(hf_config.to_dict(), config, 1, fixed_bytes=0)
    measured = peak_of(hf_config, config, parallel, tokens)
    assert found.total == pytest.approx(measured, rel=0.05), found.table()
