"""Parameters and FLOPs of a model, dense or a mixture of experts, from its config.json. Imports no torch.

    linear layer of p outputs and d inputs       2 p d t          FLOPs for t tokens: a multiply-add counts as two
    causal attention over a sequence of t tokens 4 q t (t + 1)/2  q = heads * head_dim; scores and values of each pair
    training step                                3 x forward      input and weight gradients cost one forward each

The count covers the FLOPs that the method needs: only the experts a token is routed to, only the pairs that the causal
mask keeps, no recomputation, no padding. As is usual for MFU (PaLM, arXiv 2204.02311, appendix B), it leaves out
normalizations, activations, rotary embedding, softmax, the embedding look-up and the optimizer.

    model = published("Qwen3-30B-A3B")
    total_parameters(model), active_parameters(model)      # 30_532_122_624, 3_353_032_704
    training_flops(model, [1024, 700]) / 1e12              # TFLOPs, forward and backward, of two sequences
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.families import family_of, head_dim

BACKWARD = 2  # x forward: one product for the gradient of the inputs, one for that of the weights


def total_parameters(hf: Mapping[str, Any]) -> int:
    """Number of weights, from the model's config.json; the vocabulary is not padded."""
    embedding = hf["vocab_size"] * hf["hidden_size"]
    head = 0 if hf.get("tie_word_embeddings", False) else embedding
    biases = hf["num_hidden_layers"] * _attention_biases(hf)
    head_norms = 2 * head_dim(hf) if family_of(hf).qk_norms else 0
    norms = hf["num_hidden_layers"] * (2 * hf["hidden_size"] + head_norms) + hf["hidden_size"]
    return int(embedding + head + norms + biases + _matrices(hf, num_experts(hf)))


def active_parameters(hf: Mapping[str, Any]) -> int:
    """Number of weights that one token uses: only num_experts_per_tok experts per layer.

    Embedding and output layer count in full. Example: 3.35e9 for Qwen3-30B-A3B.
    """
    inactive = _matrices(hf, num_experts(hf)) - _matrices(hf, hf.get("num_experts_per_tok") or 0)
    return total_parameters(hf) - inactive


def forward_flops(hf: Mapping[str, Any], lengths: Iterable[int], *, head: bool = True) -> float:
    """FLOPs of one forward pass over independent sequences.

    Args:
        hf: the model's config.json.
        lengths: tokens of each sequence, prompt and response.
        head: include the output layer, for every token.
    """
    lengths = list(lengths)
    weights = _matrices(hf, hf.get("num_experts_per_tok") or 0)
    if head:
        weights += hf["vocab_size"] * hf["hidden_size"]
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 2.0 * weights * sum(lengths) + 4.0 * hf["num_hidden_layers"] * _query(hf) * pairs


def training_flops(hf: Mapping[str, Any], lengths: Iterable[int]) -> float:
    """FLOPs of a forward and a backward pass: three forward passes."""
    return (1 + BACKWARD) * forward_flops(hf, lengths)


def _query(hf: Mapping[str, Any]) -> int:
    return int(hf["num_attention_heads"]) * head_dim(hf)


def _key_value(hf: Mapping[str, Any]) -> int:
    return int(hf["num_key_value_heads"]) * head_dim(hf)


def _is_sparse(hf: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer is a mixture of experts, by transformers' rule for Qwen3-MoE."""
    if not num_experts(hf) or layer in (hf.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % hf.get("decoder_sparse_step", 1) == 0


def _matrices(hf: Mapping[str, Any], experts: int) -> int:
    """Elements of all layers' matrices, counting `experts` experts per sparse layer and the whole router."""
    hidden, layers = hf["hidden_size"], hf["num_hidden_layers"]
    sparse = sum(_is_sparse(hf, layer) for layer in range(layers))
    found = layers * 2 * hidden * (_query(hf) + _key_value(hf))
    if sparse:
        found += sparse * hidden * (num_experts(hf) + 3 * experts * hf["moe_intermediate_size"])
    if sparse < layers:
        found += (layers - sparse) * 3 * hidden * hf["intermediate_size"]
    return int(found)


def _attention_biases(hf: Mapping[str, Any]) -> int:
    """Bias elements of one layer's query, key, value and output projections."""
    output = hf["hidden_size"] if hf.get("attention_bias", False) else 0
    return int(_query(hf) + 2 * _key_value(hf) + output) if output or family_of(hf).qkv_bias else 0
