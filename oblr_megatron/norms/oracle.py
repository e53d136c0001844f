"""The oracle for gradient norms: a plain-torch decoder (dense or mixture of experts) and one autograd call a sample.

    s_i = grad_theta sum_t rho_t log pi(o_t | q, o_<t),   w_i = ||s_i||^2 over all parameters

It is slow and shares no code with the trained model: it imports neither megatron nor transformers. It takes tensors by
Hugging Face name, runs one unpadded sample at a time, and computes in the dtype of the weights. Give it fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.types import Sample

Weights = Mapping[str, "Tensor"]


class DenseShape(Protocol):
    """The fields of a Hugging Face configuration that the forward pass reads."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Any  # {"rope_theta": float, "rope_type": "default" or "llama3", ...}


class MixtureShape(DenseShape, Protocol):
    """The fields of a `Qwen3MoeConfig`."""

    num_experts_per_tok: int
    norm_topk_prob: bool


def oracle_sq_norms(
    weights: Weights,
    config: DenseShape,
    samples: Sequence[Sample],
    temperature: float = 1.0,
    ratios: Sequence[Tensor] | None = None,
) -> Tensor:
    """w of every sample, by one autograd call each.

    Args:
        weights: tensors by Hugging Face name; a tied model has no `lm_head.weight`.
        config: a Hugging Face config.
        samples: prompts with their responses.
        temperature: divides the logits.
        ratios: for each sample the importance ratios rho_t [response tokens]; 1 by default.

    Returns:
        [len(samples)] fp64.
    """
    norms = torch.zeros(len(samples), dtype=torch.float64)
    for n, sample in enumerate(samples):
        gradient = oracle_gradient(weights, config, sample, temperature, None if ratios is None else ratios[n])
        norms[n] = sum(grad.double().square().sum() for grad in gradient.values())
    return norms


def oracle_gradient(
    weights: Weights, config: DenseShape, sample: Sample, temperature: float = 1.0, ratio: Tensor | None = None
) -> dict[str, Tensor]:
    """The score s of one sample, by Hugging Face parameter name; zeros for an empty response."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    logprobs = oracle_logprobs(leaves, config, sample, temperature)  # [sample.length]
    score = (logprobs if ratio is None else logprobs * ratio.detach()).sum()
    grads = torch.autograd.grad(score, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def oracle_logprobs(weights: Weights, config: DenseShape, sample: Sample, temperature: float = 1.0) -> Tensor:
    """log pi of each token that the policy wrote, [sample.length]; by the sample's routes and recorded tokens."""
    tokens = torch.tensor((*sample.prompt_ids, *sample.response_ids))
    routes = None if sample.routes is None else torch.tensor(sample.routes, dtype=torch.int64)
    logits = oracle_logits(weights, config, tokens, routes)[:-1]  # position j predicts token j + 1
    logits = within_support(logits[len(sample.prompt_ids) - 1 :], sample)
    response = F.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
    return response[torch.tensor(sample.mask)] if sample.mask else response


def within_support(logits: Tensor, sample: Sample) -> Tensor:
    """[response tokens, V] logits, -inf where `sample.recorded` says that a token could not be drawn."""
    if sample.recorded is None:
        return logits
    possible = torch.ones(logits.shape, dtype=torch.bool)
    for row, recorded, token in zip(possible, sample.recorded, sample.response_ids, strict=True):
        if recorded["logprob"][-1] == -torch.inf:
            row[:] = False
            row[torch.tensor(recorded["id"][recorded["logprob"] > -torch.inf].astype("int64"))] = True
            row[token] = True
    return logits.masked_fill(~possible, -torch.inf)


def oracle_logits(weights: Weights, config: DenseShape, tokens: Tensor, routes: Tensor | None = None) -> Tensor:
    """[T] token ids -> [T, V] logits. `routes` [T, layers, k] int64 are the experts of a mixture, -1 for its own."""
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding[tokens]  # [T, hidden]
    rotation = _rotation(len(tokens), config, hidden.dtype)
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        normed = _rms_norm(hidden, layer["input_layernorm.weight"], config.rms_norm_eps)
        hidden = hidden + _attention(normed, layer, config, rotation)
        normed = _rms_norm(hidden, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        if "mlp.gate.weight" in layer:
            given = None if routes is None else routes[:, index]
            hidden = hidden + _mixture(normed, layer, cast("MixtureShape", config), given)
        else:
            hidden = hidden + _mlp(normed, layer, "mlp.")
    hidden = _rms_norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)
    return hidden @ (embedding if config.tie_word_embeddings else weights["lm_head.weight"]).T


def _mlp(hidden: Tensor, layer: Weights, prefix: str) -> Tensor:
    """Gated MLP: [T, hidden] -> [T, hidden]."""
    gate = F.silu(hidden @ layer[f"{prefix}gate_proj.weight"].T)
    return (gate * (hidden @ layer[f"{prefix}up_proj.weight"].T)) @ layer[f"{prefix}down_proj.weight"].T


def _mixture(hidden: Tensor, layer: Weights, config: MixtureShape, routes: Tensor | None = None) -> Tensor:
    """The k experts with the highest scores for a token, weighted by these scores: [T, hidden] -> [T, hidden].

    A token with a route [k] in `routes` [T, k] takes these experts instead. The softmax over experts is taken
    in the dtype of the weights; transformers always takes it in fp32.
    """
    scores = (hidden @ layer["mlp.gate.weight"].T).softmax(dim=-1)  # [T, experts]
    selected = scores.topk(config.num_experts_per_tok, dim=-1).indices  # [T, k]
    if routes is not None:
        selected = torch.where(routes < 0, selected, routes)
    weight = scores.gather(1, selected)
    if config.norm_topk_prob:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    mixed = torch.zeros_like(hidden)
    for expert in range(scores.shape[1]):
        token, place = torch.nonzero(selected == expert, as_tuple=True)
        output = _mlp(hidden[token], layer, f"mlp.experts.{expert}.")
        mixed = mixed.index_add(0, token, output * weight[token, place, None])
    return mixed


def _attention(hidden: Tensor, layer: Weights, config: DenseShape, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Causal grouped-query attention: [T, hidden] -> [T, hidden]. Biases and head norms apply if the layer has them."""
    size, heads, groups = _head_dim(config), config.num_attention_heads, config.num_key_value_heads
    length = len(hidden)
    query = _projected(hidden, layer, "q").view(length, heads, size)
    key = _projected(hidden, layer, "k").view(length, groups, size)
    value = _projected(hidden, layer, "v").view(length, groups, size)
    if "self_attn.q_norm.weight" in layer:
        query = _rms_norm(query, layer["self_attn.q_norm.weight"], config.rms_norm_eps)
        key = _rms_norm(key, layer["self_attn.k_norm.weight"], config.rms_norm_eps)
    query, key = _rotate(query, rotation), _rotate(key, rotation)
    key = key.repeat_interleave(heads // groups, dim=1)  # head h reads group h // (heads / groups)
    value = value.repeat_interleave(heads // groups, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query, key) / size**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
    attention = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    mixed = torch.einsum("hij,jhd->ihd", attention, value).reshape(length, heads * size)
    return mixed @ layer["self_attn.o_proj.weight"].T


def _projected(hidden: Tensor, layer: Weights, part: str) -> Tensor:
    """q, k or v of all heads: [T, hidden] -> [T, heads * head_dim]."""
    projected = hidden @ layer[f"self_attn.{part}_proj.weight"].T
    bias = layer.get(f"self_attn.{part}_proj.bias")
    return projected if bias is None else projected + bias


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _rotation(length: int, config: DenseShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [T, 1, head_dim].

    The angles are fp32 for every dtype, as in megatron and transformers: the table's rounding is part of the model.
    """
    size = _head_dim(config)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    rope = config.rope_parameters
    frequencies = 1.0 / rope["rope_theta"] ** exponents
    if rope.get("rope_type") == "llama3":
        frequencies = _stretched(frequencies, rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _stretched(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves are `factor` times as long, short ones stay, those between are blended."""
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    share = ((length / waves - low) / (high - low)).clamp(0, 1)  # of the unscaled frequency
    return (1 - share) * frequencies / rope["factor"] + share * frequencies


def _head_dim(config: DenseShape) -> int:
    """Width of a head; some configurations state it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [T, heads, head_dim]: component d is paired with component d + head_dim / 2."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
