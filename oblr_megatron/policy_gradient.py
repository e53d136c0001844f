"""The policy gradient of one step as the loop sees it: norms w, coefficients c(w), checks of the norms, statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from oblr_megatron.engine.protocol import call_seed
from oblr_megatron.errors import BrokenStepError
from oblr_megatron.observe import step_metrics
from oblr_megatron.rollout.routes import without_routes
from oblr_megatron.rollout.waves import mini_batches

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.algo.advantage import AdvantageRule
    from oblr_megatron.gradient.step import TrainingGradient
    from oblr_megatron.model.momentum import GradientMomentum
    from oblr_megatron.observe.step_metrics import StepRecord
    from oblr_megatron.rollout.waves import Wave
    from oblr_megatron.sampling import Sampling
    from oblr_megatron.types import GradientStats

CHECKED = 16  # responses whose exact norms are compared with estimates, rounded up to whole prompts
MAX_NONFINITE = 3  # norms of a step; more of them mean a broken model, and the run stops


class PolicyGradient:
    """Adds up the gradient of a step's prompts, which come in one wave (`whole`) or in several.

    `momentum` is the average of earlier gradients, for the estimator with this name.
    """

    def __init__(
        self,
        gradients: TrainingGradient,
        sampling: Sampling,
        momentum: GradientMomentum | None,
        record: StepRecord,
        *,
        whole: bool,
    ) -> None:
        self._gradients, self._momentum, self._record = gradients, momentum, record
        self._config = config = sampling.config
        self._timer, self._rank, self._sampling = sampling.timer, sampling.parallel.rank, sampling
        self._sums = gradients.begin(whole=whole)
        self._norms_sq = torch.zeros(config.num_prompts, config.group_size, dtype=torch.float64)
        self._exact = torch.zeros_like(self._norms_sq)  # of the samples that estimates are compared with
        self._measured = self._of_norms()
        self._sums_samples = config.measures_norms and config.gradnorm.sample_fraction == 1
        self._sample_sq_norm = 0.0
        self._later: list[tuple[Wave, AdvantageRule, Tensor]] = []  # further updates, with log pi_old [n, T]

    def add(self, wave: Wave, advantage: AdvantageRule) -> None:
        """Add g = -sum_i c_i sum_t rho_t grad log pi(o_i,t) of a wave's samples: the gradient to descend.

        With `algo.updates_per_batch` the wave is the whole batch. Its first mini-batch is added; the others wait.
        """
        own, *others = mini_batches(wave, self._config.algo.updates_per_batch)
        own = self._with_routes(own, own.positions)
        if others:
            others = [self._with_routes(part, range(len(part.prompts))) for part in others]
            rules = [advantage.of_update(part.positions) for part in others]
            with self._timer("gradient"):  # before the weights change
                old = [
                    self._gradients.old_logprobs(part.samples, rule.active)
                    for part, rule in zip(others, rules, strict=True)
                ]
            self._later = list(zip(others, rules, old, strict=True))
            advantage = advantage.of_update(own.positions)
        self._add(own, advantage)

    def later_updates(self) -> Iterator[GradientStats]:
        """With `algo.updates_per_batch`, leave g of each further update in main_grad, and return its statistics.

        The caller steps the optimizer after each. The record gets the statistics of all updates together.
        """
        found = self._record.stats
        assert found is not None, "finish() comes first"
        sq_norms = [found.sq_norm]
        for part, advantage, old in self._later:
            sums = self._gradients.begin(whole=True, after=self._sums)
            self._gradients.add(
                sums,
                range(len(part.prompts)),
                part.samples,
                advantage,
                advantage.active,
                norms_wanted=False,
                old_logprobs=old,
                timer=self._timer,
            )
            stats = self._gradients.finish(sums, self._timer)
            sq_norms.append(stats.sq_norm)
            count = len(sq_norms)
            self._record.stats = replace(stats, sq_norm=sum(sq_norms) / count, loss=stats.loss / count)
            yield stats

    def _with_routes(self, wave: Wave, positions: Sequence[int]) -> Wave:
        """The wave with the routes of the samples that this rank trains on; the prompts count as at `positions`."""
        if not self._config.model.moe_routing_replay:
            return wave
        samples = self._sampling.with_routes(wave.samples, self._gradients.own_samples(positions, wave.samples))
        return replace(wave, batch=replace(wave.batch, samples=samples))

    def _add(self, wave: Wave, advantage: AdvantageRule) -> None:
        config, active, chosen = self._config, advantage.active, list(wave.positions)
        if config.uses_norms:
            self._exact[chosen] = self._check(wave, active)
        found = self._gradients.add(
            self._sums,
            wave.positions,
            wave.samples,
            advantage,
            active,
            norms_wanted=config.uses_norms,
            measured=None if self._measured is None else self._measured[chosen],
            timer=self._timer,
        )
        norms_sq = found.view(len(chosen), -1)
        self._norms_sq[chosen] = norms_sq
        if self._sums_samples:
            coefficients = advantage(range(len(norms_sq)), norms_sq)
            self._sample_sq_norm += float((coefficients**2 * norms_sq.nan_to_num(posinf=0.0)).sum())

    def finish(self) -> tuple[GradientStats, Tensor]:
        """Leave g in main_grad, summed over all ranks.

        Returns:
            The statistics of g, and w [Q, G] fp64: zeros for groups without a gradient and where nothing needs w.

        Raises:
            BrokenStepError: more than MAX_NONFINITE norms are not finite; the samples are saved first. Or trainer and
                engine differ under model.batch_invariant.
        """
        record = self._record
        stats = self._gradients.finish(self._sums, self._timer)
        measured = self._exact > 0
        if measured.any():
            record.metrics["gradnorm/estimate_corr"] = step_metrics.correlation(
                self._exact[measured], self._norms_sq[measured]
            )
        if self._config.model.batch_invariant and stats.logprob_abs_diff:
            raise BrokenStepError(
                f"step {record.done}: the log-probs of trainer and engine differ by {stats.logprob_abs_diff:.3g} nats "
                "a token, and model.batch_invariant promises 0; see docs/zero_mismatch.md, or set it to false"
            )
        if self._config.uses_norms:
            self._refuse_broken()
        if self._sums_samples:
            stats = replace(stats, sample_sq_norm=self._sample_sq_norm)
        if self._momentum is not None:
            with self._timer("gradient"):
                stats = replace(stats, momentum_dot=self._momentum.take(stats.sq_norm))
        record.stats = stats
        return stats, self._norms_sq

    def _of_norms(self) -> Tensor | None:
        """The prompts of the step that norms are measured of, at random: [Q] bool; None for all."""
        fraction, num_prompts = self._config.gradnorm.sample_fraction, self._config.num_prompts
        if fraction == 1:
            return None
        generator = torch.Generator().manual_seed(call_seed(self._config.seed, self._record.done))
        chosen = torch.randperm(num_prompts, generator=generator)[: max(1, round(fraction * num_prompts))]
        return torch.zeros(num_prompts, dtype=torch.bool).index_fill_(0, chosen, True)

    def _check(self, wave: Wave, active: Tensor) -> Tensor:
        """Exact norms [k, G] of a few prompts when estimates are due for a comparison, before the gradient; else 0."""
        config, options = self._config, self._config.gradnorm
        none = torch.zeros(len(active), config.group_size, dtype=torch.float64)
        if options.source == "exact" or not options.check_every or (self._record.done - 1) % options.check_every:
            return none
        estimated = active if self._measured is None else active & self._measured[list(wave.positions)]
        candidates = estimated.nonzero().flatten()
        few = -(-CHECKED * len(active) // (config.group_size * config.num_prompts))
        chosen = torch.zeros_like(active)
        chosen[candidates[:: max(1, len(candidates) // few)][:few]] = True
        with self._timer("gradnorm"):
            found = self._gradients.norms(wave.samples, chosen, wave.positions, source="exact")
        return found.view(none.shape)

    def _refuse_broken(self) -> None:
        """Count norms that are not finite; stop the run when there are many."""
        broken = (~self._norms_sq.isfinite()).flatten().nonzero().flatten().tolist()
        self._record.metrics["gradnorm/nonfinite"] = len(broken)
        if len(broken) > MAX_NONFINITE:
            where = self._write(broken) if self._rank == 0 else ""
            raise BrokenStepError(
                f"{len(broken)} of {self._norms_sq.numel()} gradient norms are not finite: the model or its input is "
                f"broken{where}"
            )

    def _write(self, broken: Sequence[int]) -> str:
        """Write these samples; returns where they are, or why they are not there."""
        path, samples = self._config.run_dir / "nonfinite_samples.jsonl", without_routes(self._record.samples)
        try:
            path.write_text("".join(json.dumps(asdict(samples[n])) + "\n" for n in broken), encoding="utf-8")
        except OSError as error:  # the other ranks are about to save the state together with this one
            return f"; the samples cannot be written to {path}: {error.strerror}"
        return f"; the samples are in {path}"
