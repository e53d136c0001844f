"""Samples -> right-padded microbatches, and the split of a step's prompts into folds of whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oblr_megatron.errors import UserError
from oblr_megatron.types import MicroBatch, Sample

if TYPE_CHECKING:
    from oblr_megatron.config import ParallelConfig


def pack(
    samples: Sequence[Sample],
    sample_indices: Sequence[int],
    *,
    max_tokens: int,
    pad_multiple: int = 1,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Microbatches of at most `max_tokens` padded tokens; a sample that is longer alone goes alone.

    Longest first, so that samples of like length share a microbatch and the largest one shows a lack of memory at once;
    equal lengths keep the order of `sample_indices`. The same input gives the same microbatches.

    Args:
        samples: [N] of the step.
        sample_indices: positions in `samples` to pack, each at most once; may be empty.
        max_tokens: bound on rows times padded length.
        pad_multiple: padded lengths are multiples of this.
        device: where the tensors are made.

    Example, lengths 9, 4, 4, 3 and max_tokens 10: [9], [4, 4], [3].
    """
    by_length = sorted(sample_indices, key=lambda index: -_length(samples[index]))
    batches: list[MicroBatch] = []
    rows: list[int] = []
    width = 0
    for index in by_length:
        if rows and (len(rows) + 1) * width > max_tokens:
            batches.append(_batch(samples, rows, width, device))
            rows = []
        if not rows:
            width = -(-_length(samples[index]) // pad_multiple) * pad_multiple
        rows.append(index)
    if rows:
        batches.append(_batch(samples, rows, width, device))
    return batches


def one_per_microbatch(
    samples: Sequence[Sample],
    sample_indices: Sequence[int],
    *,
    pad_multiple: int = 1,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """One microbatch for each index, in the order given, padded to `pad_multiple` only."""
    widths = (-(-_length(samples[index]) // pad_multiple) * pad_multiple for index in sample_indices)
    return [_batch(samples, [index], width, device) for index, width in zip(sample_indices, widths, strict=True)]


def microbatches(
    samples: Sequence[Sample],
    sample_indices: Sequence[int],
    options: ParallelConfig,
    *,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """`pack` as the configuration says."""
    return pack(samples, sample_indices, max_tokens=options.micro_batch_tokens, device=device)


def empty_batch(*, device: torch.device | str = "cpu") -> MicroBatch:
    """One token of no sample's response: it takes part in every exchange between ranks and has no gradient."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=ids,
        labels=ids.clone(),
        mask=ids.bool(),
        rollout_logprobs=ids.to(torch.float32),
        sample_index=ids[0].clone(),
    )


def check_folds(num_prompts: int, num_folds: int, dp_size: int) -> None:
    """Refuse folds that are not equal, or that a data-parallel rank would have to share.

    Raises:
        UserError: num_folds does not divide num_prompts, or dp_size does not divide num_folds.
    """
    if num_prompts % num_folds:
        raise UserError(
            f"num_prompts {num_prompts} does not divide into algo.snr.num_folds {num_folds} equal folds",
            where="config: algo.snr.num_folds",
            mend="make num_prompts a multiple of num_folds",
        )
    if num_folds % dp_size:
        raise UserError(
            f"algo.snr.num_folds {num_folds} is not a multiple of the data-parallel size {dp_size}",
            where="config: algo.snr.num_folds",
            mend=f"set it to a multiple of {dp_size}, so that every rank holds whole folds",
        )


def local_folds(num_prompts: int, num_folds: int, dp_rank: int, dp_size: int) -> list[range]:
    """The folds of one data-parallel rank, each a range of prompt positions; all of them in order make 0..Q-1.

    Example: local_folds(8, 4, dp_rank=1, dp_size=2) == [range(4, 6), range(6, 8)].

    Raises:
        UserError: the sizes do not divide.
    """
    check_folds(num_prompts, num_folds, dp_size)
    size, share = num_prompts // num_folds, num_folds // dp_size
    return [range(fold * size, (fold + 1) * size) for fold in range(dp_rank * share, (dp_rank + 1) * share)]


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def _batch(samples: Sequence[Sample], rows: Sequence[int], width: int, device: torch.device | str) -> MicroBatch:
    """Fill the tensors on the CPU, then move each once."""
    shape = (len(rows), width)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    labels = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    for line, index in enumerate(rows):
        sample = samples[index]
        assert sample.prompt_ids, "a sample without a prompt has no position that predicts its first token"
        assert len(sample.logprobs) == len(sample.response_ids), "one log-prob for each response token"
        tokens = torch.tensor(sample.prompt_ids + sample.response_ids)
        first, last = len(sample.prompt_ids) - 1, len(tokens) - 1  # positions that predict the response
        input_ids[line, : len(tokens)] = tokens
        labels[line, :last] = tokens[1:]
        mask[line, first:last] = True
        logprobs[line, first:last] = torch.tensor(sample.logprobs)
    return MicroBatch(
        input_ids=input_ids.to(device),
        labels=labels.to(device),
        mask=mask.to(device),
        rollout_logprobs=logprobs.to(device),
        sample_index=torch.tensor(list(rows), device=device),
    )
