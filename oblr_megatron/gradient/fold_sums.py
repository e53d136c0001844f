"""The gradient of a step, summed fold by fold, from all prompts at once or from prompts that come in parts.

    sums = FoldSums(policy, sharing, config, whole=False)
    sums.add(folds, add)                    # for each part; add(numbers) adds some samples' gradient to main_grad
    fold_sq_norm_mean = sums.finish()       # g in main_grad

A fold's gradient is the same sum in both cases, up to the order of its terms. Which fold a prompt belongs to is decided
by its position in the batch, never by when it was finished. So the folds stay equal in distribution, although short
responses come first, and M = mean_f ||g_f||^2 keeps its expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from oblr_megatron.model.optimizer import grad_sq_norm
from oblr_megatron.model.step import (
    finish_overlapped_grads,
    reduce_data_parallel_grads,
    reduce_model_parallel_grads,
)
from oblr_megatron.norms.buffer import megatron_buffers
from oblr_megatron.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.gradient.folds import Sharing
    from oblr_megatron.model.policy import Policy


class FoldSums:
    """Sums the gradients of this rank's folds; main_grad holds one fold, or a part of one, at a time.

    A whole step with several folds on a rank keeps one more gradient. Parts keep one more for each fold of the rank.

    Args:
        policy: the model.
        sharing: this rank's folds.
        config: parallel.overlap_grad_reduce is read.
        whole: whether a single `add` brings all prompts.
    """

    def __init__(self, policy: Policy, sharing: Sharing, config: Config, *, whole: bool) -> None:
        self._policy, self._sharing, self._whole = policy, sharing, whole
        self._overlapped = config.parallel.overlap_grad_reduce
        self._grads = [buffer.grad_data for chunk in policy.chunks for buffer in megatron_buffers(chunk)]
        folds = sharing.folds_of_a_rank
        self._parts = [[torch.zeros_like(grad) for grad in self._grads] for _ in range(0 if whole else folds)]
        self._folds, self._total = folds, list[torch.Tensor]()
        self._sq_norms = torch.zeros((), dtype=torch.float64, device=policy.parallel.device)

    def add(self, folds: Sequence[list[int]], add_gradient: Callable[[list[int]], None]) -> None:
        """Add the gradients of this rank's samples.

        Args:
            folds: their numbers in each of its folds, in prompt-major order.
            add_gradient: adds the gradient of the samples of one fold to `main_grad`, which is zero before.
        """
        if self._whole and self._folds > 1:  # not before: a pass for norms comes first, and needs memory
            self._total = [torch.zeros_like(grad) for grad in self._grads]
        for fold, numbers in enumerate(folds):
            if not (self._whole or numbers or self._sharing.size > 1):
                continue  # replicas that share a fold go through its collectives together
            self._policy.zero_grad()
            add_gradient(numbers)
            if not self._whole:
                torch._foreach_add_(self._parts[fold], self._grads)
            elif not self._sharing.one_sum:
                self._close()

    def finish(self) -> float:
        """Leave g in main_grad, summed over all ranks; returns M = mean_f ||g_f||^2, NaN without folds.

        The further gradients are freed: push, evaluation and the next step have other uses for the memory.
        """
        if self._sharing.one_sum:
            for part in self._parts:
                torch._foreach_copy_(self._grads, part)
            self._parts = []
            if self._overlapped:  # the backward pass began the sum of each bucket when its last gradient was complete
                finish_overlapped_grads(self._policy)
            else:
                reduce_model_parallel_grads(self._policy)
                reduce_data_parallel_grads(self._policy)
            return math.nan
        for fold, part in enumerate(self._parts):
            torch._foreach_copy_(self._grads, part)
            self._close()
            if fold == 0 and len(self._parts) > 1:
                torch._foreach_copy_(part, self._grads)  # reduced; the first fold's buffer takes the total
                self._total = part
        if self._total:
            torch._foreach_copy_(self._grads, self._total)
        self._parts, self._total = [], []
        self._sharing.undo_repeats(self._policy)
        reduce_data_parallel_grads(self._policy)
        all_reduce(self._sq_norms, self._policy.parallel.dp_group)
        return self._sharing.num_folds * float(self._sq_norms) / self._sharing.size

    def _close(self) -> None:
        """Reduce the fold in main_grad within the replica, and take its norm."""
        reduce_model_parallel_grads(self._policy)
        self._sharing.sum(self._policy)
        self._sq_norms += grad_sq_norm(self._policy, reduced=False)
        if self._total:
            torch._foreach_add_(self._total, self._grads)
