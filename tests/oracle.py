"""transformers' dense models as an oracle: exact in fp64, with the gradients of sum_n c_n sum_t log pi(o_t)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oblr_megatron.types import MicroBatch

NORMS: tuple[Any, ...] = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


@contextmanager
def exact_norms() -> Iterator[None]:
    """transformers' RMSNorm computes in fp32 whatever the weights are; inside, it keeps fp64."""
    originals = [norm.forward for norm in NORMS]

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return self.weight * (hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())

    for norm in NORMS:
        norm.forward = forward
    try:
        yield
    finally:
        for norm, original in zip(NORMS, originals, strict=True):
            norm.forward = original


def load_oracle(path: Path) -> PreTrainedModel:
    """The directory's model in fp64."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model.model.embed_tokens.padding_idx = None  # it withholds the padding token's gradient, wherever the token stands
    return model


def oracle_gradients(
    model: PreTrainedModel, batches: Sequence[MicroBatch], coefficients: Tensor, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Gradients by Hugging Face name, also left in the model; the embedding's includes a tied output layer's."""
    model.zero_grad()
    with exact_norms():
        for batch in batches:
            logprobs = (model(batch.input_ids).logits / temperature).log_softmax(-1)
            chosen = logprobs.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
            per_sample = chosen.masked_fill(~batch.mask, 0.0).sum(-1)
            (coefficients[batch.sample_index] * per_sample).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
