"""Section [optimizer]. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class OptimizerConfig(Section):
    """megatron-core's optimizer."""

    name: Literal["adam", "sgd"] = "adam"
    """Optimizer."""
    lr: float = Field(1e-6, gt=0, le=1e6)
    """eta_0, the learning rate: constant; at the start of the cosine; for "snr" the rate at the end of warm-up
    (snr.reference "warmup") or at full signal ("one")."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Updates of linear warm-up: steps, unless algo.updates_per_batch is set."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final rate of the cosine schedule as a share of lr."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled for Adam, an L2 term for SGD. Norm weights do not decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    sgd_momentum: float = Field(0.0, ge=0, lt=1)
    """SGD's momentum."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; the norm is logged before clipping. 0: no clipping."""
    offload: Literal["none", "sampling"] = "none"
    """"sampling": fp32 masters and moments are in pinned host memory from each push to the next update
    (docs/parallel.md)."""

    @property
    def keeps_moments(self) -> bool:
        """Whether the optimizer has state of its own, besides fp32 masters."""
        return self.name == "adam" or self.sgd_momentum > 0
