"""Qwen3's mixture of experts on megatron-core: its configuration, and whose tokens an expert sees.

Every layer is a mixture; without capacity, dropped tokens or shared experts. `router.py` deals the tokens. They travel
to their experts by all-to-all, so an expert sees tokens of every replica of its block (`Parallel.block_group`), and its
gradient in `main_grad` is a sum over their samples; with fewer expert-parallel ranks than share a sample it is a part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
from oblr_megatron.errors import UserError
from oblr_megatron.model.router import Router

if TYPE_CHECKING:
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.qwen3 import Policy
    from oblr_megatron.model.taps import Splits, SplitsFn
    from oblr_megatron.model.transformer_config import HFConfig

_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+|(?<=\.mlp\.experts\.linear_fc[12]\.weight)\d+$")


def with_global_expert(name: str, first: int) -> str:
    """The parameter's name with its expert counted over all expert-parallel ranks.

    Example: ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", 4) -> "... local_experts.5 ...".
    Names of other parameters stay as they are.

    Args:
        name: in megatron-core, on this rank.
        first: the global index of this rank's first expert.
    """
    return _EXPERT.sub(lambda index: str(first + int(index[0])), name)


def moe_fields(
    hf_config: HFConfig, parallel: Parallel, dtype: torch.dtype, *, transformer_engine: bool
) -> dict[str, Any]:
    """The fields of megatron's TransformerConfig that make a model a mixture; none for a dense model.

    Routing is done in fp32, in fp64 where the weights are. Transformer Engine makes one grouped matrix product of the
    experts of a rank; without it they are modules of their own.

    Raises:
        UserError: a mixture on a GPU without Transformer Engine, whose kernels megatron-core's router calls.
    """
    experts = num_experts(hf_config.to_dict())
    if not experts:
        return {}
    if parallel.device.type == "cuda" and not transformer_engine:
        raise UserError(
            "a mixture of experts on a GPU needs Transformer Engine", where="model", fix="install transformer-engine"
        )
    return {
        "num_moe_experts": experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_pre_softmax": True,  # the softmax is over all experts, see Router
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_router_load_balancing_type": "none",  # its losses are Router's, in one pass alone
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": transformer_engine,
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": parallel.etp_size,
    }


def set_router(layer: ModuleSpec, hf_config: HFConfig) -> None:
    """Put our router into the spec of a mixture's transformer layer; leaves a dense one alone."""
    if num_experts(hf_config.to_dict()):
        layer.submodules.mlp.submodules.router = partial(Router, renormalise=hf_config.norm_topk_prob)


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether the parameter is an expert's, by megatron-core's mark."""
    return not getattr(parameter, "allreduce", True)


def mark_experts(model: nn.Module) -> None:
    """Mark every expert's weights, before the data-parallel wrapper sorts parameters by this mark.

    megatron-core marks them only under expert parallelism. Without the mark experts that are whole on each of several
    tensor-parallel ranks (expert_tensor_parallel_size 1) would never be summed over these.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            for parameter in layer.experts.parameters():
                parameter.allreduce = False


def sum_expert_grads(policy: Policy) -> None:
    """Make the experts' `main_grad` whole within a block, where expert parallelism does not span one replica's ranks.

    Part of `step.reduce_model_parallel_grads`. Example: TP4 and EP2 with whole experts (expert_tensor_parallel_size 1).
    Ranks 0 and 2 hold the same experts and have seen half of the sequence each.
    """
    if policy.parallel.expert_sum_group is None:
        return
    for chunk in policy.chunks:
        for buffer in chunk.expert_parallel_buffers:
            dist.all_reduce(buffer.grad_data, group=policy.parallel.expert_sum_group)


def share_expert_grads(policy: Policy) -> None:
    """Divide among the ranks of a block what `sum_expert_grads` gave to each of them in full.

    Part of `step.reduce_data_parallel_grads`: megatron-core sums experts over all ranks that hold them, these too.
    """
    if policy.parallel.expert_sum_group is None:
        return
    for chunk in policy.chunks:
        for buffer in chunk.expert_parallel_buffers:
            buffer.grad_data.div_(policy.parallel.expert_sum_group.size())


def splits_of(model: nn.Module, parallel: Parallel) -> Mapping[nn.Module, SplitsFn]:
    """For each linear layer of each local expert: whose the tokens are that it is given in the forward under way.

    Empty where all of them belong to this rank's replica. For experts that are modules of their own.
    """
    return {
        linear: partial(sources.splits, index)
        for experts, sources in _dispatched(model, SequentialMLP, parallel)
        for index, expert in enumerate(experts.local_experts)
        for linear in (expert.linear_fc1, expert.linear_fc2)
    }


def grouped_splits_of(model: nn.Module, parallel: Parallel) -> Mapping[nn.Module, Sequence[SplitsFn]]:
    """The same for Transformer Engine's grouped layers: for each of them, of every local expert."""
    return {
        linear: [partial(sources.splits, index) for index in range(experts.num_local_experts)]
        for experts, sources in _dispatched(model, TEGroupedMLP, parallel)
        for linear in (experts.linear_fc1, experts.linear_fc2)
    }


def _dispatched(model: nn.Module, kind: type[nn.Module], parallel: Parallel) -> Iterator[tuple[Any, _Sources]]:
    """The experts of each layer, if they are of this kind and see other replicas' tokens, and where these come from."""
    if parallel.block_size == 1:
        return
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer) and isinstance(layer.experts, kind)]
    if layers:
        replicas = _senders(layers[0].token_dispatcher, parallel.block_rank)
        for layer in layers:
            yield layer.experts, _Sources(layer.token_dispatcher, replicas)


def _senders(dispatcher: MoEAlltoAllTokenDispatcher, block_rank: int) -> list[int]:
    """The replica of each rank that sends tokens, in the order in which an expert sees them.

    That is the order of their expert-tensor-parallel and then of their expert-parallel ranks; in the group of both the
    expert-tensor-parallel rank counts fastest.
    """
    replicas = [0] * dispatcher.tp_ep_group.size()
    dist.all_gather_object(replicas, block_rank, group=dispatcher.tp_ep_group)
    return [
        replicas[ep * dispatcher.tp_size + etp] for etp in range(dispatcher.tp_size) for ep in range(dispatcher.ep_size)
    ]


class _Sources:
    """How many tokens each rank has sent to the local experts of one layer, as the layer's dispatcher last counted."""

    def __init__(self, dispatcher: MoEAlltoAllTokenDispatcher, replicas: list[int]) -> None:
        self._dispatcher, self._replicas = dispatcher, replicas
        self._counts: list[list[int]] = []  # [etp * ep, local experts]
        self._preprocess = dispatcher.preprocess
        dispatcher.preprocess = self._record

    def splits(self, expert: int) -> Splits:
        """(replica of the block, number of tokens) of each stretch that the local expert sees; replicas may recur."""
        stretches = zip(self._replicas, (counts[expert] for counts in self._counts), strict=True)
        return [(replica, sum(n for _, n in group)) for replica, group in groupby(stretches, key=lambda pair: pair[0])]

    def _record(self, routing_map: Tensor) -> Tensor:
        tokens_per_expert = self._preprocess(routing_map)
        dispatcher = self._dispatcher
        if dispatcher.num_local_experts > 1:
            counts = dispatcher.num_global_tokens_per_local_expert
        else:  # the dispatcher keeps this rank's row only
            counts = gather_from_sequence_parallel_region(dispatcher.output_splits, group=dispatcher.tp_group)
        self._counts = counts.reshape(-1, dispatcher.num_local_experts).tolist()
        return tokens_per_expert
