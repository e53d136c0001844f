"""The bytes of all tensors alive during a training step: the oracle of the memory estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.momentum import momentum_of
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.reference import Reference
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import Wave
from oblr_megatron.types import Sample, Scored
from tools.live_bytes import LiveBytes, biases_uncounted

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


class ExactBytes(LiveBytes):
    """`LiveBytes` in which collectives work on uncounted copies and end before they return.

    A thread of gloo's lets go of its tensors a little after the collective has ended. Counted, they add up to 2% to
    some steps and nothing to others.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A send ends when its receiver comes, so its end cannot be waited for here; gloo has no thread for it.
        if func.namespace != "c10d" or func._schema.name.startswith(("c10d::send", "c10d::recv")):
            return super().__torch_dispatch__(func, types, args, kwargs)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            copies.append((tensor, tensor.clone()))
            return copies[-1][1]

        result = func(*tree_map_only(torch.Tensor, copy, args), **(kwargs or {}))
        *tensors, work = result if isinstance(result, tuple) else (result,)
        Work.unbox(work).wait()
        for tensor, done in copies:
            tensor.copy_(done)
        # A second wait, for a reduce-scatter of gloo's, makes views of its buffer, which would count.
        ended: torch.futures.Future[None] = torch.futures.Future()
        ended.set_result(None)
        work = _create_work_from_future(ended).boxed()
        return (*tensors, work) if tensors else work


class Ones(AdvantageRule):
    """Coefficients of 1, whatever the norms are."""

    @property
    def active(self) -> torch.Tensor:
        return torch.ones(len(self._own), dtype=torch.bool)

    def __call__(self, prompts: Sequence[int], norms_sq: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(prompts), GROUP, dtype=torch.float64)


class WatchedSteps:
    """A model, its gradient and its optimizer on this rank; every tensor that they make is counted."""

    def __init__(self, hf_config: PreTrainedConfig, config: Config, parallel: Parallel) -> None:
        self.live = ExactBytes()
        self._batches = [(batch, Ones(batch.scored, config)) for batch in _batches(hf_config.vocab_size, config)]
        with biases_uncounted(), self.live:
            self.policy = build_policy(hf_config, config.model, parallel, config.parallel)
            for name, parameter in self.policy.named_parameters():
                _fill(name, parameter)
            reference = Reference(self.policy) if config.algo.kl_coefficient else None
            self._optimizer = PolicyOptimizer(self.policy, config.optimizer)
            self.gradient = StepGradient(self.policy, config, reference, momentum_of(self.policy, config))

    def step(self, lr: float = 1e-6) -> None:
        """One step; afterwards `live.peak` belongs to its fullest moment."""
        self.live.peak = self.live.now
        with biases_uncounted(), self.live:
            gradient = self.gradient.begin(1)
            for batch, rule in self._batches:
                gradient.add(batch, rule)
            (stats,) = gradient.updates()
            self._optimizer.clip(stats.sq_norm)
            self._optimizer.step(lr)
            self._optimizer.offload()


def peak_of_step(hf_config: PreTrainedConfig, config: Config, parallel: Parallel) -> int:
    """Bytes alive on this rank at the fullest moment of its second step, when the optimizer has its state."""
    steps = WatchedSteps(hf_config, config, parallel)
    steps.step()
    steps.step()
    return steps.live.peak


def _fill(name: str, parameter: torch.nn.Parameter) -> None:
    """Values depend on the name alone: copies on several ranks are equal, and routers choose the same experts."""
    if "norm" in name:
        torch.nn.init.ones_(parameter)
    else:
        torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(crc32(name.encode())))


def _batches(vocabulary: int, config: Config) -> list[Wave]:
    """The step's samples, in one batch, or each prompt in its own."""
    response, size = config.rollout.max_response_tokens, config.group_size
    generator = torch.Generator().manual_seed(0)
    shape = (config.num_prompts * size, PROMPT + response)
    samples = [
        Sample(n // size, tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), (-1.0,) * response, "", "length", 0)
        for n, ids in enumerate(torch.randint(vocabulary, shape, generator=generator).tolist())
    ]
    step = range(config.num_prompts)
    parts = [[n] for n in step] if config.rollout.overlap == "stream" else [list(step)]
    batches = []
    for part in parts:
        own = [sample for n in part for sample in samples[n * size : (n + 1) * size]]
        scored = Scored(torch.zeros(len(part), size).double(), torch.full((len(part), size), response), 0)
        batches.append(Wave(part, Batch([], own, scored), last=part is parts[-1]))
    return batches
