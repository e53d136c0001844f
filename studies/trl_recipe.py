"""A recipe in TRL: the prompts, order, reward and evaluation of a training run, with transformers' `generate`.

Weights are fp32. If the recipe's model is bf16, TRL computes in bf16 by autocast, as its default on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.config import Config, parse_config
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.evaluation.accuracy import metrics
from oblr_megatron.evaluation.answers import evaluate
from oblr_megatron.preflight.inputs import open_inputs
from oblr_megatron.rewards.base import cause_of
from oblr_megatron.rewards.registry import build_reward, check_reward
from oblr_megatron.types import Prompt, Sample
from studies.train_backend import train_table
from studies.trl_trainer import TrlTask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from studies.toy_trainer import ToyConfig


@contextmanager
def open_recipe(config: ToyConfig) -> Iterator[TrlTask]:
    """Open the recipe for TRL; the block's end closes the reward.

    Raises:
        UserError: the recipe has a mistake or a setting that TRL's arm lacks, or TRL would tokenize a prompt in another
            way.
    """
    from transformers import AutoModelForCausalLM

    run = parse_config(train_table(config), "the study's config")
    check_settings(run, config.task)
    check_reward(run.reward, max_response_tokens=run.rollout.max_response_tokens)
    directory = check_hf_dir(run.model.path)
    tokenizer, inputs = directory.tokenizer(), open_inputs(run, directory, None, [])
    assert inputs.stream is not None, "the recipe samples prompts"
    tokenizer.padding_side = "left"
    prompts = inputs.stream.next_prompts(config.num_steps * config.num_prompts)
    for prompt in prompts:
        if tuple(tokenizer(prompt.text)["input_ids"]) != prompt.token_ids:
            what = f"TRL's tokens of the prompt {prompt.text!r:.60} differ from those of a training run"
            raise UserError(what, where=config.task, fix="use a tokenizer that adds no special tokens")
    samples = config.num_prompts * config.group_size
    room = run.parallel.micro_batch_tokens // (run.data.max_prompt_tokens + run.rollout.max_response_tokens)
    rows = max(size for size in range(1, samples + 1) if samples % size == 0 and size <= max(1, room))  # of a pass
    ((name, held_out),) = inputs.held_out.items()
    with build_reward(run.reward, max_response_tokens=run.rollout.max_response_tokens) as reward:

        def score(index: int, tokens: list[int]) -> float:
            sample = sample_of(prompts[index], tokens, tokenizer, group=0)
            result = reward.score([prompts[index]], [sample])
            if result.unscored:  # TRL cannot leave out a sample
                raise RunError(f"a response got no reward: {cause_of([result], run.reward)}")
            return result.rewards[0]

        def evaluated(model: PreTrainedModel) -> dict[str, float]:
            grades = evaluate(name, TransformersSampler(model, tokenizer), held_out, reward, run)
            return {f"eval/{name}/{metric}": value for metric, value in metrics(grades).items()}

        yield TrlTask(
            model=AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32),
            tokenizer=tokenizer,
            questions=[prompt.text for prompt in prompts],
            score=score,
            evaluate=evaluated,
            max_response_tokens=run.rollout.max_response_tokens,
            arguments={
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": samples // rows,
                "steps_per_generation": samples // rows,
                "bf16": run.model.dtype == "bfloat16",
            },
        )


def check_settings(run: Config, task: str) -> None:
    """Refuse (UserError) settings without which TRL would be trained on another problem than the run."""
    rollout = run.rollout
    for key, used in {
        "rollout.top_p": rollout.top_p < 1,
        "rollout.top_k": rollout.top_k > 0,
        "rollout.min_p": rollout.min_p > 0,
        "rollout.overlap": rollout.overlap != "none",
        "rollout.environment": bool(rollout.environment.function),
        "model.lora": run.model.lora.rank > 0,
    }.items():
        if used:
            raise UserError(
                f"the TRL backend has no {key}", where=task, fix="leave it out, or leave out the arms of TRL"
            )


class TransformersSampler:
    """Samples for `evaluate` with transformers' `generate`.

    Args:
        model: its current weights are used.
        tokenizer: pads on the left.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._generate, self._tokenizer = cast("Callable[..., Tensor]", model.generate), tokenizer

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        """Sample a group of responses to each prompt, prompt-major. The trainer's random numbers stay as they are.

        Log-probs are not computed: they are 0.
        """
        end = self._tokenizer.eos_token_id
        pad = end if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        padded = self._tokenizer.pad({"input_ids": [list(p.token_ids) for p in prompts]}, return_tensors="pt")
        drawn = {"temperature": request.temperature, "top_p": request.top_p, "top_k": max(request.top_k, 0)}
        plain = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}  # not those of the model's generation_config
        with torch.random.fork_rng():
            torch.manual_seed(request.seed)
            ids = self._generate(
                **padded,
                max_new_tokens=request.max_tokens,
                num_return_sequences=request.group_size,
                do_sample=not request.greedy,
                eos_token_id=end,
                pad_token_id=pad,
                **plain,
                **({} if request.greedy else drawn),
            )
        rows = ids[:, padded["input_ids"].shape[1] :].tolist()
        groups = [n // request.group_size for n in range(len(rows))]
        return [
            sample_of(prompts[group], _ended(row, end), self._tokenizer, group=group)
            for group, row in zip(groups, rows, strict=True)
        ]


def _ended(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def sample_of(prompt: Prompt, tokens: list[int], tokenizer: PreTrainedTokenizerBase, *, group: int) -> Sample:
    """A response that TRL or transformers sampled."""
    return Sample(
        group,
        prompt.token_ids,
        tuple(tokens),
        (0.0,) * len(tokens),
        text=str(tokenizer.decode(tokens, skip_special_tokens=True)),
        finish_reason="stop" if tokenizer.eos_token_id in tokens else "length",
        version=0,
    )
