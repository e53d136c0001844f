"""Computation of a model's values: as torch and megatron-core do, or as model.batch_invariant asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from oblr_megatron.extension import extension

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig


class Operations(Protocol):
    """Replaces the values of operations, but not their gradients; see `extras.exact_sums.operations`."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def log_softmax_at(self, scores: Tensor, index: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Numerics:
    """Replacements of a model's computations; none by default."""

    operations: Operations | None = None  # for linear layers, norms and log-probs
    attention: ModuleSpec | None = None  # core attention with a rotary embedding of its own
    fields: Mapping[str, Any] = field(default_factory=dict)  # overrides of TransformerConfig's fields


def numerics_of(hf_config: Any, config: ModelConfig) -> Numerics:
    """The numerics of a model."""
    return extension("model.batch_invariant trainer")(hf_config) if config.batch_invariant else Numerics()
