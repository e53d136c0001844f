"""Qwen3's mixture of experts on megatron-core: its configuration, and which replicas' tokens an expert sees.

Every layer is a mixture, without capacity limits, dropped tokens or shared experts. `router.py` assigns tokens to
experts, and an all-to-all sends them there. An expert therefore sees tokens of every replica in its block
(`Parallel.block_group`), and its `main_grad` sums over their samples. If fewer expert-parallel ranks exist than ranks
that share a sample, that `main_grad` is a partial sum.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.model.megatron_versions import mlp_submodules
from oblr_megatron.model.router import Router

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.taps import Splits, SplitsFn, Tap
    from oblr_megatron.model.transformer_config import HFConfig

_EXPERT = re.compile(
    r"(?<=\.mlp\.experts\.local_experts\.)\d+|(?<=\.mlp\.experts\.linear_fc[12]\.weight)\d+$"
    r"|(?<=\.mlp\.lora\.experts\.)\d+"
)


def with_global_expert(name: str, first: int) -> str:
    """The parameter's name with the expert counted over all ranks; `first` is the number of this rank's first expert.

    Example: ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", 4) -> "... local_experts.5 ...".
    """
    return _EXPERT.sub(lambda index: str(first + int(index[0])), name)


def moe_fields(
    hf_config: HFConfig, parallel: Parallel, dtype: torch.dtype, *, transformer_engine: bool
) -> dict[str, Any]:
    """The fields of megatron's TransformerConfig that make a model a mixture; none for a dense model.

    Routing is fp32, or fp64 for fp64 weights. Transformer Engine computes a rank's experts in one grouped matrix
    product; without it each expert is a separate module.
    """
    experts = num_experts(hf_config.to_dict())
    if not experts:
        return {}
    assert transformer_engine or parallel.device.type != "cuda", "`checks.machine` refuses experts without its layers"
    return {
        "num_moe_experts": experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_pre_softmax": True,  # the softmax is over all experts, see Router
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_router_load_balancing_type": "none",  # RouterLosses adds the losses instead
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": transformer_engine,
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": parallel.etp_size,
    }


def set_router(layer: ModuleSpec, hf_config: HFConfig, config: ModelConfig) -> None:
    """Put our router into the spec of a mixture's transformer layer; a dense layer is unchanged."""
    if num_experts(hf_config.to_dict()):
        mlp_submodules(layer).router = partial(
            Router, renormalise=hf_config.norm_topk_prob, replays=config.moe_routing_replay
        )


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether megatron-core marks the parameter as an expert's."""
    return not getattr(parameter, "allreduce", True)


def mark_experts(model: nn.Module) -> None:
    """Mark every expert's weights before the data-parallel wrapper sorts parameters by this mark.

    megatron-core marks them only under expert parallelism. With expert_tensor_parallel_size 1, unmarked experts would
    never be summed over the tensor-parallel ranks that each hold a whole copy.
    """
    for parameter in experts_of(model):
        parameter.allreduce = False  # type: ignore[attr-defined]  # megatron-core's mark


def experts_of(model: nn.Module) -> set[nn.Parameter]:
    """Every expert's weights, with its adapters', also in a model without `mark_experts`."""
    layers = (layer for layer in model.modules() if isinstance(layer, MoELayer))
    own = ("experts.", "lora.experts.")  # not a mixture's shared_experts
    return {weight for layer in layers for name, weight in layer.named_parameters() if name.startswith(own)}


def splits_of(model: nn.Module, parallel: Parallel, tap: Tap) -> dict[nn.Module, list[SplitsFn]]:
    """For each linear layer of experts, and each expert in it: the replicas that its current tokens come from.

    Transformer Engine's grouped layer has all local experts, other layers have one. Empty if replicas share no experts.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    if parallel.block_size == 1 or not layers:
        return {}
    replicas = _senders(layers[0].token_dispatcher, parallel.block_rank)
    splits_by_layer: dict[nn.Module, list[SplitsFn]] = {}
    for layer in layers:
        sources, experts = _Sources(layer.token_dispatcher, replicas, tap), layer.experts
        splits = [partial(sources.splits, index) for index in range(experts.num_local_experts)]
        if isinstance(experts, TEGroupedMLP):
            splits_by_layer |= {experts.linear_fc1: splits, experts.linear_fc2: splits}
        elif isinstance(experts, SequentialMLP):
            for expert, own in zip(experts.local_experts, splits, strict=True):
                splits_by_layer |= {expert.linear_fc1: [own], expert.linear_fc2: [own]}
        adapters = layer.lora.experts if hasattr(layer, "lora") else ()
        for expert, own in zip(adapters, splits, strict=False):
            splits_by_layer |= {part: [own] for part in expert.modules()}
    return splits_by_layer


def _senders(dispatcher: MoEAlltoAllTokenDispatcher, block_rank: int) -> list[int]:
    """The replica of each rank that sends tokens, in the order in which an expert sees them.

    An expert sees tokens ordered by the sender's expert-tensor-parallel rank, then by its expert-parallel rank. In
    `tp_ep_group` the expert-tensor-parallel rank varies fastest.
    """
    replicas = [0] * dispatcher.tp_ep_group.size()
    dist.all_gather_object(replicas, block_rank, group=dispatcher.tp_ep_group)
    return [
        replicas[ep * dispatcher.tp_size + etp] for etp in range(dispatcher.tp_size) for ep in range(dispatcher.ep_size)
    ]


class _Sources:
    """Records how many tokens each rank sent to the local experts of one layer in the last forward."""

    def __init__(self, dispatcher: MoEAlltoAllTokenDispatcher, replicas: list[int], tap: Tap) -> None:
        self._dispatcher, self._replicas = dispatcher, replicas
        self._counts: list[list[int]] = []  # [etp * ep, local experts]
        self._preprocess = dispatcher.preprocess
        tap.replace(dispatcher, "preprocess", self._record)

    def splits(self, expert: int) -> Splits:
        """The local expert's tokens as runs of (replica of the block, number of tokens); a replica may occur twice."""
        stretches = zip(self._replicas, (counts[expert] for counts in self._counts), strict=True)
        return [(replica, sum(n for _, n in group)) for replica, group in groupby(stretches, key=lambda pair: pair[0])]

    def _record(self, routing_map: Tensor) -> Tensor:
        tokens_per_expert = self._preprocess(routing_map)
        dispatcher = self._dispatcher
        if dispatcher.num_local_experts > 1:
            counts = dispatcher.num_global_tokens_per_local_expert
        else:  # the dispatcher keeps only this rank's row
            counts = gather_from_sequence_parallel_region(dispatcher.output_splits, group=dispatcher.tp_group)
        self._counts = counts.reshape(-1, dispatcher.num_local_experts).tolist()
        return tokens_per_expert
