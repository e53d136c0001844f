"""The configuration's section about the optimizer. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class OptimizerConfig(Section):
    """megatron-core's optimizer."""

    name: Literal["adam", "sgd"] = "adam"
    """Optimizer."""
    lr: float = Field(1e-6, gt=0)
    """eta_0: the rate at the end of warm-up (snr.reference "warmup") or at full signal ("one"); the constant schedule's
    rate, or where the cosine starts."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps in which the rate rises linearly, under every schedule but the controls: they have their source's rates."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Where the cosine schedule ends, as a share of lr."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled for Adam, torch's L2 term for SGD. Norm weights do not decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first moment decay."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second moment decay."""
    adam_eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    sgd_momentum: float = Field(0.0, ge=0, lt=1)
    """SGD's momentum."""
    clip_grad: float = Field(1.0, ge=0)
    """Clip the global gradient norm here, after it was measured; 0 turns it off."""
