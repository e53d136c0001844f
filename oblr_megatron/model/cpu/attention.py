"""RMSNorm and core attention of the local layer spec (without Transformer Engine), on torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from oblr_megatron.model.sequence import PackedRows, chunks_of


class RMSNorm(nn.RMSNorm):
    """RMSNorm that supports sequence parallelism; megatron-core's wrapper of torch's RMSNorm refuses it.

    megatron-core's gradient reduction looks for the attribute `weight.sequence_parallel`: with the sequence split, each
    tensor-parallel rank has only its own tokens' part of this weight's gradient. The q and k norms act inside
    attention, on whole sequences, and are reduced by name. They have the attribute too, as in Transformer Engine.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SdpaAttention(nn.Module):
    """Causal grouped-query attention by torch's scaled_dot_product_attention, exact under context parallelism.

    Rows are padded on the right, so that the causal mask already hides padding from real tokens. Each packed sample
    attends to itself. Neighbours of equal length share one call. Padding all samples to one length was measured: it
    helps only if lengths are equal. Under context parallelism keys and values are gathered and queries stay. Each of a
    rank's two chunks attends to the prefix of the sequence that ends with that chunk.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None, "megatron-core's config sets the size of a head"
        assert pg_collection is not None, "megatron-core's attention passes its process groups"
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [t, b, heads / tp, head_dim], packed [t, heads / tp, head_dim]
        key: Tensor,  # [t, b, groups / tp, head_dim], packed [t, groups / tp, head_dim]
        value: Tensor,  # like the key
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """Returns [t, b, heads / tp * head_dim], packed [t, heads / tp * head_dim]."""
        assert attention_mask is None and attention_bias is None, "causal mask only"
        if packed_seq_params is None:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
            return self._attend(query, self._gathered(key), self._gathered(value)).transpose(0, 1).flatten(2)
        key, value = self._gathered(key), self._gathered(value)
        parts = []
        for start, stop, samples in self._runs(packed_seq_params):
            part = query[start:stop].unflatten(0, (samples, -1))
            keys, values = (tensor[:, start:stop].unflatten(1, (samples, -1)) for tensor in (key, value))
            parts.append(self._attend(part, keys, values).flatten(0, 1))
        return _joined(parts, dim=0).flatten(1)

    def _runs(self, packed: PackedRows) -> Iterator[tuple[int, int, int]]:
        """Runs of neighbouring samples of equal length: (start, stop) in this rank's tokens, and number of samples."""
        start = 0
        for length, run in groupby(packed.lengths):
            samples = len(list(run))
            stop = start + samples * length // self.cp_group.size()
            yield start, stop, samples
            start = stop

    def _gathered(self, part: Tensor) -> Tensor:
        """All-gather over context-parallel ranks: [cp, ...]; backward is a reduce-scatter."""
        whole = gather_from_sequence_parallel_region(part, group=self.cp_group)
        return whole.unflatten(0, (self.cp_group.size(), -1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of n samples of equal length.

        query [n, t, heads, head_dim], key and value [cp, n, t, groups, head_dim] -> like the query.
        """
        chunks = chunks_of(self.cp_group.rank(), self.cp_group.size())
        key, value = _in_order(key), _in_order(value)
        parts = []
        for chunk, part in zip(chunks, query.chunk(len(chunks), dim=1), strict=True):
            seen = (chunk + 1) * part.shape[1]
            parts.append(self._causal(part, key[:, :seen], value[:, :seen]))
        return _joined(parts, dim=1)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention aligned to the end: the last query sees every key, each earlier query one key fewer."""
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        whole = query.shape[2] == key.shape[2]
        context = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if whole else causal_lower_right(query.shape[2], key.shape[2]),
            is_causal=whole,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.transpose(1, 2)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat, without a copy if there is only one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _in_order(gathered: Tensor) -> Tensor:
    """Each rank's tokens of n samples [cp, n, t, ...] -> all tokens in sequence order [n, cp * t, ...]."""
    if len(gathered) == 1:
        return gathered[0]
    early, late = gathered.unflatten(2, (2, -1)).unbind(2)  # rank r's chunks r and 2 cp - 1 - r
    return torch.cat([early, late.flip(0)]).movedim(0, 1).flatten(1, 2)
