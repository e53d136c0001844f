"""The tensors that are alive while a training step runs, counted one by one: the oracle of the memory estimate."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from transformers import PreTrainedConfig

from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.step import TrainingGradient
from oblr_megatron.model.momentum import momentum_of
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.qwen3 import build_policy
from oblr_megatron.model.reference import Reference
from oblr_megatron.types import Sample
from studies.live_bytes import LiveBytes, biases_uncounted

EQUAL_STEPS = 6
GROUP, PROMPT = 4, 4  # responses a prompt, tokens of a prompt


def step_config(tokens: int, *, rows: int = 1, prompts: int = 1, **sections: dict[str, Any]) -> Config:
    """Prompts of `GROUP` responses, a fold for each prompt, samples of exactly `tokens` tokens, `rows` a microbatch."""
    table: dict[str, Any] = {
        "run_dir": "unused",
        "num_prompts": prompts,
        "group_size": GROUP,
        "model": {"path": "unused", "make_vocab_size_divisible_by": 1},
        "data": {"train": "unused", "max_prompt_tokens": PROMPT},
        "algo": {"baseline": "optimal", "snr": {"num_folds": prompts}},
        "rollout": {"max_response_tokens": tokens - PROMPT},
        "parallel": {"micro_batch_tokens": rows * tokens},
        "checkpoint": {"every_steps": 0},
    }
    return parse_config(table | {name: table.get(name, {}) | fields for name, fields in sections.items()})


class WatchedSteps:
    """A model, its gradient and its optimizer on this rank, with every tensor counted that they make."""

    def __init__(self, hf_config: PreTrainedConfig, config: Config, parallel: Parallel) -> None:
        self.live = LiveBytes()
        self._samples, self._coefficients = _samples(hf_config.vocab_size, config)
        with biases_uncounted(), self.live:
            self.policy = build_policy(hf_config, config.model, parallel, config.parallel)
            for name, parameter in self.policy.named_parameters():
                _fill(name, parameter)
            reference = Reference(self.policy) if config.algo.kl_coefficient else None
            self.gradients = TrainingGradient(self.policy, config, reference)
            self._optimizer = PolicyOptimizer(self.policy, config.optimizer)
            self._momentum = momentum_of(self.policy, config)

    def take(self, lr: float = 1e-6) -> None:
        """One step; `live.peak` is then of its fullest moment."""
        active = torch.ones(len(self._coefficients), dtype=torch.bool)
        self.live.peak = self.live.now
        with biases_uncounted(), self.live:
            found = self.gradients(self._samples, lambda prompts, _: self._coefficients[list(prompts)], active)
            if self._momentum is not None:
                self._momentum.take(found.stats.sq_norm)
            self._optimizer.clip(found.stats.sq_norm)
            self._optimizer.step(lr)


def peak_of_step(hf_config: PreTrainedConfig, config: Config, parallel: Parallel) -> int:
    """Bytes alive at the fullest moment of a step, when the optimizer has its state; of this rank.

    Between ranks it is the least of several equal steps: a thread of gloo's may let go of what it sent or received a
    little after the exchange has ended, which adds up to 2% to single steps.
    """
    steps = WatchedSteps(hf_config, config, parallel)
    steps.take()
    found = []
    for _ in range(EQUAL_STEPS if parallel.world_size > 1 else 1):
        steps.take()
        found.append(steps.live.peak)
    return min(found)


def _fill(name: str, parameter: torch.nn.Parameter) -> None:
    """By name: what ranks hold copies of is equal, and routers deal the same tokens to the same experts every time."""
    if "norm" in name:
        torch.nn.init.ones_(parameter)
    else:
        torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(crc32(name.encode())))


def _samples(vocabulary: int, config: Config) -> tuple[list[Sample], torch.Tensor]:
    """The step's samples, and coefficients [Q, G] none of which is 0."""
    response = config.rollout.max_response_tokens
    generator = torch.Generator().manual_seed(0)
    shape = (config.num_prompts * config.group_size, PROMPT + response)
    samples = [
        Sample(n // config.group_size, tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), (-1.0,) * response, "", "length", 0)
        for n, ids in enumerate(torch.randint(vocabulary, shape, generator=generator).tolist())
    ]
    return samples, torch.ones(config.num_prompts, config.group_size, dtype=torch.float64)
