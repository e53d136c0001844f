"""transformers' Qwen3 as an oracle: exact in fp64, with the gradients of sum_n c_n sum_t log pi(o_t)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from oblr_megatron.types import MicroBatch


@contextmanager
def exact_norms() -> Iterator[None]:
    """transformers' RMSNorm computes in fp32 whatever the weights are; inside, it keeps fp64."""
    original = modeling_qwen3.Qwen3RMSNorm.forward

    def forward(self: modeling_qwen3.Qwen3RMSNorm, hidden: Tensor) -> Tensor:
        return self.weight * (hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())

    modeling_qwen3.Qwen3RMSNorm.forward = forward
    try:
        yield
    finally:
        modeling_qwen3.Qwen3RMSNorm.forward = original


def load_oracle(path: Path) -> Qwen3ForCausalLM:
    """The directory's model in fp64."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64)
    model.model.embed_tokens.padding_idx = None  # it withholds the padding token's gradient, wherever the token stands
    return model


def oracle_gradients(
    model: Qwen3ForCausalLM, batches: Sequence[MicroBatch], coefficients: Tensor, temperature: float = 1.0
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
