"""The assignment of a step's samples to replicas, fold by fold, with equal numbers of tokens where folds allow it.

A replica usually has its own folds. Replicas share folds if they share experts, because expert gradients mix their
samples.

A prompt's position alone decides its fold: folds by length would not be equal in distribution, and signal and noise
would be biased. Which replica computes a fold, or a prompt of a shared fold, changes no sum. So tokens decide that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.data.packing import balanced_shares, empty_batch, local_folds
from oblr_megatron.memory.pass_plan import num_folds
from oblr_megatron.model.parallel import share_group
from oblr_megatron.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.types import MicroBatch, Sample


class Sharing:
    """This replica's share of the folds of a step.

    Args:
        parallel: the layout.
        config: num_prompts, group_size and the folds are read.
    """

    def __init__(self, parallel: Parallel, config: Config) -> None:
        self._parallel, self._group_size, self._num_prompts = parallel, config.group_size, config.num_prompts
        self.num_folds = num_folds(config)  # R
        self.one_sum = not config.algo.snr.needs_folds  # no estimator reads the gradient of a fold
        self.size = parallel.block_size  # replicas that share a fold
        self.rank = parallel.dp_rank % self.size
        self.group = share_group(parallel, self.size)

    @property
    def folds_of_a_rank(self) -> int:
        """Folds that each replica has a share of."""
        return 1 if self.one_sum else self.num_folds * self.size // self._parallel.dp_size

    def folds(self, positions: Sequence[int], samples: Sequence[Sample], active: Tensor) -> list[list[int]]:
        """This replica's sample indices in each of its folds, prompt-major, without inactive groups.

        Replicas get equal numbers of tokens as far as folds allow it. Inactive groups count, so that all calls for the
        same prompts make the same division. In a part of a step, a fold's number alone decides its replica.

        Args:
            positions: in the step's batch, of the k prompts that there are samples of: 0 to Q - 1 for a whole step.
            samples: [k * G], the same on every rank.
            active: [k] bool.

        Returns:
            For each fold, indices among the k * G samples; one list if the estimator of the signal needs no folds.
        """
        size, place = self._group_size, {position: number for number, position in enumerate(positions)}
        tokens = {
            position: sum(sample.num_tokens for sample in samples[number * size : (number + 1) * size])
            for position, number in place.items()
        }
        if self.one_sum:
            prompts = [_share(sorted(place), tokens, self._parallel.dp_size, self._parallel.dp_rank)]
        else:
            prompts = [_share(fold, tokens, self.size, self.rank) for fold in self._own_folds(tokens)]
        return [
            [place[prompt] * size + i for prompt in own if active[place[prompt]] for i in range(size)]
            for own in prompts
        ]

    def _own_folds(self, tokens: Mapping[int, int]) -> list[list[int]]:
        """The positions that have tokens, in each fold that this replica has a share of."""
        replicas, own = self._parallel.dp_size // self.size, self._parallel.dp_rank // self.size
        if len(tokens) < self._num_prompts:  # a fold stays on one replica through all parts of a step
            folds = local_folds(self._num_prompts, self.num_folds, own, replicas)
        else:
            everything = local_folds(self._num_prompts, self.num_folds, 0, 1)
            lengths = [sum(tokens[position] for position in fold) for fold in everything]
            folds = [everything[number] for number in balanced_shares(lengths, replicas)[own]]
        return [[position for position in fold if position in tokens] for fold in folds]

    def even(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Append empty microbatches until all replicas that share experts have the same number."""
        parallel = self._parallel
        if parallel.block_size == 1:
            return batches
        most = torch.tensor(len(batches), device=parallel.device)
        all_reduce(most, parallel.block_group, dist.ReduceOp.MAX)
        return batches + [empty_batch() for _ in range(int(most) - len(batches))]

    def sum(self, policy: Policy) -> None:
        """All-reduce a fold's gradient over the replicas that share it."""
        if self.size > 1:
            for grad in self._own_parts(policy):
                dist.all_reduce(grad, group=self.group)

    def undo_repeats(self, policy: Policy) -> None:
        """Divide by the number of replicas that share a fold, so that the sum over replicas counts it once."""
        if self.size > 1:
            for grad in self._own_parts(policy):
                grad.div_(self.size)

    def _own_parts(self, policy: Policy) -> Sequence[Tensor]:
        """The gradients of which each replica that shares a fold has its own part.

        Experts are left out: their gradient has the samples of the whole block.
        """
        return [buffer.grad_data for chunk in policy.chunks for buffer in chunk.buffers]


def _share(prompts: Sequence[int], tokens: Mapping[int, int], replicas: int, rank: int) -> list[int]:
    """The prompts of one of several replicas that divide them, in ascending order."""
    return [prompts[number] for number in balanced_shares([tokens[prompt] for prompt in prompts], replicas)[rank]]
