"""The oracle's mixture of experts against transformers' Qwen3MoeForCausalLM: logits and per-sample gradients.

transformers always computes norms and the router's softmax in fp32, so that the fp64 comparisons replace both. The
stock modules are compared in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from oblr_megatron.norms.oracle import oracle_gradient, oracle_logits
from oblr_megatron.types import Sample
from tests.tiny import VOCAB, tiny_moe_config

TOKENS = torch.tensor([3, 3, 7, 0, 22, 3, 1, 36, 5])
KINDS = [{"norm_topk_prob": True}, {"norm_topk_prob": False}, {"num_experts_per_tok": 1, "norm_topk_prob": False}]


@contextmanager
def exact_modules() -> Iterator[None]:
    """Make transformers compute norms and routers in the dtype of the weights."""
    norm, router = modeling.Qwen3MoeRMSNorm.forward, modeling.Qwen3MoeTopKRouter.forward

    def exact_norm(self: Any, hidden: Tensor) -> Tensor:
        return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    def exact_router(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
        top, selected = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, top / top.sum(-1, keepdim=True) if self.norm_topk_prob else top, selected

    modeling.Qwen3MoeRMSNorm.forward, modeling.Qwen3MoeTopKRouter.forward = exact_norm, exact_router
    try:
        yield
    finally:
        modeling.Qwen3MoeRMSNorm.forward, modeling.Qwen3MoeTopKRouter.forward = norm, router


def model_of(config: Qwen3MoeConfig, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(dtype)
    model.set_experts_implementation("eager")  # the grouped matrix product has no fp64
    model.model.embed_tokens.padding_idx = None  # else the padding token's gradient is zeroed
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split transformers' tensor of all experts of a layer into a checkpoint's three tensors for each expert."""
    result = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        for expert, own in enumerate(tensor if layer else ()):
            prefix = f"{layer}.experts.{expert}."
            if kind == "gate_up_proj":
                result[f"{prefix}gate_proj.weight"], result[f"{prefix}up_proj.weight"] = own.chunk(2)
            else:
                result[f"{prefix}down_proj.weight"] = own
        if not layer:
            result[name] = tensor
    return result


def weights_of(model: Qwen3MoeForCausalLM) -> dict[str, Tensor]:
    return published({name: parameter.detach() for name, parameter in model.named_parameters()})


def test_logits_equal_stock_transformers_in_fp32() -> None:
    config = tiny_moe_config()
    model = model_of(config, torch.float32)
    with torch.no_grad():
        theirs = model(TOKENS[None]).logits[0]
    torch.testing.assert_close(oracle_logits(weights_of(model), config, TOKENS), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradient_equal_transformers_in_fp64(kind: dict[str, Any], tied: bool) -> None:
    config = tiny_moe_config(tie_word_embeddings=tied, **kind)
    model = model_of(config, torch.float64)
    ids = TOKENS.tolist()
    with exact_modules():
        logits = model(TOKENS[None]).logits[0]
    ours = oracle_logits(weights_of(model), config, TOKENS)
    assert ours.shape == (len(TOKENS), VOCAB)
    torch.testing.assert_close(ours, logits.detach(), rtol=1e-12, atol=1e-12)
    logprobs = (logits[:-1] / 0.7).log_softmax(-1)
    logprobs.gather(1, TOKENS[1:, None])[2:].sum().backward()
    theirs = published({name: parameter.grad for name, parameter in model.named_parameters()})
    sample = Sample(0, tuple(ids[:3]), tuple(ids[3:]), (), "", "stop", 0)
    found = oracle_gradient(weights_of(model), config, sample, temperature=0.7)
    assert found.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-11, msg=name)
