"""Padding of microbatches and of the vocabulary, so that both divide among ranks. Imports no torch.

    padding = padding_of(config.model, config.parallel)
    padding.row, padding.sample, padding.rounded(1000)

FP8 matrix products need a multiple of 16 tokens, of 32 for MXFP8 (Transformer Engine's `Fp8Padding`, megatron-core's
`get_fp8_align_size`). With sequence parallelism a rank's part must itself be a multiple of 8 tokens
(`assert_dim_for_fp8_exec`). It is gathered in FP8, so that it must hold whole scaling blocks of 32 or 128 tokens
(`assert_dim_for_all_gather`, Transformer Engine 2.8 to 2.12). megatron-core pads the tokens of experts itself.

Attention of Transformer Engine builds a cuDNN plan for each new length of rows, which takes about 50 ms. Rows in
multiples of 128 have few lengths. A run with packed rows needs them, too: its norm pass has one sample in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Protocol

FP8_TOKENS = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""The number of tokens in a matrix product is a multiple of this."""
FP8_GATHERED_TOKENS = {"tensorwise": 8, "blockwise": 128, "mxfp8": 32}
"""With sequence parallelism, the number of tokens on each rank is a multiple of this."""
VOCABULARY_MULTIPLE = 64
"""vLLM pads the rows of a vocabulary to a multiple of this before workers share them; `DEFAULT_VOCAB_PADDING_SIZE`."""
PLANNED_TOKENS = 128
"""Rows of Transformer Engine's layers are a multiple of this; see above. Not yet run on a GPU."""


class LayoutSizes(Protocol):
    """The fields of `ParallelConfig` that decide the padding; the norms' library loads no configuration."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...


class Precision(Protocol):
    """The fields of `ModelConfig` that decide the padding."""

    @property
    def fp8(self) -> str: ...
    @property
    def fp8_recipe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Padding:
    """Multiples of tokens, counted before the sequence is split over ranks.

    Example, two context-parallel ranks with tensorwise FP8: Padding(sample=4, row=32)
    """

    sample: int = 1  # length of each packed sample
    row: int = 1  # length of the microbatch's sequence, packed or in rows; a multiple of `sample`

    @classmethod
    def of(
        cls, *, tp_size: int, cp_size: int, sequence_parallel: bool, recipe: str | None = None, planned: bool = False
    ) -> Padding:
        """The padding of a layout.

        Args:
            tp_size: tensor-parallel ranks.
            cp_size: context-parallel ranks; each gets two chunks of equal length of every sequence.
            sequence_parallel: whether tensor-parallel ranks split these chunks further.
            recipe: FP8 recipe; None without FP8.
            planned: whether attention builds a plan for each length of the row.
        """
        sample = 1 if cp_size == 1 else 2 * cp_size
        split = tp_size if sequence_parallel else 1
        of_rank = split
        if recipe is not None:
            gathered = FP8_GATHERED_TOKENS[recipe] if split > 1 else 1
            of_rank = lcm(split * gathered, FP8_TOKENS[recipe])
        return cls(sample, lcm(sample * split, cp_size * of_rank, PLANNED_TOKENS if planned else 1))

    def rounded(self, length: int) -> int:
        """Padded length of a row of `length` tokens."""
        return -(-length // self.row) * self.row

    def budget(self, tokens: int) -> int:
        """Most tokens of packed samples, each padded to `sample`, with which the padded row stays within `tokens`."""
        return max(tokens // self.row * self.row, self.sample)


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """Padded vocabulary, e.g. (151936, 128, 2) -> 152064."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def padding_of(model: Precision, parallel: LayoutSizes, *, transformer_engine: bool = False) -> Padding:
    """The padding of a run; `transformer_engine`: whether the layers are Transformer Engine's."""
    return Padding.of(
        tp_size=parallel.tensor_model_parallel_size,
        cp_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        recipe=None if model.fp8 == "none" else model.fp8_recipe,
        planned=transformer_engine,
    )
