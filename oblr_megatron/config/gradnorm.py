"""The configuration's section about per-sample gradient norms. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class GradnormConfig(Section):
    """Squared gradient norms of single responses."""

    source: Literal["exact", "sketch", "logit", "length"] = "exact"
    """What stands for w: the exact norm, or an estimate. "sketch": an unbiased random projection; "logit": the energy
    of the score at the logits, forward only; "length": response tokens. An estimate leaves the gradient unbiased."""
    mode: Literal["auto", "two_pass", "stash", "bookkeep"] = "auto"
    """How norms are computed: "two_pass", a pass of their own; "stash", one pass that keeps a gradient of each response
    of a prompt; "bookkeep", one pass that keeps what weight gradients are made of. "auto" chooses, and says why."""
    stash_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stashed gradients (float64 runs keep float64); norms are taken before they are rounded."""
    stash_offload: bool = False
    """Keep the stashed gradients in host memory."""
    stash_spread: int = Field(1, ge=1)
    """Data-parallel ranks that share the responses of a prompt: each stashes group_size / stash_spread gradients."""
    stash_lag: int = Field(1, ge=0)
    """Further prompts that a rank has buffers for while the norms of other ranks are awaited (stash_spread > 1)."""
    window_tokens: int = Field(65536, ge=1)
    """Tokens whose factors bookkeep holds together; a prompt with more goes alone."""
    sketch_size: int = Field(32, ge=1)
    """m, rows of the sketch's random projections: a norm's relative error is 1 / m to 2 / sqrt(m)."""
    check_every: int = Field(0, ge=0)
    """With an estimated source: every so many steps, log its correlation with the exact norms; 0 never."""
    check_samples: int = Field(16, ge=2)
    """Responses of that check, rounded up to whole prompts."""
    always: bool = False
    """Measure norms even when the baseline does not need them, for the metrics."""
