"""The gradient of a step: per-sample norms, coefficients, and the policy gradient.

    s_n = grad_theta sum_t rho_t log pi(o_t),   w_n = ||s_n||^2,   c = A(w) / (Q G L),   g = -sum_n c_n s_n

L is `algo.token_scale`.

`gradnorm.mode` decides whether norms and gradient take one pass or two. A KL penalty adds a forward pass with the
reference weights. Router losses of a mixture add their gradient to g and enter no w.

g is computed in folds of whole prompts. A fold stays on one data-parallel replica, so the norm of its gradient needs no
further reduction. Replicas that share experts share folds too (`gradient/folds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.data.packing import microbatches
from oblr_megatron.gradient.estimate import norm_batches, sq_norms_of
from oblr_megatron.gradient.fold_sums import FoldPass, FoldSums
from oblr_megatron.gradient.folds import Sharing
from oblr_megatron.gradient.loss_fn import PassMetrics, Penalty
from oblr_megatron.gradient.one_pass import AdvantageFn, BookkeepPass, InlinePass, StashPass, Work
from oblr_megatron.gradient.plain import PlainPass
from oblr_megatron.gradient.ratios import Old, RatioFn, importance_ratios
from oblr_megatron.model.optimizer import grad_sq_norm
from oblr_megatron.model.token_values import response_logprobs
from oblr_megatron.norms.rules import classify
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.types import ClipMetrics, GradientStats, MicroBatch, RejectionMetrics, Sample, StepGradient

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.model.reference import Reference

Timer = Callable[[str], AbstractContextManager[object]]


class TrainingGradient:
    """Computes the gradient of every step; holds the buffers and process groups for it. One object per rank.

    Args:
        policy: the model.
        config: the run's configuration, `gradnorm.mode` resolved (not "auto").
        reference: the reference model of the KL penalty; given if and only if `algo.kl_coefficient` is positive.

    Raises:
        UserError: norms are needed, and a trainable parameter has no rule.
    """

    def __init__(self, policy: Policy, config: Config, reference: Reference | None = None) -> None:
        assert (reference is not None) == (config.algo.kl_coefficient > 0), "only a KL penalty has a reference model"
        self._policy, self._config, self._reference = policy, config, reference
        self._sharing = Sharing(policy.parallel, config)
        self._plain = PlainPass(policy, config, self._sharing)
        self._rules = classify(policy) if config.uses_norms else []  # refuses what no rule covers
        self._one_pass = self._make_one_pass() if config.measures_norms else None

    def release(self) -> None:
        """Free the device memory that mode `stash` keeps between steps."""
        if isinstance(self._one_pass, StashPass):
            self._one_pass.release()

    def __call__(
        self,
        samples: Sequence[Sample],
        coefficients_of: AdvantageFn,
        active: Tensor,
        *,
        timer: Timer = lambda _: nullcontext(),
        **options: Any,
    ) -> StepGradient:
        """A step of which all samples are there: `begin`, `add` with these arguments, `finish`."""
        sums = self.begin(whole=True)
        positions = range(len(active))
        norms_sq = self.add(sums, positions, samples, coefficients_of, active, timer=timer, **options)
        return StepGradient(norms_sq, self.finish(sums, timer))

    def begin(self, *, whole: bool, after: FoldSums | None = None) -> FoldSums:
        """Begin a step. With `whole` a single `add` brings all prompts.

        `after` is the step's update before this one (algo.updates_per_batch). Metrics then cover both.
        """
        sums = FoldSums(self._policy, self._sharing, self._config, whole=whole)
        if after is not None:
            sums.metrics, sums.in_plain_pass = after.metrics, after.in_plain_pass
        return sums

    def add(
        self,
        sums: FoldSums,
        positions: Sequence[int],
        samples: Sequence[Sample],
        coefficients_of: AdvantageFn,
        active: Tensor,
        *,
        norms_wanted: bool = True,
        measured: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        timer: Timer = lambda _: nullcontext(),
    ) -> Tensor:
        """Add the gradient of k prompts.

        Args:
            sums: of the step.
            positions: of the prompts in the step's batch; all of them once, over all calls.
            samples: [n = k G] of these prompts, the same on every rank.
            coefficients_of: norms to coefficients: an `AdvantageRule` in training. Called for all k prompts or for some
                of them as soon as their norms are known.
            active: [k] bool; the other groups have coefficients of zero for every w and are left out.
            norms_wanted: False if nothing depends on w. `coefficients_of` then gets zeros, and one plain pass runs.
            measured: [k] bool; norms are measured of these prompts only. None: of all active ones.
            old_logprobs: [n, T] of the policy before the batch's first update, in a later one (`old_logprobs`).
            timer: entered with "gradnorm" and "gradient"; one-pass modes count as "gradient".

        Returns:
            w [n] fp64, zeros where not measured.
        """
        work = Work(
            samples, coefficients_of, self._ratios, torch.zeros(len(samples), dtype=torch.float64), sums.metrics
        )
        if norms_wanted and self._one_pass is not None:
            with timer("gradient"):
                sums.add(self._one_pass, work, self._sharing.folds(positions, samples, active))
                return self._from_all_replicas(work.norms_sq)
        if norms_wanted:
            with timer("gradnorm"):
                work.norms_sq = self.norms(samples, active if measured is None else active & measured, positions)
        with timer("gradient"):
            coefficients = coefficients_of(range(len(active)), work.norms_sq.view(len(active), -1)).flatten()
            known = work.norms_sq.isfinite()  # otherwise the sample's gradient is not finite either
            coefficients[~known] = 0.0
            old = None
            if old_logprobs is not None:
                device = self._policy.parallel.device
                old = Old(old_logprobs.to(device), coefficients.to(device))
            self._add_plain(sums, positions, samples, coefficients, self._penalty(samples, known, positions), old)
            return work.norms_sq

    def finish(self, sums: FoldSums, timer: Timer = lambda _: nullcontext()) -> GradientStats:
        """Leave g in `main_grad`, summed over all ranks; returns its statistics. The timer is that of `add`."""
        with timer("gradient"):
            stats = self._stats(sums.metrics, sums.finish())
            if sums.in_plain_pass:
                stats.routers = self._plain.router_metrics()
            return stats

    def norms(
        self,
        samples: Sequence[Sample],
        active: Tensor,
        positions: Sequence[int] | None = None,
        *,
        source: str | None = None,
    ) -> Tensor:
        """Norms of the active groups by a separate pass: w [n] fp64, zeros for the other groups, same on every rank.

        Args:
            samples: [n] of k prompts, the same on every rank.
            active: [k] bool.
            positions: of the prompts in the step's batch; by default of a whole step.
            source: as `gradnorm.source`; the configured one by default.
        """
        mine = self._mine(samples, active, positions)
        norms = torch.zeros(len(samples), dtype=torch.float64)
        batches, order = self._norm_batches(samples, mine)
        if batches:
            source = source or self._config.gradnorm.source
            found = sq_norms_of(self._policy, samples, batches, self._config, self._ratios, source)
            norms[order] = found.cpu()[: len(order)]
        return self._from_all_replicas(norms)

    def policy_gradient(
        self, samples: Sequence[Sample], coefficients: Tensor, penalty: Penalty | None = None
    ) -> GradientStats:
        """Leave g = -sum_n c_n grad_theta sum_t rho_t log pi(o_t) in main_grad, summed over all ranks.

        The gradient is computed fold by fold. This also gives M = mean_f ||g_f||^2, where g_f is the gradient of fold f
        scaled to the whole batch (R times its part of the sum).

        Args:
            samples: [N] of the step, the same on every rank.
            coefficients: [N] fp64, advantage times the aggregation's constant. Samples with 0 are left out of the pass,
                unless the penalty has a gradient.
            penalty: its gradient is added to g.
        """
        sums = self.begin(whole=True)
        self._add_plain(sums, range(self._config.num_prompts), samples, coefficients, penalty)
        return self.finish(sums)

    def own_samples(self, positions: Sequence[int], samples: Sequence[Sample]) -> list[int]:
        """This rank's samples in any pass of a step, as indices among `samples`, of the prompts at `positions`."""
        return sorted(self._mine(samples, torch.ones(len(positions), dtype=torch.bool), positions))

    def old_logprobs(self, samples: Sequence[Sample], active: Tensor) -> Tensor:
        """log pi [n, T] fp64 on the CPU, before a batch's first update, of the prompts of a later one.

        By a forward pass; collective. Arguments as of `add`; 0 for groups that are not active. With a KL penalty every
        group is in the later pass, and so in this one.
        """
        if self._reference is not None:
            active = torch.ones_like(active)
        batches = self._forward_batches(samples, active, range(len(active)))
        return response_logprobs(self._policy, samples, batches, self._config.rollout.temperature).cpu()

    def _add_plain(
        self,
        sums: FoldSums,
        positions: Sequence[int],
        samples: Sequence[Sample],
        coefficients: Tensor,
        penalty: Penalty | None,
        old: Old | None = None,
    ) -> None:
        """Add the gradient of samples with known coefficients."""
        unused = torch.zeros(0, dtype=torch.float64)
        ratios = importance_ratios(self._config, self._policy, old)
        work = Work(samples, lambda *_: unused, ratios, unused, sums.metrics)
        self._plain.prepare(coefficients, penalty)
        self._plain.begin(samples, first=not sums.in_plain_pass)
        everything = torch.ones(len(positions), dtype=torch.bool)
        sums.add(self._plain, work, self._sharing.folds(positions, samples, everything))
        sums.in_plain_pass = True

    def _mine(self, samples: Sequence[Sample], active: Tensor, positions: Sequence[int] | None) -> list[int]:
        """This replica's samples in active groups, as indices among the given ones."""
        given = range(len(active)) if positions is None else positions
        return [n for fold in self._sharing.folds(given, samples, active) for n in fold]

    def _penalty(self, samples: Sequence[Sample], counted: Tensor, positions: Sequence[int]) -> Penalty | None:
        """The KL penalty over all groups; samples [n] that are not `counted` are left out."""
        if self._reference is None:
            return None
        config, device = self._config, self._policy.parallel.device
        beta = config.algo.kl_coefficient * counted.to(torch.float64)
        lengths = torch.tensor([sample.length for sample in samples])
        coefficients = sample_coefficients(
            beta, lengths, config.num_prompts, config.group_size, config.algo.aggregation, config.token_scale
        )
        batches = self._forward_batches(samples, torch.ones(len(positions), dtype=torch.bool), positions)
        logprobs = self._reference.logprobs(samples, batches, temperature=config.rollout.temperature)
        return Penalty(coefficients.to(device), logprobs, config.algo.kl_loss)

    def _forward_batches(self, samples: Sequence[Sample], active: Tensor, positions: Sequence[int]) -> list[MicroBatch]:
        """Microbatches of this replica's samples in active groups; every replica of a block has the same number."""
        mine = self._mine(samples, active, positions)
        device = self._policy.parallel.device
        return self._sharing.even(
            microbatches(samples, mine, self._config.parallel, self._policy.padding, device=device)
        )

    def _stats(self, metrics: PassMetrics, fold_sq_norm_mean: float) -> GradientStats:
        """Statistics of the gradient in main_grad."""
        sums = metrics.total(self._policy.parallel)
        tokens = max(sums.tokens, 1)
        return GradientStats(
            loss=sums.loss,
            sq_norm=grad_sq_norm(self._policy),
            fold_sq_norm_mean=fold_sq_norm_mean,
            num_folds=self._sharing.num_folds,
            entropy=sums.entropy / tokens,
            logprob_abs_diff=sums.abs_diff / tokens,
            truncated_ratio_fraction=sums.cut / tokens,
            num_tokens=int(sums.tokens),
            kl=None if self._reference is None else sums.kl / tokens,
            rejection=self._rejection(sums),
            clipping=self._clipping(sums),
        )

    def _rejection(self, sums: PassMetrics) -> RejectionMetrics | None:
        if self._config.rollout.rejection == "none":
            return None
        tokens, samples = max(sums.tokens, 1), max(sums.samples, 1)
        return RejectionMetrics(sums.rejected / tokens, sums.rejected_samples / samples, sums.mismatch / tokens)

    def _clipping(self, sums: PassMetrics) -> ClipMetrics | None:
        if self._config.algo.updates_per_batch == 1:
            return None
        tokens = max(sums.tokens, 1)
        return ClipMetrics(sums.clipped / tokens, sums.beyond_dual / tokens, sums.drift / tokens)

    def _make_one_pass(self) -> FoldPass | None:
        options = self._config.gradnorm
        if options.mode == "inline":
            return InlinePass(self._policy, self._config)
        if options.mode == "bookkeep":
            return BookkeepPass(self._policy, self._config)
        if options.mode == "stash":
            return StashPass(self._policy, self._config)
        return None

    def _norm_batches(self, samples: Sequence[Sample], mine: Sequence[int]) -> tuple[list[MicroBatch], Tensor]:
        """Microbatches of the norm pass and their samples in order; every replica of a block has the same number."""
        batches = norm_batches(self._policy, self._config, self._rules, samples, mine)
        order = torch.cat([torch.zeros(0, dtype=torch.int64), *(batch.sample_index.cpu() for batch in batches)])
        return self._sharing.even(batches), order

    def _from_all_replicas(self, norms: Tensor) -> Tensor:
        """All-reduce norms [N], of which each replica knows its own samples, over the replicas."""
        whole = norms.to(self._policy.parallel.device)
        all_reduce(whole, self._policy.parallel.dp_group)
        return whole.cpu()

    @property
    def _ratios(self) -> RatioFn:
        return importance_ratios(self._config, self._policy)
