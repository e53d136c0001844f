"""Maps the tensors of a megatron-core torch_dist checkpoint to Hugging Face tensors.

The mapping comes from megatron-core: the model is built on the meta device, and its sharded state dict has key, shape
and offset of every tensor. There are three naming schemes:

    decoder.layers.mlp.linear_fc1.weight            all layers in one tensor, [layers, 2 ffn, hidden]; written here
    decoder.layers.3.mlp.linear_fc1.weight          one tensor per layer (Megatron-LM's non_homogeneous_layers)
    decoder.layers.3.mlp.linear_fc1.weight_w, _v    separate gate and up, and one name per expert
                                                    (Megatron-LM's singleton_local_shards)

In each scheme gate and up of a layer are two pieces, because tensor parallelism shards them separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.models.gpt import GPTModel

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model import cpu
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_model
from oblr_megatron.model.transformer_config import HFConfig, transformer_config_of
from oblr_megatron.padding import padded_vocab_size
from oblr_megatron.weights.names import Entry, ModelShape, layer_of, table

State = dict[str, Any]
NAMINGS: tuple[Mapping[str, bool], ...] = ({}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True})


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint, or the part of it that belongs to one layer.

    Example, of layer 3 of Qwen3-0.6B's 28:
        Piece(ShardedTensor("decoder.layers.mlp.linear_fc1.weight", local_shape=(3072, 1024),
                            global_shape=(28, 6144, 1024), global_offset=(3, 3072, 0), ...),
              Entry("decoder.layers.3.mlp.linear_fc1.weight", "gate_up", ...), part=1)
    is model.layers.3.mlp.up_proj.weight.
    """

    sharded: ShardedTensor  # its data is on the meta device
    item: Entry
    part: int | None  # gate (0) or up (1); None if the piece is the whole parameter

    @property
    def hf(self) -> tuple[str, ...]:
        """Names of its Hugging Face tensors."""
        return self.item.hf if self.part is None else (self.item.hf[self.part],)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of its Hugging Face tensors."""
        return self.item.shapes if self.part is None else (self.item.shapes[self.part],)


@contextmanager
def single_process() -> Iterator[Parallel]:
    """megatron-core's process groups for a single process on the CPU; removed after the block."""
    with cpu.without_gpus():
        try:
            yield initialize(ParallelConfig(), alone=True)
        finally:
            shutdown()


def meta_model(hf_config: HFConfig, config: ModelConfig, parallel: Parallel) -> GPTModel:
    """The whole model on the meta device, built from megatron-core's layers, for a single process.

    Of `config`, `dtype` and `make_vocab_size_divisible_by` are read.
    """
    with cpu.on_meta():
        padded = padded_vocab_size(hf_config.vocab_size, config.make_vocab_size_divisible_by, 1)
        return build_model(hf_config, transformer_config_of(hf_config, config, parallel), config, parallel, padded)


def sharded_state(model: GPTModel, naming: Mapping[str, bool] = NAMINGS[0]) -> State:
    """A model's sharded state dict under one of NAMINGS, with separate gate and up; runs save under the first."""
    state: State = model.sharded_state_dict(metadata=dict(naming))
    apply_factories(state)
    return state


def pieces_of(state: State, shape: ModelShape) -> list[Piece]:
    """The pieces of a sharded state dict, in export order."""
    pieces = []
    for item in table(shape):
        stored = state[item.megatron]
        parts = list(enumerate(stored)) if isinstance(stored, list) else [(None, stored)]
        pieces += [Piece(sharded, item, part) for part, sharded in parts]
    return pieces


def by_layer(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Groups of pieces that are in memory together: each layer, and every other tensor by itself."""
    groups: list[list[Piece]] = []
    for layer, group in groupby(pieces, key=lambda piece: layer_of(piece.item)):
        together = list(group)
        groups += [together] if layer is not None else [[piece] for piece in together]
    return groups
