"""One pass for the policy gradient with known coefficients, plus KL penalty and router losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.data.packing import empty_batch, microbatches
from oblr_megatron.gradient.loss_fn import Penalty, score_loss
from oblr_megatron.model.router import RouterLosses
from oblr_megatron.model.step import run_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.gradient.folds import Sharing
    from oblr_megatron.gradient.one_pass import Work
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.types import MicroBatch, RouterMetrics, Sample


class PlainPass:
    """Forward and backward over the samples with a gradient; call `prepare` before the `add` calls of a step."""

    def __init__(self, policy: Policy, config: Config, sharing: Sharing) -> None:
        self._policy, self._config, self._sharing = policy, config, sharing
        self._routers = RouterLosses(policy, config.model) if num_experts(policy.hf_config.to_dict()) else None
        self.prepare(torch.zeros(config.num_prompts * config.group_size, dtype=torch.float64), None)

    def prepare(self, coefficients: Tensor, penalty: Penalty | None) -> None:
        """Set c [N] and the penalty. Samples with neither are left out."""
        used = coefficients != 0
        if penalty is not None:
            used = used.cpu() | (penalty.coefficients != 0).cpu()
        self._used = used.tolist()
        self._coefficients, self._penalty = coefficients.to(self._policy.parallel.device), penalty

    def begin(self, samples: Sequence[Sample], *, first: bool) -> None:
        """Tell the router losses of a mixture how many response tokens all replicas will process in this pass.

        The `first` pass of a step clears the metrics of the step before.
        """
        if self._routers is not None:
            self._routers.begin(sum(samples[n].length for n, used in enumerate(self._used) if used), first=first)

    def router_metrics(self) -> RouterMetrics | None:
        """Router metrics of the step's samples so far, collective; None for a dense model or without any sample."""
        return None if self._routers is None else self._routers.metrics()

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """Add the gradient of these samples to main_grad."""
        used = [n for n in indices if self._used[n]]
        device = self._policy.parallel.device
        batches = self._sharing.even(
            microbatches(work.samples, used, self._config.parallel, self._policy.padding, device=device)
        )
        if not batches and not self._config.parallel.overlap_grad_reduce:
            return
        batches = batches or [empty_batch(device=device)]  # the reduction over replicas starts in a backward pass
        temperature = self._config.rollout.temperature
        loss_of = score_loss(
            self._policy, temperature, work.ratios, self._of_batch, penalty=self._penalty, records=True
        )
        records = run_schedule(self._policy, batches, loss_of, routers=self._routers)
        weighted = torch.ones(sum(batch.num_samples for batch in batches), dtype=torch.float64)  # the loss has c
        work.metrics.add(records, weighted)

    def _of_batch(self, batch: MicroBatch) -> Tensor:
        return batch.per_token(self._coefficients[batch.sample_index])
