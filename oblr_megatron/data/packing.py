"""Samples -> microbatches, in padded rows or packed; prompts of a step -> folds, and equal shares by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np
import torch

from oblr_megatron.errors import UserError
from oblr_megatron.types import RECORDED, MicroBatch, Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from oblr_megatron.config import ParallelConfig
    from oblr_megatron.padding import Padding

    Integers = NDArray[np.int64]


def pack(
    samples: Sequence[Sample],
    sample_indices: Sequence[int],
    *,
    max_tokens: int,
    pad_multiple: int = 1,
    packed: bool = False,
) -> list[MicroBatch]:
    """Microbatches of at most `max_tokens` padded tokens. A sample longer than that gets its own microbatch.

    Samples are sorted longest first, so that a microbatch holds samples of similar length and the first microbatch
    needs the most memory. Equal lengths keep the order of `sample_indices`; the result is deterministic.

    Args:
        samples: [N] of the step.
        sample_indices: positions in `samples` to pack, each at most once; may be empty.
        max_tokens: upper bound on the tokens of a microbatch, padding included.
        pad_multiple: padded lengths are multiples of this: of each sample if packed, else of each row.
        packed: concatenate the samples of a microbatch in one row, first fit. By default each sample is a row, padded
            to the longest.

    Example, inputs of 9, 4, 4, 3 tokens and max_tokens 12: rows [9], [4, 4, 3]; packed [9, 3], [4, 4].
    """
    widths = {index: -(-samples[index].num_inputs // pad_multiple) * pad_multiple for index in sample_indices}
    by_length = sorted(sample_indices, key=lambda index: -samples[index].num_inputs)
    if packed:
        groups = _first_fit(by_length, widths, max_tokens)
        return [_batch(samples, group, [widths[index] for index in group], packed=True) for group in groups]
    groups = _as_rows(by_length, widths, max_tokens)
    return [_batch(samples, group, [widths[group[0]]] * len(group)) for group in groups]


def one_per_microbatch(samples: Sequence[Sample], sample_indices: Sequence[int]) -> list[MicroBatch]:
    """One microbatch for each index, in the given order, without padding."""
    return [_batch(samples, [index], [samples[index].num_inputs]) for index in sample_indices]


def microbatches(
    samples: Sequence[Sample],
    sample_indices: Sequence[int],
    options: ParallelConfig,
    padding: Padding,
) -> list[MicroBatch]:
    """`pack` with the options of a run's configuration.

    `padding` is what the model applies (`Policy.padding`), so that the token bound includes it.
    """
    packed = options.packing == "packed"
    return pack(
        samples,
        sample_indices,
        max_tokens=padding.budget(options.micro_batch_tokens) if packed else options.micro_batch_tokens,
        pad_multiple=padding.sample if packed else padding.row,
        packed=packed,
    )


@dataclass(frozen=True)
class SampleBatches:
    """Samples, and microbatches of some of them with the options of a run (`norms.sample_gradients.Samples`)."""

    samples: Sequence[Sample]  # [N]
    options: ParallelConfig
    padding: Padding  # of the model

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each sample [N], prompt and response."""
        return [sample.num_tokens for sample in self.samples]

    def microbatches(self, numbers: Sequence[int], *, single: bool = False) -> list[MicroBatch]:
        """Microbatches of these samples; `single`: of one sample each, in the given order."""
        if single:
            return one_per_microbatch(self.samples, numbers)
        return microbatches(self.samples, numbers, self.options, self.padding)


def empty_batch() -> MicroBatch:
    """One masked token: lets a rank without samples take part in all collectives; its gradient is zero."""
    nothing = Sample(0, (0,), (), (), text="", finish_reason="stop", version=0)
    return _batch([nothing], [0], [1])


def check_folds(num_folds: int, dp_size: int) -> None:
    """Refuse folds of which one would be split over data-parallel ranks.

    Raises:
        UserError: dp_size does not divide num_folds.
    """
    if num_folds % dp_size:
        raise UserError(
            f"{num_folds} folds are not a multiple of the data-parallel size {dp_size}",
            where="config: algo.snr.num_folds",
            fix=f'set it (with estimator "prompts": num_prompts) to a multiple of {dp_size}, '
            'or algo.snr.estimator to "momentum", which needs no folds',
        )


def local_folds(num_prompts: int, num_folds: int, dp_rank: int, dp_size: int) -> list[range]:
    """The folds of one data-parallel rank, as ranges of prompt positions. The folds of all ranks in order are 0..Q-1.

    Example: local_folds(8, 4, dp_rank=1, dp_size=2) == [range(4, 6), range(6, 8)].
    """
    assert num_prompts % num_folds == num_folds % dp_size == 0, "checks come first: `config.checks` and `check_folds`"
    size, share = num_prompts // num_folds, num_folds // dp_size
    return [range(fold * size, (fold + 1) * size) for fold in range(dp_rank * share, (dp_rank + 1) * share)]


def balanced_shares(tokens: Sequence[int], shares: int) -> list[list[int]]:
    """Split items into shares of nearly equal tokens, at most ceil(n / shares) items each.

    An item goes to the share with the fewest tokens that has room.

    Graham's rule, longest first, with a bound on the count. Deterministic: of equal items the first goes first.

    Args:
        tokens: of each item, at least 0.
        shares: their number.

    Returns:
        The items of each share, in ascending order.

    Example: balanced_shares([9, 1, 5, 5], 2) == [[0, 1], [2, 3]].
    """
    most = -(-len(tokens) // shares)
    dealt: list[list[int]] = [[] for _ in range(shares)]
    with_room = [(0, share) for share in range(shares)]  # a heap: tokens so far, then the share's number
    for item in sorted(range(len(tokens)), key=lambda item: -tokens[item]):
        held, share = heappop(with_room)
        dealt[share].append(item)
        if len(dealt[share]) < most:
            heappush(with_room, (held + tokens[item], share))
    return [sorted(items) for items in dealt]


def _as_rows(by_length: Sequence[int], widths: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Group samples in the given order; a group is full when one more row of its first width would exceed the bound."""
    groups: list[list[int]] = []
    for index in by_length:
        if groups and (len(groups[-1]) + 1) * widths[groups[-1][0]] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _first_fit(by_length: Sequence[int], widths: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing bin packing: at most 11/9 OPT + 1 groups."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in by_length:
        group = next((number for number, left in enumerate(room) if widths[index] <= left), len(groups))
        if group == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[group].append(index)
        room[group] -= widths[index]
    return groups


def _batch(
    samples: Sequence[Sample],
    group: Sequence[int],
    widths: Sequence[int],
    *,
    packed: bool = False,
) -> MicroBatch:
    """A microbatch with one sample in each row, all of the same width, or with all samples in one row."""
    shape = (1, sum(widths)) if packed else (len(group), widths[0])
    ids, labels, mask, logprobs, index = (part.view(shape) for part in _laid_out(samples, group, widths))
    routes = _routes(samples, group, widths)
    return MicroBatch(
        ids,
        labels,
        mask,
        logprobs,
        sample_index=torch.tensor(list(group)),
        cu_seqlens=torch.tensor([0, *widths]).cumsum(0, dtype=torch.int32) if packed else None,
        token_index=index,
        routes=None if routes is None else routes.unflatten(0, shape),
        **_recorded(samples, group, widths, shape),
    )


def _routes(samples: Sequence[Sample], group: Sequence[int], widths: Sequence[int]) -> torch.Tensor | None:
    """Routes [sum of widths, layers, k], -1 without one; None if no sample has any. They stay in host memory.

    The routes of one token take 768 bytes (48 layers, k = 8), its other tensors 29. A pipeline stage needs only the
    routes of its layers, and those of one microbatch at a time.
    """
    given = [samples[index].routes for index in group]
    known = next((routes for routes in given if routes is not None), None)
    if known is None:
        return None
    laid_out = np.full((sum(widths), *known.shape[1:]), -1, dtype=np.int16)
    start = 0
    for index, routes, width in zip(group, given, widths, strict=True):
        if routes is not None:
            assert len(routes) == samples[index].num_tokens, "routes have one row for each token of prompt and response"
            read = samples[index].num_inputs
            laid_out[start : start + read] = routes[:read]
        start += width
    return torch.from_numpy(laid_out)


def _recorded(
    samples: Sequence[Sample], group: Sequence[int], widths: Sequence[int], shape: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """`MicroBatch.recorded_ids`, `recorded_logprobs` and `supported`; none if no sample has any."""
    sizes = {recorded.shape[1] for index in group if (recorded := samples[index].recorded) is not None}
    if not sizes:
        return {}
    laid_out = np.zeros((sum(widths), max(sizes)), RECORDED)
    laid_out["logprob"] = -np.inf
    supported, start = np.zeros(len(laid_out), bool), 0
    for index, width in zip(group, widths, strict=True):
        sample = samples[index]
        assert sample.recorded is not None or not sample.length, "some samples have recorded tokens, others none"
        if sample.recorded is not None:
            first = start + len(sample.prompt_ids) - 1  # the position that predicts the response's first token
            places = slice(first, first + len(sample.response_ids))
            laid_out[places, : sample.recorded.shape[1]] = sample.recorded
            supported[places] = sample.recorded["logprob"][:, -1:].ravel() == -np.inf
        start += width
    arrays = {f"recorded_{name}s": laid_out[name].copy() for name in ("id", "logprob")}
    if supported.any():
        arrays["supported"] = supported
    return {name: torch.from_numpy(values).unflatten(0, shape) for name, values in arrays.items()}


def _laid_out(samples: Sequence[Sample], group: Sequence[int], widths: Sequence[int]) -> list[torch.Tensor]:
    """Tokens, labels, mask, rollout log-probs and token indices, each [sum of widths], on the CPU.

    Each sample begins where the width of the one before it ends. All samples are written at once: a few tensor
    operations for each sample took a tenth of a small step.
    """
    chosen = [samples[index] for index in group]
    assert all(sample.prompt_ids for sample in chosen), "without a prompt, no position predicts the first token"
    assert all(len(sample.logprobs) == len(sample.response_ids) for sample in chosen), "each token needs one log-prob"
    assert all(len(sample.mask) in (0, len(sample.response_ids)) for sample in chosen), "a mask covers its response"
    prompts = np.array([len(sample.prompt_ids) for sample in chosen])
    responses = np.array([len(sample.response_ids) for sample in chosen])
    lengths, inputs = prompts + responses, np.array([sample.num_inputs for sample in chosen])
    starts = np.concatenate(([0], np.cumsum(widths)[:-1]))
    sequences = chain.from_iterable((sample.prompt_ids, sample.response_ids) for sample in chosen)
    tokens = np.fromiter(chain(*sequences, (0,)), dtype=np.int64, count=lengths.sum() + 1)  # 0 follows the last one
    places, _ = _positions(starts, inputs)
    read, _ = _positions(np.cumsum(lengths) - lengths, inputs)
    answers, _ = _positions(starts + prompts - 1, responses)  # the positions that predict the response
    written = np.fromiter(
        chain.from_iterable(sample.mask or repeat(True, len(sample.response_ids)) for sample in chosen), dtype=bool
    )
    _, within = _positions(starts, np.array([sample.length for sample in chosen]))
    total = int(sum(widths))
    ids, labels, index = (np.zeros(total, dtype=np.int64) for _ in range(3))
    mask, logprobs = np.zeros(total, dtype=bool), np.zeros(total, dtype=np.float32)
    ids[places], labels[places] = tokens[read], tokens[read + 1]
    drawn = np.fromiter(chain.from_iterable(sample.logprobs for sample in chosen), dtype=np.float32)
    mask[answers] = written
    logprobs[answers] = np.where(written, drawn, 0)
    index[answers[written]] = within
    return [torch.from_numpy(part) for part in (ids, labels, mask, logprobs, index)]


def _positions(starts: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """(start, start + 1, ...) of every run, count numbers each, and each number's place in its run."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within, within
