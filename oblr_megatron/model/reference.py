"""The reference model of a KL penalty: a copy of the initial weights, swapped into the policy for a forward pass.

With adapters it is the policy without them, and no copy.

reference = Reference(policy)              # after load_hf_weights, before a checkpoint is loaded
reference.logprobs(samples, batches, temperature=1.0)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from oblr_megatron.model.lora.adapters import adapters_of, switched_off
from oblr_megatron.model.token_values import response_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.model.policy import Policy
    from oblr_megatron.types import MicroBatch, Sample


class Reference:
    """A copy of this rank's weights at construction, in their dtype and on their device."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._copies = not adapters_of(policy)
        named = policy.named_parameters() if self._copies else ()
        self._weights = [parameter.detach().clone() for _, parameter in named]

    def logprobs(self, samples: Sequence[Sample], batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """log pi_ref [N, T] fp64 of every response token, by a forward pass; arguments as in `response_logprobs`.

        The reference routes by itself: pi_ref is one model, which no update of the policy changes (docs/moe.md).
        """
        with self.in_place():
            own = [replace(batch, routes=None) for batch in batches]
            return response_logprobs(self._policy, samples, own, temperature)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy has the reference weights inside this context, and its own again after it, even on an error."""
        if not self._copies:
            with switched_off(self._policy):
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap the contents in place, one parameter at a time: other objects may hold pointers to the weights."""
        for (_, parameter), other in zip(self._policy.named_parameters(), self._weights, strict=True):
            held = parameter.clone()
            parameter.copy_(other)
            other.copy_(held)
