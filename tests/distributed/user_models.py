"""GPTModels as a user of the norms' library builds them: own configuration, own groups, own weights, own losses.

Nothing here uses the trainer's model or configuration. `SdpaAttention` is there because megatron-core's own local
attention refuses context parallelism and packed samples, `SplitNorm` because torch's norms do not know that the
sequence is split.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from oblr_megatron.model import cpu
from oblr_megatron.model.cpu.attention import SdpaAttention
from oblr_megatron.norms import TokenBatch

VOCAB = 24
LENGTHS = (7, 4, 9, 5)


class SplitNorm(nn.RMSNorm):
    """A user's norm for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


FAMILIES: dict[str, dict[str, Any]] = {
    # GPT-2's layers with rotary positions: LayerNorm, biases everywhere, no gate
    "gpt": {"normalization": "LayerNorm", "add_bias_linear": True, "tied": False},
    # Qwen2's: RMSNorm, bias of q, k and v, gated
    "qwen2": {"add_qkv_bias": True, "gated_linear_unit": True, "activation_func": nn.functional.silu, "tied": True},
    # mixture of experts, norms of q and k, megatron-core's own router
    "moe": {
        "qk_layernorm": True,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": 20,
        "tied": False,
    },
}


@dataclass(slots=True)
class Batch(TokenBatch):
    """With a field of the user's own."""

    lengths: Tensor | None = None  # [n] counted tokens of each sample


@contextmanager
def groups(
    *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, vp: int | None = None, etp: int | None = None
) -> Iterator[None]:
    """megatron-core's groups, made by megatron-core."""
    cpu.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()


def build(
    family: str,
    *,
    layers: int = 4,
    sp: bool = False,
    sdpa: bool = False,
    vp: int | None = None,
    recompute: bool = False,
) -> list[GPTModel]:
    """This rank's chunks of a model in fp64, with the weights of `shard_of`."""
    options = dict(FAMILIES[family])
    tied, experts = options.pop("tied"), options.get("num_moe_experts")
    if recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        **{
            "num_layers": layers,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 8,
            "ffn_hidden_size": 40,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "init_method": _leave,
            "output_layer_init_method": _leave,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": torch.float64,
            "pipeline_dtype": torch.float64,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "virtual_pipeline_model_parallel_size": vp,
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            "sequence_parallel": sp,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "gradient_accumulation_fusion": False,
            "moe_token_dispatcher_type": "alltoall",
            "batch_p2p_comm": False,
            "overlap_p2p_comm": vp is not None,
            "calculate_per_token_loss": True,  # for finalize_model_grads: a sum over replicas, not a mean
        }
        | options
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        qk_layernorm=config.qk_layernorm,
        normalization=None if sp else config.normalization,
    )
    if sdpa:
        spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    norm = None
    if sp:
        norm = spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SplitNorm
        attention = spec.submodules.self_attention.submodules
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SplitNorm
    found = []
    for stage in range(vp or 1):
        which = stage if vp else None
        specs: Any = spec
        if norm is not None:
            count = get_num_layers_to_build(config, vp_stage=which)
            specs = TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=norm)
        model = GPTModel(
            config=config,
            transformer_layer_spec=specs,
            vocab_size=VOCAB,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=which),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=which),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=which,
        ).double()
        for name, param in named(model):
            param.data.copy_(shard_of(name, param))
        found.append(model)
    return found


def _leave(weight: Tensor) -> None:
    """The weights come from `shard_of`."""


def named(model: GPTModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their name in the whole model; a tied output layer is the embedding."""
    size = parallel_state.get_expert_model_parallel_world_size()
    first = 4 // size * parallel_state.get_expert_model_parallel_rank()
    for local, param in model.named_parameters():
        name = local
        if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", local):
            name = f"layer {model.decoder.layers[int(match[1])].layer_number}: {match[2]}"
        elif local == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        yield re.sub(r"(?<=local_experts\.)\d+", lambda index: str(first + int(index[0])), name), param


def shard_of(name: str, param: nn.Parameter, whole: Tensor | None = None) -> Tensor:
    """This rank's part of the whole tensor: by default of random numbers, seeded by the name."""
    split = getattr(param, "tensor_model_parallel", False)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    group = parallel_state.get_expert_tensor_parallel_group() if ".experts." in name else tensor_group
    size, rank = (group.size(), group.rank()) if split else (1, 0)
    dim = param.partition_dim if split else 0
    if whole is None:
        shape = [length * size if d == dim else length for d, length in enumerate(param.shape)]
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        whole = 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.2 * noise
    parts = whole.chunk(2, dim) if "linear_fc1" in name and _gated(param, name) else [whole]
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)


def _gated(param: nn.Parameter, name: str) -> bool:
    return getattr(param, "partition_stride", 1) == 2


def samples() -> list[Batch]:
    """Four samples, one a microbatch; the first positions do not count, tokens repeat."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in LENGTHS:
        ids = torch.randint(0, VOCAB // 2, (1, length + 1), generator=generator)
        mask = torch.ones(1, length, dtype=torch.bool)
        mask[:, : length // 3] = False
        found.append(Batch(ids[:, :-1], ids[:, 1:], mask, lengths=mask.sum(1)))
    return found


def rows(parts: Sequence[Batch]) -> Batch:
    """Several samples as padded rows."""
    width = max(part.input_ids.shape[1] for part in parts)
    padded = [
        torch.cat([nn.functional.pad(getattr(part, name), (0, width - part.input_ids.shape[1])) for part in parts])
        for name in ("input_ids", "labels", "mask")
    ]
    return Batch(*padded, lengths=torch.cat([part.lengths for part in parts if part.lengths is not None]))


def packed(parts: Sequence[Batch]) -> Batch:
    """Several samples in one row."""
    joined = [torch.cat([getattr(part, name) for part in parts], 1) for name in ("input_ids", "labels", "mask")]
    bounds = torch.tensor([0, *(part.input_ids.shape[1] for part in parts)]).cumsum(0, dtype=torch.int32)
    lengths = torch.cat([part.lengths for part in parts if part.lengths is not None])
    return Batch(*joined, cu_seqlens=bounds, lengths=lengths)


def mean_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over a sample's counted tokens; a sum over this rank's part of them."""
    whole = gather_from_tensor_model_parallel_region(logits) if dist.is_initialized() else logits
    picked = whole.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    assert batch.lengths is not None
    return -batch.per_sample(picked) / batch.lengths


def squared_margin(logits: Tensor, batch: Batch) -> Tensor:
    """(sum over tokens of the label's logit minus the mean logit, minus pi)^2: context-parallel ranks sum first."""
    whole = gather_from_tensor_model_parallel_region(logits)
    margin = whole.gather(-1, batch.labels[..., None])[..., 0] - whole.mean(-1)
    sums = reduce_from_tensor_model_parallel_region(
        batch.per_sample(margin), group=parallel_state.get_context_parallel_group()
    )
    return (sums - math.pi).square()


LOSSES = {"cross_entropy": mean_cross_entropy, "margin": squared_margin}


def oracle(family: str, loss: str, layers: int) -> list[dict[str, Tensor]]:
    """The gradient of each sample's loss by name, by autograd on one rank without any of the library's code."""
    with groups():
        (model,) = build(family, layers=layers)
        params = dict(named(model))
        found = []
        for batch in samples():
            positions = torch.arange(batch.input_ids.shape[1])[None]
            output = model(batch.input_ids, positions, None)
            value = LOSSES[loss](output, batch)[0]
            grads = torch.autograd.grad(value, list(params.values()), materialize_grads=True)
            found.append(dict(zip(params, grads, strict=True)))
    return found
