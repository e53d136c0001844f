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


def total_parameters(hf: Mapping[str, Any]) -> int:
    """Number of weights, from the model's config.json; the vocabulary is not padded."""
    hidden, family = hf["hidden_size"], family_of(hf)
    embedding = hf["vocab_size"] * hidden
    head = 0 if hf.get("tie_word_embeddings", False) else embedding
    biases = _query(hf) + 2 * _key_value(hf) if family.qkv_bias else 0
    head_norms = 2 * head_dim(hf) if family.qk_norms else 0
    vectors = hf["num_hidden_layers"] * (2 * hidden + head_norms + biases) + hidden
    return int(embedding + head + vectors + _matrices(hf, num_experts(hf)))


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
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return _product_flops(hf, lengths, head=head) + 4.0 * hf["num_hidden_layers"] * _query(hf) * pairs


def _product_flops(hf: Mapping[str, Any], lengths: Iterable[int], *, head: bool) -> float:
    """FLOPs of the products with weights in one forward pass."""
    weights = _matrices(hf, hf.get("num_experts_per_tok") or 0) + head * hf["vocab_size"] * hf["hidden_size"]
    return 2.0 * weights * sum(lengths)


def training_flops(hf: Mapping[str, Any], lengths: Iterable[int], *, frozen: bool = False) -> float:
    """FLOPs of a forward and a backward pass. For each product, backward has two: for inputs and for weights.

    Args:
        hf: the model's config.json.
        lengths: tokens of each sequence, prompt and response.
        frozen: the weights have no gradient (LoRA). The adapters' own products, below 1%, are not counted.
    """
    lengths = list(lengths)
    whole = forward_flops(hf, lengths)
    return 3 * whole - (_product_flops(hf, lengths, head=True) if frozen else 0.0)


def _query(hf: Mapping[str, Any]) -> int:
    return int(hf["num_attention_heads"]) * head_dim(hf)


def _key_value(hf: Mapping[str, Any]) -> int:
    return int(hf["num_key_value_heads"]) * head_dim(hf)


def _matrices(hf: Mapping[str, Any], experts: int) -> int:
    """Elements of all layers' matrices, counting `experts` experts per layer and the whole router."""
    hidden, every = hf["hidden_size"], num_experts(hf)
    attention = 2 * hidden * (_query(hf) + _key_value(hf))
    ffn = every + 3 * experts * hf["moe_intermediate_size"] if every else 3 * hf["intermediate_size"]
    return int(hf["num_hidden_layers"] * (attention + hidden * ffn))
