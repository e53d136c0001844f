"""The policy gradient by known coefficients, of samples or of tokens, and the gradient of a KL penalty with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oblr_megatron.data.packing import microbatches
from oblr_megatron.gradnorm.score import Penalty, score_loss
from oblr_megatron.model.step import run_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.gradnorm.one_pass import Work
    from oblr_megatron.gradnorm.sharing import Sharing
    from oblr_megatron.model.qwen3 import Policy
    from oblr_megatron.types import MicroBatch


class PlainPass:
    """One forward and backward over the samples that have a gradient; `prepare` comes before every step's `add`."""

    def __init__(self, policy: Policy, config: Config, sharing: Sharing) -> None:
        self._policy, self._config, self._sharing = policy, config, sharing
        self.prepare(torch.zeros(config.num_prompts * config.group_size, dtype=torch.float64), None)

    def prepare(self, coefficients: Tensor, penalty: Penalty | None) -> None:
        """Take up the step's c, [N] of samples or [N, T] of tokens, and its penalty; who has neither is left out."""
        used = coefficients != 0 if coefficients.dim() == 1 else (coefficients != 0).any(-1)
        if penalty is not None:
            used = used.cpu() | (penalty.coefficients != 0).cpu()
        self._used = used.tolist()
        self._coefficients, self._penalty = coefficients.to(self._policy.parallel.device), penalty

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """main_grad += the gradient of these samples."""
        used = [n for n in indices if self._used[n]]
        device = self._policy.parallel.device
        batches = self._sharing.even(microbatches(work.samples, used, self._config.parallel, device=device))
        if not batches:
            return
        temperature = self._config.rollout.temperature
        loss_of = score_loss(
            self._policy, temperature, work.ratios, self._of_batch, penalty=self._penalty, records=True
        )
        records = run_schedule(self._policy, batches, loss_of)
        weighed = torch.ones(sum(batch.num_samples for batch in batches), dtype=torch.float64)  # c is in the scores
        work.figures.add(records, weighed)

    def _of_batch(self, batch: MicroBatch) -> Tensor:
        if self._coefficients.dim() == 2:
            return batch.of_tokens(self._coefficients)
        return batch.per_token(self._coefficients[batch.sample_index])
