"""The model of every rank, built on meta devices, and its parameters.

    models = build_models(hf_config, config, world_size)
    models.total, models.holdings[0].ranks, models.holdings[0].parameters

Ranks that differ only in their samples hold the same model, so one of them is built. The layers are megatron-core's
own; Transformer Engine's have equally many parameters under other names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron.core.models.gpt import GPTModel

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.config import Config, ModelConfig, ParallelConfig
from oblr_megatron.model import moe
from oblr_megatron.model.lora.adapters import attach, is_adapter
from oblr_megatron.model.optimizer import counted_here
from oblr_megatron.model.parallel import Parallel, Position, positions
from oblr_megatron.model.policy import build_model
from oblr_megatron.model.transformer_config import HFConfig, hf_config_of, transformer_config_of
from oblr_megatron.padding import padded_vocab_size
from oblr_megatron.preflight.fake_ranks import standing_as
from oblr_megatron.weights.adapter import AdapterShape, adapter_shapes
from oblr_megatron.weights.names import ModelShape

KERNELS_OFF = {"recompute_granularity": "none"}
"""Options without parameters that need kernels, which a login node may not have."""


@dataclass(frozen=True, slots=True)
class RankParameters:
    """The parameters on ranks with the same position in the model, in elements.

    Example, Qwen3-0.6B under TP2 on 4 ranks:
        RankParameters(position=Position(tp=0, ...), ranks=(0, 2), dense=298043392, experts=0, counted_dense=..., ...)
    """

    position: Position  # position of the first rank
    ranks: tuple[int, ...]
    dense: int
    experts: int
    counted_dense: int  # dense elements that count here, not on another tensor-parallel rank or pipeline stage
    counted_experts: int
    adapters: int  # elements of model.lora's adapters

    @property
    def parameters(self) -> int:
        """Dense and expert elements, without adapters."""
        return self.dense + self.experts

    @property
    def trained(self) -> int:
        """Elements with a gradient."""
        return self.adapters or self.parameters


@dataclass(frozen=True, slots=True)
class Models:
    """The models of all ranks. Example: Models(holdings=(RankParameters(...), ...), total=596049920, trained=...)"""

    holdings: tuple[RankParameters, ...]
    total: int  # parameters of the model without vocabulary padding and adapters
    trained: int  # parameters with a gradient


def build_models(hf_config: Mapping[str, Any], config: Config, world_size: int) -> Models:
    """Build the model of each position; every rank belongs to one position.

    Args:
        hf_config: the model's config.json, checked against the layout (`checks.layout.check_layout`).
        config: the run.
        world_size: its ranks.
    """
    model = hf_config_of(hf_config)
    places = rank_positions(config.parallel, world_size)
    holdings = []
    for ranks in _same_model(places, experts=bool(num_experts(hf_config))):
        with standing_as(ranks[0], world_size, config.parallel) as parallel:
            _check_position(parallel, places[ranks[0]])
            holdings.append(RankParameters(places[ranks[0]], ranks, *_count(model, config, parallel)))
    total, lora = _total(holdings, model, config), config.model.lora
    adapters = adapter_shapes(ModelShape.of(hf_config), AdapterShape(lora.rank, lora.targets)).values()
    return Models(tuple(holdings), total, sum(map(prod, adapters)) if lora.rank else total)


def rank_positions(parallel: ParallelConfig, world_size: int) -> list[Position]:
    """The position of every rank, from megatron-core's own generator of groups."""
    tp = parallel.tensor_model_parallel_size
    return positions(
        world_size,
        tp=tp,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size or tp,
    )


def _same_model(places: list[Position], *, experts: bool) -> list[tuple[int, ...]]:
    """Ranks grouped by the part of the model they hold, e.g. [(0, 2), (1, 3)] for TP2 on 4 ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        key = (place.pp, place.tp, place.cp, *((place.ep, place.etp) if experts else ()))
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _check_position(parallel: Parallel, place: Position) -> None:
    """The position agrees with megatron-core's groups."""
    own = (parallel.tp_rank, parallel.pp_rank, parallel.cp_rank, parallel.dp_rank, parallel.ep_rank, parallel.etp_rank)
    expected = (place.tp, place.pp, place.cp, place.dp, place.ep, place.etp)
    assert own == expected, f"rank {parallel.rank} is at {own} by its groups, but was expected at {expected}"


def _count(hf_config: HFConfig, config: Config, parallel: Parallel) -> tuple[int, int, int, int, int]:
    """(dense, experts, counted dense, counted experts, adapters) of this rank."""
    sizes = [0, 0, 0, 0, 0]
    for chunk in _chunks(hf_config, config.model, parallel, config.parallel):
        for name, parameter in chunk.named_parameters():
            if is_adapter(name):
                sizes[4] += parameter.numel()
                continue
            expert = moe.is_expert(parameter)
            sizes[expert] += parameter.numel()
            if expert or counted_here(parameter, parallel):
                sizes[2 + expert] += parameter.numel()
    return sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]


def _chunks(
    hf_config: HFConfig, config: ModelConfig, parallel: Parallel, options: ParallelConfig
) -> Iterator[GPTModel]:
    """The model chunks of this rank, on meta devices."""
    local = config.model_copy(update={"transformer_impl": "local", "fp8": "none", "batch_invariant": False})
    options = options.model_copy(update=KERNELS_OFF)
    padded = padded_vocab_size(hf_config.vocab_size, config.make_vocab_size_divisible_by, parallel.tp_size)
    with warnings.catch_warnings():  # experts that are not split by tensor parallelism cause this warning
        warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`")
        transformer_config = transformer_config_of(hf_config, local, parallel, options)
        for chunk in range(parallel.vp_size):
            model = build_model(hf_config, transformer_config, local, parallel, padded, chunk)
            if config.lora.rank:
                attach(model, config.lora)
            yield model


def _total(holdings: list[RankParameters], hf_config: HFConfig, config: Config) -> int:
    """Count each shard once: the dense weights of one replica and one copy of the experts."""
    dense = {(held.position.pp, held.position.tp): held.counted_dense for held in reversed(holdings)}
    experts = {
        (held.position.pp, held.position.ep, held.position.etp): held.counted_experts for held in reversed(holdings)
    }
    options = config.model
    tp = config.parallel.tensor_model_parallel_size
    padding = padded_vocab_size(hf_config.vocab_size, options.make_vocab_size_divisible_by, tp) - hf_config.vocab_size
    tables = 1 if hf_config.tie_word_embeddings else 2
    return sum(dense.values()) + sum(experts.values()) - tables * padding * hf_config.hidden_size
