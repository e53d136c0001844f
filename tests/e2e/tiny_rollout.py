"""Shared by the rollout tests: tiny engines, changed weights, and log-probs of transformers to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from oblr_megatron.config import Config, parse_config
from oblr_megatron.engine.protocol import Sampler, SamplingRequest
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.types import Prompt, Sample
from oblr_megatron.weights.manifest import TensorSpec

VOCAB, EOS = 37, 1  # of tests.tiny
ONE_RANK: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))  # the fields the engines read


class Weights:
    """A transformers model as the source of a push, under published names (each expert on its own).

    `edit` replaces or removes (None) single tensors.
    """

    def __init__(self, model: PreTrainedModel, edit: dict[str, torch.Tensor | None] | None = None) -> None:
        held = dict(model.named_parameters())
        published = revert_weight_conversion(model, dict(held))  # in another order
        tensors = {name: published.pop(name) for name in held if name in published} | published | (edit or {})
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self):
        yield from self.tensors.items()


def make_config(model: Path, run_dir: Path, **rollout: Any) -> Config:
    return parse_config(
        {
            "run_dir": str(run_dir),
            "model": {"path": str(model)},
            "data": {"train": "unused.jsonl", "max_prompt_tokens": 24},
            "rollout": {"max_response_tokens": 40, "kv_cache_gib": 0.1, "num_threads": 1} | rollout,
        }
    )


def start(model: Path, run_dir: Path, **rollout: Any) -> ColocatedEngines:
    return ColocatedEngines(make_config(model, run_dir, **rollout), ONE_RANK)


def make_prompts(count: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    ids = [tuple(draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 12))) for _ in range(count)]
    return [Prompt(row=n, id=str(n), text="", token_ids=tokens, answer="", source="") for n, tokens in enumerate(ids)]


def sample(engines: Sampler, count: int = 12, group_size: int = 4, **options: Any) -> list[Sample]:
    request = SamplingRequest(**{"group_size": group_size, "temperature": 1.0, "max_tokens": 32, "seed": 3} | options)
    return engines.generate(make_prompts(count), request)


def change(model: PreTrainedModel, seed: int) -> None:
    """Move every parameter by a tenth of its size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))


def largest_error(model: PreTrainedModel, samples: Sequence[Sample], temperature: float = 1.0) -> float:
    """max |log-prob of the engine - log_softmax of transformers' logits| over all response tokens."""
    worst = 0.0
    for one in samples:
        tokens = torch.tensor([one.prompt_ids + one.response_ids])
        with torch.no_grad():
            logprobs = (model(tokens).logits[0, len(one.prompt_ids) - 1 : -1].float() / temperature).log_softmax(-1)
        expected = logprobs.gather(-1, tokens[0, len(one.prompt_ids) :, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(one.logprobs)).abs().max().item())
    return worst


def engine_processes() -> list[psutil.Process]:
    """This process's engine processes that still exist, zombies included."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "oblr_megatron.engine.worker" in " ".join(command_of(child))]


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec.of(name, tensor.dtype, tensor.shape)
