"""The two passes over a step's samples: the norm of every response's own gradient, then the policy gradient in folds.

Both give every rank of a replica the same figures; samples are dealt to data-parallel ranks by whole folds of prompts,
so that a fold never crosses a rank and its gradient norm needs no extra exchange of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.algo.loss import policy_gradient_loss
from oblr_megatron.data.packing import local_folds, one_per_microbatch, pack
from oblr_megatron.gradnorm import MODES, RatioFn
from oblr_megatron.model.logprobs import vocab_parallel_entropy, vocab_parallel_logprobs
from oblr_megatron.model.optimizer import grad_sq_norm
from oblr_megatron.model.step import reduce_data_parallel_grads, reduce_model_parallel_grads, run_schedule
from oblr_megatron.rollout.correction import truncated_ratios
from oblr_megatron.types import GradientStats, MicroBatch, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.qwen3 import Policy

LOSS, ENTROPY, ABS_DIFF, CUT, TOKENS = range(5)  # entries of the vector of sums that a microbatch returns


def measure_norms(policy: Policy, samples: Sequence[Sample], active: Tensor, config: Config) -> Tensor:
    """w_n = ||grad_theta sum_t rho_t log pi(o_t)||^2 of every sample of the active groups.

    Args:
        policy: the model; its gradient buffers are scratch and are left zero.
        samples: [N] of the step, the same on every rank.
        active: [Q] bool; the passes of the other groups are skipped, since their advantages are zero whatever w is.
        config: the run's configuration.

    Returns:
        [N] fp64, the same on every rank; 0 for samples of inactive groups.
    """
    parallel = policy.parallel
    keep = active.repeat_interleave(config.group_size)
    mine = [n for fold in _local_samples(policy, config) for n in fold if keep[n]]
    norms = torch.zeros(len(samples), dtype=torch.float64, device=parallel.device)
    batches = one_per_microbatch(samples, mine, device=parallel.device)
    if batches:
        measure = MODES[config.gradnorm.mode]
        norms[mine] = measure(policy, batches, temperature=config.rollout.temperature, ratios=_ratios(config))
    dist.all_reduce(norms, group=parallel.dp_group)
    return norms.cpu()


def policy_gradient(policy: Policy, samples: Sequence[Sample], coefficients: Tensor, config: Config) -> GradientStats:
    """Leave g = -sum_n c_n grad_theta sum_t rho_t log pi(o_t) in main_grad, summed over all ranks.

    The gradient is taken fold by fold: beside g it yields M = mean_f ||g_f||^2, with g_f the gradient of fold f scaled
    to stand for the whole batch (R times its share of the sum).

    Args:
        policy: the model; its gradient buffers are overwritten.
        samples: [N] of the step, the same on every rank.
        coefficients: [N] fp64, advantage times the aggregation's constant; samples with 0 are left out of the pass.
        config: the run's configuration.
    """
    folds = config.algo.snr.num_folds
    mine = _local_samples(policy, config)
    accumulated = _Accumulator(policy, len(mine))
    sums = torch.zeros(5, dtype=torch.float64, device=policy.parallel.device)
    fold_sq_norms = torch.zeros((), dtype=torch.float64, device=policy.parallel.device)
    for indices in mine:
        used = [n for n in indices if coefficients[n] != 0]
        policy.zero_grad()
        sums += _accumulate(policy, samples, used, coefficients, config)
        reduce_model_parallel_grads(policy)
        fold_sq_norms += grad_sq_norm(policy)
        accumulated.add()
    accumulated.finish()
    reduce_data_parallel_grads(policy)
    dist.all_reduce(sums, group=policy.parallel.pp_group)  # only the last stage has any
    dist.all_reduce(sums, group=policy.parallel.dp_group)
    dist.all_reduce(fold_sq_norms, group=policy.parallel.dp_group)
    tokens = int(sums[TOKENS])
    return GradientStats(
        loss=float(sums[LOSS]),
        sq_norm=grad_sq_norm(policy),
        fold_sq_norm_mean=folds * float(fold_sq_norms),
        num_folds=folds,
        entropy=float(sums[ENTROPY]) / max(tokens, 1),
        logprob_abs_diff=float(sums[ABS_DIFF]) / max(tokens, 1),
        truncated_ratio_fraction=float(sums[CUT]) / max(tokens, 1),
        num_tokens=tokens,
    )


def _local_samples(policy: Policy, config: Config) -> list[list[int]]:
    """Sample indices of each fold that belongs to this data-parallel rank."""
    parallel, group = policy.parallel, config.group_size
    folds = local_folds(config.num_prompts, config.algo.snr.num_folds, parallel.dp_rank, parallel.dp_size)
    return [list(range(fold.start * group, fold.stop * group)) for fold in folds]


def _accumulate(
    policy: Policy, samples: Sequence[Sample], used: list[int], coefficients: Tensor, config: Config
) -> Tensor:
    """Add the gradient of the samples named to main_grad; returns the fp64 [5] sums (zeros but on the last stage)."""
    device = policy.parallel.device
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    batches = pack(samples, used, max_tokens=config.parallel.micro_batch_tokens, device=device)
    if not batches:
        return sums
    coefficients = coefficients.to(device)
    ratios, temperature = _ratios(config), config.rollout.temperature

    def loss_of(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """logits [b, t, Vp/tp] -> the loss, and the sums over this microbatch's response tokens."""
        logprobs = vocab_parallel_logprobs(
            logits, batch.labels, vocab_size=policy.vocab_size, parallel=policy.parallel, temperature=temperature
        )  # [b, t]
        rho, cut = ratios(logprobs, batch)
        loss = policy_gradient_loss(logprobs, batch.mask, coefficients[batch.sample_index], rho)
        entropy = vocab_parallel_entropy(
            logits, vocab_size=policy.vocab_size, parallel=policy.parallel, temperature=temperature
        )  # [b, t]
        difference = (logprobs.detach() - batch.rollout_logprobs).abs()
        parts = (loss.detach(), entropy[batch.mask].sum(), difference[batch.mask].sum(), cut, batch.mask.sum())
        return loss, {"sums": torch.stack([part.to(torch.float64) for part in parts])}

    for record in run_schedule(policy, batches, loss_of):
        sums += record["sums"]
    return sums


def _ratios(config: Config) -> RatioFn:
    """The importance-ratio rule of the run: log-probs [b, t], batch -> detached ratios [b, t], number of cut ones."""

    def ratios(logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return truncated_ratios(
            logprobs.detach(),
            batch.rollout_logprobs,
            batch.mask,
            level=config.rollout.correction,
            cap=config.rollout.correction_cap,
        )

    return ratios


class _Accumulator:
    """Sums the gradients of a rank's folds, since main_grad holds one fold at a time.

    The sum takes one more gradient's memory from the second fold of a rank on; one fold a rank takes none.
    """

    def __init__(self, policy: Policy, folds: int) -> None:
        self._main_grads = [buffer.grad_data for chunk in policy.chunks for buffer in chunk.buffers]
        self._sums = [torch.zeros_like(grad) for grad in self._main_grads] if folds > 1 else []

    def add(self) -> None:
        """Take in the fold that main_grad holds."""
        if self._sums:
            torch._foreach_add_(self._sums, self._main_grads)

    def finish(self) -> None:
        """Put the sum into main_grad."""
        if self._sums:
            torch._foreach_copy_(self._main_grads, self._sums)
