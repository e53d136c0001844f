"""The assignment of a step's samples to replicas, fold by fold.

A replica usually has its own folds. Replicas share folds if they share experts, because expert gradients mix their
samples, or if the responses of a prompt are spread over several replicas (`gradnorm.stash_spread`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.data.packing import empty_batch, local_folds
from oblr_megatron.memory.pass_plan import num_folds
from oblr_megatron.model.parallel import share_group

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.types import MicroBatch


class Sharing:
    """This replica's share of the folds of a step.

    Args:
        parallel: the layout.
        config: num_prompts, group_size, the folds and gradnorm.stash_spread are read.
    """

    def __init__(self, parallel: Parallel, config: Config) -> None:
        self._parallel, self._group_size, self._num_prompts = parallel, config.group_size, config.num_prompts
        self.num_folds = num_folds(config)  # R
        self._spread = config.gradnorm.stash_spread if config.gradnorm.mode == "stash" else 1
        self.size = max(parallel.block_size, self._spread)  # replicas that share a fold
        self.rank = parallel.dp_rank % self.size
        self.group = share_group(parallel, self.size)

    @property
    def folds_of_a_rank(self) -> int:
        """Folds that each replica has a share of."""
        return self.num_folds * self.size // self._parallel.dp_size

    def folds(self, positions: Sequence[int], active: Tensor, *, split_prompts: bool) -> list[list[int]]:
        """This replica's sample indices in each of its folds, prompt-major, without inactive groups.

        Args:
            positions: in the step's batch, of the k prompts that there are samples of: 0 to Q - 1 for a whole step.
            active: [k] bool.
            split_prompts: with `stash_spread`, divide the responses of each prompt over replicas; else whole prompts.

        Returns:
            For each fold, indices among the k * G samples.
        """
        parallel, group = self._parallel, self._group_size
        folds = local_folds(
            self._num_prompts, self.num_folds, parallel.dp_rank // self.size, parallel.dp_size // self.size
        )
        place = {position: number for number, position in enumerate(positions) if active[number]}
        if split_prompts and self._spread > 1:
            return [
                [place[prompt] * group + i for prompt in fold if prompt in place for i in self._own_responses]
                for fold in folds
            ]
        return [
            [
                place[prompt] * group + i
                for prompt in fold[self.rank :: self.size]
                if prompt in place
                for i in range(group)
            ]
            for fold in folds
        ]

    @property
    def _own_responses(self) -> range:
        """The responses of each prompt that this replica has with `stash_spread`."""
        return range(self.rank, self._group_size, self.size)

    def even(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Append empty microbatches until all replicas that share experts have the same number."""
        parallel = self._parallel
        if parallel.block_size == 1:
            return batches
        most = torch.tensor(len(batches), device=parallel.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel.block_group)
        return batches + [empty_batch(device=parallel.device) for _ in range(int(most) - len(batches))]

    def sum(self, policy: Policy) -> None:
        """All-reduce a fold's gradient over the replicas that share it; experts are already summed."""
        if self.size > 1:
            for grad in _dense(policy):
                dist.all_reduce(grad, group=self.group)

    def undo_repeats(self, policy: Policy) -> None:
        """Divide by the number of replicas that share a fold, so that the sum over replicas counts it once."""
        if self.size > 1:
            for grad in _dense(policy):
                grad.div_(self.size)


def _dense(policy: Policy) -> Sequence[Tensor]:
    """The gradient buffers of all parameters except experts."""
    return [buffer.grad_data for chunk in policy.chunks for buffer in chunk.buffers]
