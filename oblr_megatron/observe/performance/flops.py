"""Parameters and FLOPs of a Qwen3 model, dense or a mixture of experts, from its config.json. Imports no torch.

    a linear layer of p outputs and d inputs      2 p d t          FLOPs for t tokens: a multiply-add counts as two
    causal attention of one sequence of t tokens  4 q t (t + 1)/2  q = heads * head_dim: scores and values of every pair
    a training step                               3 x forward      inputs' and weights' gradients cost one forward each

Counted is what the method needs: the experts a token is routed to and not all of them, the pairs that the causal mask
keeps, nothing twice for recomputation, nothing for padding. Normalizations, activations, rotary embedding, softmax, the
embedding's look-up and the optimizer are left out, as MFU is usually counted (PaLM, arXiv 2204.02311, appendix B).

    model = published("Qwen3-30B-A3B")
    total_parameters(model), active_parameters(model)      # 30_532_122_624, 3_353_032_704
    training_flops(model, [1024, 700]) / 1e12              # TFLOPs of a pass over two sequences, forward and backward
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oblr_megatron.checks.layout import num_experts

BACKWARD = 2  # x forward: a product with the weights for the inputs' gradient, one with the inputs for the weights'


def total_parameters(hf: Mapping[str, Any]) -> int:
    """Elements of all weights of the model whose config.json is `hf`; the vocabulary is not padded."""
    embedding = hf["vocab_size"] * hf["hidden_size"]
    head = 0 if hf.get("tie_word_embeddings", False) else embedding
    biases = hf["num_hidden_layers"] * _attention_biases(hf)
    norms = hf["num_hidden_layers"] * (2 * hf["hidden_size"] + 2 * _head_dim(hf)) + hf["hidden_size"]
    return int(embedding + head + norms + biases + _matrices(hf, num_experts(hf)))


def active_parameters(hf: Mapping[str, Any]) -> int:
    """Elements of the weights that one token passes through: of a mixture's experts, num_experts_per_tok a layer.

    Embedding and output layer count whole: 3.35e9 of Qwen3-30B-A3B.
    """
    inactive = _matrices(hf, num_experts(hf)) - _matrices(hf, hf.get("num_experts_per_tok") or 0)
    return total_parameters(hf) - inactive


def forward_flops(hf: Mapping[str, Any], lengths: Iterable[int], *, head: bool = True) -> float:
    """FLOPs of one forward pass over sequences that attend to nothing but themselves.

    Args:
        hf: the model's config.json.
        lengths: tokens of every sequence, prompt and response.
        head: with the output layer, for every token.
    """
    lengths = list(lengths)
    weights = _matrices(hf, hf.get("num_experts_per_tok") or 0)
    if head:
        weights += hf["vocab_size"] * hf["hidden_size"]
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 2.0 * weights * sum(lengths) + 4.0 * hf["num_hidden_layers"] * _query(hf) * pairs


def training_flops(hf: Mapping[str, Any], lengths: Iterable[int]) -> float:
    """FLOPs of a forward and a backward pass over whole sequences: three forward passes."""
    return (1 + BACKWARD) * forward_flops(hf, lengths)


def _head_dim(hf: Mapping[str, Any]) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def _query(hf: Mapping[str, Any]) -> int:
    return int(hf["num_attention_heads"]) * _head_dim(hf)


def _key_value(hf: Mapping[str, Any]) -> int:
    return int(hf["num_key_value_heads"]) * _head_dim(hf)


def _is_sparse(hf: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer is a mixture of experts: transformers' rule for Qwen3-MoE."""
    if not num_experts(hf) or layer in (hf.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % hf.get("decoder_sparse_step", 1) == 0


def _matrices(hf: Mapping[str, Any], experts: int) -> int:
    """Elements of all layers' matrices, with `experts` of a mixture's experts a layer and the whole router."""
    hidden, layers = hf["hidden_size"], hf["num_hidden_layers"]
    sparse = sum(_is_sparse(hf, layer) for layer in range(layers))
    found = layers * 2 * hidden * (_query(hf) + _key_value(hf))
    if sparse:
        found += sparse * hidden * (num_experts(hf) + 3 * experts * hf["moe_intermediate_size"])
    if sparse < layers:
        found += (layers - sparse) * 3 * hidden * hf["intermediate_size"]
    return int(found)


def _attention_biases(hf: Mapping[str, Any]) -> int:
    """Of queries, keys, values and the output projection of one layer."""
    return int(_query(hf) + 2 * _key_value(hf) + hf["hidden_size"]) if hf.get("attention_bias", False) else 0
