"""Section [gradnorm]: per-response gradient norms. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class GradnormConfig(Section):
    """Squared gradient norms w of single responses."""

    source: Literal["exact", "logit", "length"] = "exact"
    """Source of w: the exact norm, or an estimate. "logit": energy of the score function at the logits. "length":
    response tokens (docs/gradnorm.md)."""
    mode: Literal["auto", "inline", "two_pass", "stash", "bookkeep"] = "auto"
    """Computation of norms. "inline": in the one gradient pass, if the baseline reads no norms of its own step.
    "two_pass": a separate pass. "stash", "bookkeep": one pass that keeps gradients, or their factors. "auto" chooses
    and logs why (docs/gradnorm.md)."""
    sample_fraction: float = Field(1.0, gt=0, le=1)
    """Norms are measured for this random share of the prompts. Values below 1 need a baseline that reads only earlier
    norms."""
    window_tokens: int = Field(65536, ge=1)
    """Tokens of which bookkeep holds the factors at once; a longer prompt goes alone."""
    check_every: int = Field(0, ge=0)
    """With an estimated source: log its correlation with the exact norms of 16 responses every this many steps. 0:
    never."""
    always: bool = False
    """Measure norms for the metrics even if the baseline does not need them."""
