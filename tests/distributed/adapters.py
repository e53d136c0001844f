"""LoRA adapters with values at random that depend on names alone, in a policy of any layout and in the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from oblr_megatron.model.lora.adapters import is_adapter
from oblr_megatron.model.policy import Policy

LORA: dict[str, Any] = {"rank": 3, "alpha": 4.5}
SCALE = 1.5


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """A whole A or B, by its name in the policy."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2


@torch.no_grad()
def fill(policy: Policy) -> None:
    """Give this rank its part of all adapters."""
    rank, ranks = policy.parallel.tp_rank, policy.parallel.tp_size
    for name, parameter in policy.named_parameters():
        if is_adapter(name):
            shape, cut = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
            dim: int = getattr(parameter, "partition_dim", 0)
            if cut:
                shape[dim] *= ranks
            whole = values(name, tuple(shape))
            parameter.copy_(whole.chunk(ranks, dim)[rank] if cut else whole)


def factors(weights: Mapping[str, Tensor], targets: tuple[str, ...] = ("proj",)) -> dict[str, Tensor]:
    """A and B of every matrix in `weights`, by "NAME A" and "NAME B" with the weight's Hugging Face name."""
    pairs = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if path.endswith(targets) and name.endswith(".weight"):
            inside = path.replace("model.", "decoder.").replace("self_attn.", "self_attention.lora.")
            inside = inside.replace("mlp.", "mlp.lora.")
            pairs[f"{name} A"] = values(f"{inside}.A.weight", (LORA["rank"], weight.shape[1]))
            pairs[f"{name} B"] = values(f"{inside}.B.weight", (weight.shape[0], LORA["rank"]))
    return pairs


def merged(weights: Mapping[str, Tensor], pairs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """W + scale * B A."""
    return {
        name: weight + SCALE * pairs[f"{name} B"] @ pairs[f"{name} A"] if f"{name} A" in pairs else weight
        for name, weight in weights.items()
    }


def of_factors(gradient: Mapping[str, Tensor], pairs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """dA = scale * B^T dW and dB = scale * dW A^T, from the gradient of the merged weights."""
    grads = {}
    for key, factor in pairs.items():
        name, which = key.split()
        dw, other = gradient[name], pairs[f"{name} {'B' if which == 'A' else 'A'}"]
        grads[key] = SCALE * (other.T @ dw if which == "A" else dw @ other.T)
        assert grads[key].shape == factor.shape, key
    return grads
