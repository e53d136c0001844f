"""The gradient of a step: per-sample norms w, coefficients c(w), the policy gradient g, and their statistics.

    s_n = grad_theta sum_t rho_t log pi(o_t),   w_n = ||s_n||^2,   c = A(w) / (Q G L),   g = -sum_n c_n s_n

L is `algo.token_scale`. Where nothing else enters g, the norms' library computes w and g in one pass, in the configured
mode, and asks for c as soon as a group's norms are known. Energies at the logits are known between forward and backward
of a plain pass. Otherwise w comes first, if c needs it, and a plain pass adds g with known c: with a KL penalty, the
router losses of a mixture, or in mode `two_pass`.

g is computed in folds of whole prompts. A fold stays on one data-parallel replica, so the norm of its gradient needs no
further reduction. Replicas that share experts share folds too (`gradient/folds.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from oblr_megatron.algo.advantage import energies
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.algo.thinning import sampled_energies, thinned
from oblr_megatron.checks.layout import num_experts
from oblr_megatron.data.packing import SampleBatches, empty_batch
from oblr_megatron.engine.protocol import call_seed, prompt_seed
from oblr_megatron.errors import BrokenStepError
from oblr_megatron.gradient.estimate import estimates_are_due, measured_prompts, some_prompts, sq_norms_of
from oblr_megatron.gradient.fold_sums import FoldSums
from oblr_megatron.gradient.folds import Sharing
from oblr_megatron.gradient.loss_fn import PassMetrics, Penalty, Weigh, score_loss
from oblr_megatron.gradient.ratios import Old, importance_ratios
from oblr_megatron.model.optimizer import grad_sq_norm
from oblr_megatron.model.router import RouterLosses
from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.token_values import response_logprobs
from oblr_megatron.norms.sample_gradients import SampleGradients, numbers_of
from oblr_megatron.rollout.waves import Wave, mini_batches
from oblr_megatron.runtime.collectives import all_reduce
from oblr_megatron.runtime.device_copy import to_device
from oblr_megatron.types import GradientStats, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.algo.advantage import AdvantageRule
    from oblr_megatron.config import Config
    from oblr_megatron.model.momentum import GradientMomentum
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.model.reference import Reference
    from oblr_megatron.model.step import LossFn
    from oblr_megatron.types import MicroBatch

MAX_NONFINITE = 3  # norms of a step; more of them mean a broken model, and the run stops

Timer = Callable[[str], AbstractContextManager[object]]
WithRoutes = Callable[[list[Sample], Iterable[int]], list[Sample]]
"""(samples, the numbers of those that this rank trains on) -> the samples, these with their routes. Collective."""


class StepGradient:
    """Adds up the gradient of a step's prompts, which come in one batch or in several; one object per rank.

        gradient.begin(step)
        for batch ...: gradient.add(batch, advantage)
        for stats in gradient.updates(): ...            # g is in main_grad

    Args:
        policy: the model.
        config: the run's configuration, `gradnorm.mode` resolved (not "auto").
        reference: the reference model of the KL penalty; given if and only if `algo.kl_coefficient` is positive.
        momentum: the average of earlier gradients, for the estimator with this name.
        timer: entered with "gradnorm" and "gradient"; one-pass modes count as "gradient".
        with_routes: for model.moe_routing_replay.

    Raises:
        UserError: norms are needed, and a trainable parameter has no rule.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        reference: Reference | None = None,
        momentum: GradientMomentum | None = None,
        *,
        timer: Timer = lambda _: nullcontext(),
        with_routes: WithRoutes = lambda samples, _: samples,
    ) -> None:
        assert (reference is not None) == (config.algo.kl_coefficient > 0), "only a KL penalty has a reference model"
        self._policy, self._config, self._reference, self._momentum = policy, config, reference, momentum
        self._timer, self._with_routes = timer, with_routes
        self._update = config.per_update  # num_prompts of one update
        self._sharing = Sharing(policy.parallel, self._update)
        self._routers = RouterLosses(policy, config.model) if num_experts(policy.hf_config.to_dict()) else None
        mode = config.gradnorm.mode if config.measures_norms else "two_pass"
        assert mode != "auto", "select_mode comes first"
        self._one_pass = mode != "two_pass"
        self._sample_gradients: SampleGradients | None = None
        if config.measures_norms or config.compares_norms:  # refuses what no rule covers
            self._sample_gradients = SampleGradients(policy, mode, window_tokens=config.gradnorm.window_tokens)
        self.begin(0)

    def release(self) -> None:
        """Free the device memory of `main_grad`, and of what mode `stash` keeps, until the next step's first batch."""
        for chunk in self._policy.chunks:  # its views stay
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        if self._sample_gradients is not None:
            self._sample_gradients.release()

    def begin(self, step: int) -> StepGradient:
        """Begin the gradient of a step, counted from 1; returns itself."""
        config, self._step = self._config, step
        self.norms_sq = torch.zeros(config.num_prompts, config.group_size, dtype=torch.float64)
        """w [Q, G]: zeros for groups without a gradient, and where nothing needs w."""
        self.exact_sq = torch.zeros_like(self.norms_sq)
        """Exact norms [Q, G] of the samples that estimates are compared with; 0 for the others."""
        self.coefficients = torch.zeros_like(self.norms_sq)
        """c [Q, G] of the step's gradient; zeros where nothing needs w."""
        self.kept = torch.ones_like(self.norms_sq)
        """[Q, G] weights of the responses in the gradient, 0 for those that `algo.keep` leaves out."""
        self._measured = measured_prompts(config, step)
        self._broken: list[Sample] = []
        self._pass_metrics = PassMetrics()
        self._routers_began = False
        self._sums: FoldSums | None = None
        self._later: list[tuple[Wave, AdvantageRule, Tensor]] = []  # further updates, with log pi_old [n, T]
        self._stats: list[GradientStats] = []
        return self

    @property
    def stats(self) -> GradientStats:
        """The statistics of the first update, the only one on-policy with `algo.updates_per_batch`."""
        return self._stats[0]

    @property
    def num_broken(self) -> int:
        """Samples that were left out so far, in all updates, because their norm or loss is not finite."""
        return len(self._broken)

    @property
    def mean_stats(self) -> GradientStats:
        """The statistics of all updates together."""
        last, count = self._stats[-1], len(self._stats)
        sq_norm = sum(stats.sq_norm for stats in self._stats) / count
        return replace(last, sq_norm=sq_norm, loss=last.loss / count)  # metrics of passes cover all updates so far

    def add(self, batch: Wave, advantage: AdvantageRule) -> None:
        """Add g = -sum_i c_i sum_t rho_t grad log pi(o_i,t) of a batch's samples: the gradient to descend.

        With `algo.updates_per_batch` the batch is the whole step's. Its first mini-batch is added; the others wait.
        """
        own, *others = mini_batches(batch, self._config.algo.updates_per_batch)
        if self._config.algo.keep < 1:
            advantage = self._thinned(own, advantage)
        own = self._routed(own)
        if others:
            rules = [advantage.of_update(part.positions) for part in others]
            others = [self._routed(replace(part, positions=range(len(part.positions)))) for part in others]
            with self._timer("gradient"):  # before the weights change
                old = [self.old_logprobs(part, rule.active) for part, rule in zip(others, rules, strict=True)]
            self._later = list(zip(others, rules, old, strict=True))
            advantage = advantage.of_update(own.positions)
        if self._sums is None:
            for chunk in self._policy.chunks:
                chunk.restore_grad_buffers(synchronize=False)  # zeros, if they were released
            self._sums = FoldSums(self._policy, self._sharing, self._config, whole=batch.last)
        norms = self._add_in_one_pass(own, advantage) if self._one_pass else self._add_norms_first(own, advantage)
        self._note(own, norms, advantage)

    def updates(self, *, rewarded: bool = True) -> Iterator[GradientStats]:
        """Leave g of each update in main_grad, summed over all ranks: one, or `algo.updates_per_batch`.

        The caller steps the optimizer after each. `rewarded`: false if no response has a reward, so that the average
        of gradients leaves the step out.

        Raises:
            BrokenStepError: more than MAX_NONFINITE norms are not finite; the samples are saved first. Or trainer and
                engine differ under model.batch_invariant.
        """
        stats = self._finish()
        if self._config.model.batch_invariant and stats.logprob_abs_diff > 0:  # NaN: see `_refuse_broken`
            raise BrokenStepError(
                f"step {self._step}: the log-probs of trainer and engine differ by {stats.logprob_abs_diff:.3g} nats a "
                "token, and model.batch_invariant promises 0; see docs/zero_mismatch.md, or set it to false"
            )
        self._refuse_broken()
        if self._config.measures_norms and self._config.gradnorm.sample_fraction == 1:
            stats = replace(stats, sample_sq_norm=float(energies(self.coefficients, self.norms_sq).sum()))
        if self._momentum is not None and rewarded:
            with self._timer("gradient"):
                stats = replace(stats, momentum_dot=self._momentum.dot_and_add(stats.sq_norm))
        self._stats.append(stats)
        yield stats
        for part, advantage, old in self._later:
            self._sums = FoldSums(self._policy, self._sharing, self._config, whole=True)
            with self._timer("gradient"):
                norms = self._add_known(part, torch.zeros(len(part.samples), dtype=torch.float64), advantage, old)
            self._note_broken(part, norms)
            self._stats.append(self._finish())
            self._refuse_broken()
            yield self._stats[-1]

    def norms(self, batch: Wave, active: Tensor, *, source: str | None = None) -> Tensor:
        """Norms of the active groups by a separate pass: w [n] fp64, zeros for the other groups, same on every rank.

        Args:
            batch: k prompts and their samples, the same on every rank.
            active: [k] bool.
            source: as `gradnorm.source`; the configured one by default.
        """
        gradients, source = self._sample_gradients, source or self._config.gradnorm.source
        single = source == "exact" and gradients is not None and gradients.single
        packed = self._packed(batch.samples)
        microbatches = packed.microbatches(self._own_samples(batch, active), single=single)
        order, norms = numbers_of(microbatches), torch.zeros(len(batch.samples), dtype=torch.float64)
        microbatches = self._sharing.even(microbatches)
        if microbatches:
            values = sq_norms_of(
                gradients,
                self._policy,
                batch.samples,
                microbatches,
                source=source,
                temperature=self._config.rollout.temperature,
                ratios=importance_ratios(self._config, self._policy),
            )
            norms[order] = values.cpu()[: len(order)]
        return self._from_all_replicas(norms)

    def _add_in_one_pass(self, batch: Wave, advantage: AdvantageRule) -> Tensor:
        """w [n] of a batch's samples, while their gradient is added."""
        gradients, group_size = self._sample_gradients, self._config.group_size
        assert gradients is not None, "one pass measures norms"
        packed, norms = self._packed(batch.samples), torch.zeros(len(batch.samples), dtype=torch.float64)
        loss_of = self._loss()
        known = torch.zeros_like(norms) if gradients.mode == "inline" else None  # c depends on no norm of this step
        kept = self._kept(batch)

        def add(own: Sequence[int]) -> None:
            """Add one fold's part to main_grad, which is zero before."""
            if known is not None:
                prompts = [n // group_size for n in own[::group_size]]
                known[own] = advantage(prompts, torch.zeros(len(prompts), group_size, dtype=torch.float64)).flatten()
                own = [n for n in own if kept[n]]
            weights = advantage if known is None else known
            total = gradients.add(packed, own, loss_of, weights, group_size, self._config.stash_size)
            norms[own] = total.sq_norms.cpu()[own]
            broken = ~norms.isfinite()
            if known is not None and bool(broken[own].any()):  # these samples have spoilt main_grad
                known[broken] = 0.0
                self._policy.zero_grad()
                total = gradients.add(packed, [n for n in own if not broken[n]], loss_of, known, group_size)
            self._pass_metrics.add(total.records, total.weights)

        with self._timer("gradient"):
            self._open_sums.add(self._sharing.folds(batch.positions, batch.samples, advantage.active), add)
            return self._from_all_replicas(norms)

    def _add_norms_first(self, batch: Wave, advantage: AdvantageRule) -> Tensor:
        """w [n] of a batch's samples, if something needs it; then add their gradient."""
        norms, config = torch.zeros(len(batch.samples), dtype=torch.float64), self._config
        if config.uses_norms:
            places = list(batch.positions)
            active = advantage.active & self._measured[places]
            with self._timer("gradnorm"):
                if estimates_are_due(config, self._step):
                    few = some_prompts(config, active)
                    self.exact_sq[places] = self.norms(batch, few, source="exact").view(len(places), -1)
                if not config.energies_in_pass:
                    norms = self.norms(batch, active)
        with self._timer("gradient"):
            if config.energies_in_pass:
                norms = self._add_with_energies(batch, advantage).view(len(places), -1)
                left_out = norms.isfinite() & ~active[:, None]  # a broken sample is counted, measured or not
                return norms.masked_fill(left_out, 0.0).flatten()
            return self._add_known(batch, norms, advantage)

    def _add_with_energies(self, batch: Wave, advantage: AdvantageRule) -> Tensor:
        """w [n] of the samples in active groups by source "logit", from the forward of the pass that adds them.

        The pass has all of these samples: a coefficient of 0 does not leave a sample out, as its w is wanted.
        """
        prompts, parallel = range(len(batch.positions)), self._policy.parallel
        norms, kept, packed = torch.zeros(len(batch.samples)).double(), self._kept(batch), self._packed(batch.samples)

        def weigh(numbers: Tensor, energies: Tensor) -> Tensor:
            own = numbers.cpu()
            norms[own] = torch.maximum(norms[own], energies.cpu())  # an empty microbatch has number 0 and energy 0
            return to_device(advantage(prompts, norms.view(len(prompts), -1)).flatten()[own], parallel.device)

        loss_of = self._loss(weigh)

        def run(own: Sequence[int], routers: RouterLosses | None) -> list[dict[str, Tensor]]:
            microbatches = self._sharing.even(packed.microbatches(own))
            return run_schedule(self._policy, microbatches, loss_of, routers=routers)

        def add(own: Sequence[int]) -> None:
            """Add one fold's part to main_grad, which is zero before; again if samples have spoilt it."""
            own = [n for n in own if kept[n]]
            records, energies = run(own, self._routers), norms[own].to(parallel.device)
            all_reduce(energies, parallel.pp_group)  # zero except on the last stage
            norms[own] = energies.cpu()
            broken = (~energies.isfinite()).sum()
            all_reduce(broken, parallel.block_group)
            if broken:
                self._policy.zero_grad()
                records = run([n for n in own if norms[n].isfinite()], None)
            self._pass_metrics.add(records, torch.ones_like(norms))  # the loss has the coefficients

        used = advantage.active.repeat_interleave(self._config.group_size) & torch.tensor(kept)
        self._begin_routers(batch, used.tolist())
        self._open_sums.add(self._sharing.folds(batch.positions, batch.samples, advantage.active), add)
        return self._from_all_replicas(norms)

    def _add_known(
        self, batch: Wave, norms: Tensor, advantage: AdvantageRule, old_logprobs: Tensor | None = None
    ) -> Tensor:
        """Add the gradient of samples with norms [n] by a plain pass, with the penalty and the router losses.

        `old_logprobs` [n, T] are those of the policy before the batch's first update, in a later one.

        Returns:
            The norms, NaN for the samples that were left out because their loss is not finite.
        """
        prompts, device = len(batch.positions), self._policy.parallel.device
        coefficients = advantage(range(prompts), norms.view(prompts, -1)).flatten()
        finite = norms.isfinite()  # otherwise the sample's gradient is not finite either
        coefficients[~finite] = 0.0
        used, penalty = coefficients != 0, self._penalty(batch, finite)
        if penalty is not None:
            used |= penalty.coefficients.cpu() != 0
        coefficients = coefficients.to(device)
        old = None if old_logprobs is None else Old(old_logprobs.to(device), coefficients)
        loss_of = self._loss(coefficients, penalty, old)
        packed, ones = self._packed(batch.samples), torch.ones(len(used), dtype=torch.float64)
        broken, overlapped = torch.zeros_like(ones), self._config.parallel.overlap_grad_reduce

        def run(own: Sequence[int], routers: RouterLosses | None) -> list[dict[str, Tensor]]:
            microbatches = self._sharing.even(packed.microbatches(own))
            if not microbatches and not overlapped:
                return []
            microbatches = microbatches or [empty_batch()]  # backward begins the sum over replicas
            return run_schedule(self._policy, microbatches, loss_of, routers=routers)

        def add(own: Sequence[int]) -> None:
            """Add one fold's part to main_grad, which is zero before; again if samples have spoilt it."""
            own, routers = [n for n in own if used[n]], self._routers
            before = None if routers is None else routers.records
            records = run(own, routers)
            if not overlapped:  # else the sum over replicas has begun
                spoilt = self._without_loss(records, len(used))
                broken[own] = spoilt[own]
                if bool(spoilt.any()):
                    self._policy.zero_grad()
                    if routers is not None and before is not None:
                        routers.restore(before)
                    records = run([n for n in own if not broken[n]], routers)
            self._pass_metrics.add(records, ones)  # the loss has the coefficients

        self._begin_routers(batch, used.tolist())
        everything = torch.ones(prompts, dtype=torch.bool)
        self._open_sums.add(self._sharing.folds(batch.positions, batch.samples, everything), add)
        return norms.masked_fill(self._from_all_replicas(broken) > 0, torch.nan)

    def _without_loss(self, records: Sequence[dict[str, Tensor]], count: int) -> Tensor:
        """[count] above 0 for samples with a loss that is not finite. Every rank of the block gets the same."""
        found = torch.zeros(count, dtype=torch.float64, device=self._policy.parallel.device)
        for record in records:
            found.index_add_(0, record["numbers"].to(found.device), record["scores"].isfinite().logical_not().to(found))
        all_reduce(found, self._policy.parallel.block_group)
        return found.cpu()

    def _begin_routers(self, batch: Wave, used: Sequence[bool]) -> None:
        """Let a mixture's routers expect a pass over the used samples [n]."""
        if self._routers is not None:
            tokens = sum(sample.length for sample, own in zip(batch.samples, used, strict=True) if own)
            self._routers.begin(tokens, first=not self._routers_began)
            self._routers_began = True

    def _loss(
        self, coefficients: Tensor | Weigh | None = None, penalty: Penalty | None = None, old: Old | None = None
    ) -> LossFn:
        ratios = importance_ratios(self._config, self._policy, old)
        temperature = self._config.rollout.temperature
        return score_loss(self._policy, temperature, ratios, coefficients, penalty=penalty, records=True)

    def _note(self, batch: Wave, norms: Tensor, advantage: AdvantageRule) -> None:
        """Keep the norms [n] of a batch's samples, and what the end of the step needs of them."""
        norms = norms.view(len(batch.positions), -1)
        self.norms_sq[list(batch.positions)] = norms
        self._note_broken(batch, norms)
        if self._config.uses_norms:
            self.coefficients[list(batch.positions)] = advantage(range(len(norms)), norms)

    def _note_broken(self, batch: Wave, norms: Tensor) -> None:
        """Keep the samples that were left out because their norm or loss is not finite."""
        broken = norms.isfinite().logical_not().flatten().nonzero().flatten().tolist()
        self._broken += [batch.samples[n] for n in broken]

    def _finish(self) -> GradientStats:
        """Leave g of an update in main_grad; returns its statistics."""
        with self._timer("gradient"):
            fold_sq_norm_mean = self._open_sums.finish()
            return self._pass_metrics.stats(
                self._policy.parallel,
                self._config,
                sq_norm=grad_sq_norm(self._policy),
                fold_sq_norm_mean=fold_sq_norm_mean,
                num_folds=self._sharing.num_folds,
                routers=self._routers.metrics() if self._routers is not None and self._routers_began else None,
            )

    def _penalty(self, batch: Wave, counted: Tensor) -> Penalty | None:
        """The KL penalty over all groups; samples [n] that are not `counted` are left out."""
        if self._reference is None:
            return None
        config, device = self._update, self._policy.parallel.device
        beta = config.algo.kl_coefficient * counted.to(torch.float64)
        lengths = torch.tensor([sample.length for sample in batch.samples])
        coefficients = sample_coefficients(
            beta, lengths, config.num_prompts, config.group_size, config.algo.aggregation, config.token_scale
        )
        microbatches = self._forward_batches(batch, torch.ones(len(batch.positions), dtype=torch.bool))
        logprobs = self._reference.logprobs(batch.samples, microbatches, temperature=config.rollout.temperature)
        return Penalty(coefficients.to(device), logprobs, config.algo.kl_loss)

    def old_logprobs(self, batch: Wave, active: Tensor) -> Tensor:
        """log pi [n, T] fp64 before a batch's first update, of a mini-batch for a later one, by a forward pass.

        0 for groups that are not active. With a KL penalty every group is in the later pass, and so in this one.
        """
        active = torch.ones_like(active) if self._reference is not None else active
        microbatches = self._forward_batches(batch, active)
        return response_logprobs(self._policy, batch.samples, microbatches, self._config.rollout.temperature).cpu()

    def _forward_batches(self, batch: Wave, active: Tensor) -> list[MicroBatch]:
        """Microbatches of this replica's samples in active groups; every replica of a block has the same number."""
        return self._sharing.even(self._packed(batch.samples).microbatches(self._own_samples(batch, active)))

    def _own_samples(self, batch: Wave, active: Tensor) -> list[int]:
        """This replica's samples in active groups, by number, without those that `algo.keep` leaves out."""
        kept = self._kept(batch)
        return [n for fold in self._sharing.folds(batch.positions, batch.samples, active) for n in fold if kept[n]]

    def _kept(self, batch: Wave) -> list[bool]:
        """[n] whether `algo.keep` leaves each sample of a batch in."""
        kept: list[bool] = (self.kept[list(batch.positions)] > 0).flatten().tolist()
        return kept

    def _thinned(self, batch: Wave, advantage: AdvantageRule) -> AdvantageRule:
        """The rule for the responses that `algo.keep` leaves in the step; the same on every rank."""
        config, active, shape = self._config, advantage.active, (len(batch.positions), self._config.group_size)
        energies = sampled_energies([sample.logprobs for sample in batch.samples]).view(shape)
        tokens = torch.tensor([max(1, sample.num_inputs) for sample in batch.samples]).view(shape)
        weights = torch.zeros(shape, dtype=torch.float64)
        coefficients = advantage(range(shape[0]), weights)  # reads no norm
        seed = prompt_seed(call_seed(config.seed, self._step), -1)  # of no prompt
        weights[active] = thinned(coefficients[active], energies[active], tokens[active], config.algo.keep, seed)
        self.kept[list(batch.positions)] = weights
        return advantage.thinned(weights)

    def _packed(self, samples: Sequence[Sample]) -> SampleBatches:
        policy = self._policy
        return SampleBatches(samples, self._config.parallel, policy.padding)

    def _routed(self, batch: Wave) -> Wave:
        """The batch with the routes of the samples that this rank trains on."""
        if not self._config.model.moe_routing_replay:
            return batch
        own = self._own_samples(batch, torch.ones(len(batch.positions), dtype=torch.bool))
        return replace(batch, batch=replace(batch.batch, samples=self._with_routes(batch.samples, sorted(own))))

    @property
    def _open_sums(self) -> FoldSums:
        assert self._sums is not None, "no batch was added"
        return self._sums

    def _refuse_broken(self) -> None:
        """Stop the run when many norms are not finite."""
        count = len(self._broken)
        if count > MAX_NONFINITE:
            where = self._write_broken() if self._policy.parallel.rank == 0 else ""
            raise BrokenStepError(
                f"{count} of {self.norms_sq.numel()} gradient norms or losses are not finite: the model or its "
                f"input is broken{where}"
            )

    def _write_broken(self) -> str:
        """Write these samples; returns where they are, or why they are not there."""
        path = self._config.run_dir / "nonfinite_samples.jsonl"
        samples = (asdict(replace(sample, routes=None, recorded=None)) for sample in self._broken)
        try:
            path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
        except OSError as error:  # the other ranks are about to save the state together with this one
            return f"; the samples cannot be written to {path}: {error.strerror}"
        return f"; the samples are in {path}"

    def _from_all_replicas(self, norms: Tensor) -> Tensor:
        """All-reduce norms [n], of which each replica knows its own samples, over the replicas."""
        whole = norms.to(self._policy.parallel.device)
        all_reduce(whole, self._policy.parallel.dp_group)
        return whole.cpu()
