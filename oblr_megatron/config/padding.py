"""To which lengths a microbatch is padded so that it divides among ranks and FP8 takes it. Imports no torch.

    padding = padding_of(config.model, config.parallel)
    padding.row, padding.sample, padding.rounded(1000)

Transformer Engine multiplies in FP8 only what comes in whole blocks of tokens: 16 of them, 32 under MXFP8 (its own
`Fp8Padding`, megatron-core's `get_fp8_align_size`); and where a rank's part of the sequence is gathered as it was
rounded, under sequence parallelism, that part holds whole scaling blocks, of 32 tokens or of 128
(`assert_dim_for_all_gather`, Transformer Engine 2.8 to 2.12). Experts pad their own tokens, in megatron-core.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig, ParallelConfig

FP8_TOKENS = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""Tokens of a matrix product come in multiples of this."""
FP8_GATHERED_TOKENS = {"delayed": 1, "tensorwise": 1, "blockwise": 128, "mxfp8": 32}
"""Tokens of what one rank gives to a gather under sequence parallelism."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Multiples of tokens, counted before the sequence is cut over ranks.

    Example, two context-parallel ranks, FP8 by tensors: Padding(sample=4, row=32)
    """

    sample: int = 1  # of each packed sample
    row: int = 1  # of the sequence of a microbatch, packed or in rows; a multiple of `sample`

    @classmethod
    def of(cls, *, tp_size: int, cp_size: int, sequence_parallel: bool, recipe: str | None = None) -> Padding:
        """The padding of a layout.

        Args:
            tp_size: tensor-parallel ranks.
            cp_size: context-parallel ranks; each gets two chunks of equal length of every sequence.
            sequence_parallel: whether what such a rank has is split over the tensor-parallel ranks once more.
            recipe: of FP8; None: without it.
        """
        sample = 1 if cp_size == 1 else 2 * cp_size
        split = tp_size if sequence_parallel else 1
        of_rank = split
        if recipe is not None:
            gathered = FP8_GATHERED_TOKENS[recipe] if split > 1 else 1
            of_rank = lcm(split * gathered, FP8_TOKENS[recipe])
        return cls(sample, lcm(sample * split, cp_size * of_rank))

    def rounded(self, length: int) -> int:
        """Tokens of a row of `length` tokens, padded."""
        return -(-length // self.row) * self.row

    def budget(self, tokens: int) -> int:
        """The most that packed samples, each padded to `sample`, may come to so that the row stays within `tokens`."""
        return max(tokens // self.row * self.row, self.sample)


def padding_of(model: ModelConfig, parallel: ParallelConfig) -> Padding:
    """The padding that a run's configuration asks for."""
    return padding_of_layout(parallel, None if model.fp8 == "none" else model.fp8_recipe)


def padding_of_layout(parallel: ParallelConfig, recipe: str | None = None) -> Padding:
    """The padding of a configured layout; without FP8 unless its recipe is given."""
    return Padding.of(
        tp_size=parallel.tensor_model_parallel_size,
        cp_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        recipe=recipe,
    )
