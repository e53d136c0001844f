"""The bytes of all tensors alive during a training step: the oracle of the memory estimate."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig

from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.fold_sums import FoldSums
from oblr_megatron.gradient.one_pass import AdvantageFn
from oblr_megatron.gradient.step import TrainingGradient
from oblr_megatron.model.momentum import momentum_of
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.reference import Reference
from oblr_megatron.types import Sample
from studies.live_bytes import LiveBytes, biases_uncounted

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


class WatchedSteps:
    """A model, its gradient and its optimizer on this rank; every tensor that they make is counted."""

    def __init__(self, hf_config: PreTrainedConfig, config: Config, parallel: Parallel) -> None:
        self.live, self._group = ExactBytes(), config.group_size
        self._streams = config.rollout.overlap == "stream"
        self._samples, self._coefficients = _samples(hf_config.vocab_size, config)
        with biases_uncounted(), self.live:
            self.policy = build_policy(hf_config, config.model, parallel, config.parallel)
            for name, parameter in self.policy.named_parameters():
                _fill(name, parameter)
            reference = Reference(self.policy) if config.algo.kl_coefficient else None
            self.gradients = TrainingGradient(self.policy, config, reference)
            self._optimizer = PolicyOptimizer(self.policy, config.optimizer)
            self._momentum = momentum_of(self.policy, config)
        self.sums: FoldSums | None = None  # of the last step, kept as in the loop

    def take(self, lr: float = 1e-6) -> None:
        """One step; afterwards `live.peak` belongs to its fullest moment."""
        active = torch.ones(len(self._coefficients), dtype=torch.bool)
        self.live.peak = self.live.now
        with biases_uncounted(), self.live:
            sums = self.sums = self.gradients.begin(whole=not self._streams)
            for prompts in [[n] for n in range(len(active))] if self._streams else [range(len(active))]:
                chosen = slice(prompts[0], prompts[-1] + 1)
                self.gradients.add(sums, prompts, *self._part(chosen), active[chosen])
            stats = self.gradients.finish(sums)
            if self._momentum is not None:
                self._momentum.take(stats.sq_norm)
            self._optimizer.clip(stats.sq_norm)
            self._optimizer.step(lr)
            self._optimizer.offload()

    def _part(self, prompts: slice) -> tuple[list[Sample], AdvantageFn]:
        """The samples of some prompts, and their coefficients whatever their norms are."""
        coefficients = self._coefficients[prompts]
        first, last, _ = prompts.indices(len(self._coefficients))
        return self._samples[first * self._group : last * self._group], lambda chosen, _: coefficients[list(chosen)]


def peak_of_step(hf_config: PreTrainedConfig, config: Config, parallel: Parallel) -> int:
    """Bytes alive on this rank at the fullest moment of its second step, when the optimizer has its state."""
    steps = WatchedSteps(hf_config, config, parallel)
    steps.take()
    steps.take()
    return steps.live.peak


def _fill(name: str, parameter: torch.nn.Parameter) -> None:
    """Values depend on the name alone: copies on several ranks are equal, and routers choose the same experts."""
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
