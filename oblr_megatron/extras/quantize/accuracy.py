"""Accuracy of greedy answers before and after quantisation, scored by the run's reward.

On a GPU with FP8, vLLM answers from the two directories. Elsewhere transformers answers with simulated FP8: weights and
activations are rounded to FP8 and multiplied in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from oblr_megatron.checks.lengths import longest_evaluated
from oblr_megatron.errors import RunError
from oblr_megatron.evaluation.accuracy import is_right, wilson_interval
from oblr_megatron.evaluation.answers import evaluate
from oblr_megatron.evaluation.setup import opened
from oblr_megatron.rewards.base import cause_of
from oblr_megatron.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oblr_megatron.config import Config
    from oblr_megatron.rewards.base import Reward

FP8_CAPABILITY = (8, 9)
BATCH_ROWS = 16

Sets = Mapping[str, Sequence[Prompt]]
"""Prompts by the name of their set."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy on one set.

    Example: Accuracy(prompts=200, right=151, accuracy=0.755, low=0.691, high=0.809, unscored=0)
    """

    prompts: int
    right: int
    accuracy: float
    low: float  # 95% interval (Wilson)
    high: float
    unscored: int = 0  # responses that could not be scored; they count as wrong


def count_right(rewards: Sequence[float], unscored: int = 0) -> Accuracy:
    """Accuracy from [Q] rewards on greedy responses, of which `unscored` only say that the reward failed.

    Example: count_right([1.0, 0.0]) = Accuracy(prompts=2, right=1, accuracy=0.5, low=0.095, high=0.905)
    """
    right = sum(map(is_right, rewards))
    return Accuracy(len(rewards), right, right / len(rewards), *wilson_interval(right, len(rewards)), unscored)


def with_vllm(directory: Path, sets: Sets, config: Config) -> dict[str, Accuracy]:
    """Accuracy of a directory, quantised or not, answered by vLLM in bf16 in a separate engine process."""
    rollout = config.rollout.model_copy(update={"dtype": "bfloat16", "quantization": "none"})
    model = config.model.model_copy(update={"path": directory})
    greedy = config.evaluate.model_copy(update={"samples_per_prompt": 0})
    config = config.model_copy(update={"rollout": rollout, "model": model, "evaluate": greedy})
    accuracies = {}
    with opened(config) as (engines, reward):
        for name, prompts in sets.items():
            grades = evaluate(name, engines, prompts, reward, config, strict=True)
            accuracies[name] = count_right([grade.verdict for grade in grades.greedy], grades.unscored)
    return accuracies


def with_transformers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sets: Sets, reward: Reward, config: Config
) -> dict[str, Accuracy]:
    """Accuracy of a transformers model in its current state.

    Raises:
        RunError: the reward failed for every response to a set.
    """
    accuracies = {}
    for name, prompts in sets.items():
        samples = transformers_greedy(model, tokenizer, prompts, longest_evaluated(config))
        result = reward.score(prompts, samples)
        if len(result.unscored) == len(samples):
            raise RunError(f"set {name!r}: the reward failed for every response: {cause_of([result], config.reward)}")
        accuracies[name] = count_right(result.main_rewards, len(result.unscored))
    return accuracies


def vllm_computes_fp8() -> bool:
    """Whether this machine has a GPU with FP8 matrix products."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY


@torch.no_grad()
def transformers_greedy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_tokens: int
) -> list[Sample]:
    """A greedy response to each prompt, without log-probs.

    The model's generation config is set aside, because `generate` would take from it what a call leaves open. With its
    repetition_penalty or suppress_tokens, greedy answers would not be the most likely tokens.
    """
    from transformers import GenerationConfig

    ends = _end_tokens(model, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=ends, pad_token_id=padding, use_cache=True
    )
    own, model.generation_config = model.generation_config, GenerationConfig()
    samples: list[Sample] = []
    try:
        for first in range(0, len(prompts), BATCH_ROWS):
            rows = [list(prompt.token_ids) for prompt in prompts[first : first + BATCH_ROWS]]
            length = max(map(len, rows))
            # Left padding aligns the starts of all responses. Scales are fixed, so padding has no effect on them.
            ids = torch.tensor([[padding] * (length - len(row)) + row for row in rows], device=model.device)
            mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=model.device)
            output = cast(Any, model).generate(input_ids=ids, attention_mask=mask, generation_config=settings)
            for group, answer in enumerate(output[:, length:].tolist(), first):
                samples.append(_sample(group, prompts[group], answer, ends, tokenizer))
    finally:
        model.generation_config = own
    return samples


def _sample(
    group: int, prompt: Prompt, answer: list[int], ends: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Sample:
    """The answer cut after its first end token; the rest is padding."""
    stop = next((position for position, token in enumerate(answer) if token in ends), None)
    response = tuple(answer if stop is None else answer[: stop + 1])
    text = tokenizer.decode(list(response), skip_special_tokens=True)
    return Sample(group, prompt.token_ids, response, (), str(text), "length" if stop is None else "stop", 0)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """End tokens as in vLLM: those of the generation config and of the tokenizer."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    tokens = [named] if isinstance(named, int) else list(named or [])
    return list(dict.fromkeys([*tokens, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])]))
