"""Measures the difference between the logits of a quantised model and of the original.

For logits a and b [V] of a position: |a - b|, the divergence KL(softmax a || softmax b), and whether both have the same
most likely token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 256  # positions converted to fp32 at a time


@dataclass(frozen=True, slots=True)
class LogitError:
    """The error over all positions of the held-out rows.

    Example: LogitError(tokens=5210, max_abs=1.2, mean_abs=0.08, original_rms=2.9, kl=0.004, top1_agreement=0.985)
    """

    tokens: int
    max_abs: float
    mean_abs: float
    original_rms: float  # root mean square of the original's logits, as a scale for max_abs and mean_abs
    kl: float  # mean over positions, nats
    top1_agreement: float  # share of positions


class LogitComparison:
    """Accumulates the error over batches in fp64."""

    def __init__(self) -> None:
        self._tokens = self._agreeing = self._elements = 0
        self._max_abs = self._kl = self._abs = self._squares = 0.0

    def add(self, original: Tensor, quantized: Tensor) -> None:
        """Add the logits of one batch, [t, V] each, in any float dtype and for the same positions."""
        assert original.shape == quantized.shape, f"{tuple(original.shape)} against {tuple(quantized.shape)}"
        for one, other in zip(original.split(CHUNK), quantized.split(CHUNK), strict=True):
            before, after = one.float(), other.float()
            distance = (before - after).abs()
            self._tokens += len(before)
            self._elements += before.numel()
            self._max_abs = max(self._max_abs, float(distance.max()))
            self._abs += float(distance.sum(dtype=torch.float64))
            self._squares += float(before.square().sum(dtype=torch.float64))
            self._agreeing += int((before.argmax(-1) == after.argmax(-1)).sum())
            divergence = F.kl_div(after.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True)
            self._kl += float(divergence.sum(dtype=torch.float64))

    def result(self) -> LogitError:
        """The error over everything added; at least one position is needed."""
        assert self._tokens > 0, "nothing was compared"
        return LogitError(
            tokens=self._tokens,
            max_abs=self._max_abs,
            mean_abs=self._abs / self._elements,
            original_rms=(self._squares / self._elements) ** 0.5,
            kl=self._kl / self._tokens,
            top1_agreement=self._agreeing / self._tokens,
        )
