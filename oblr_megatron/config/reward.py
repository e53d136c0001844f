"""The configuration's section about rewards. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from oblr_megatron.config.section import Section


class RewardTermConfig(Section):
    """A further reward, added with its weight."""

    name: str
    """As reward.name."""
    weight: float = 1.0
    """What its values are multiplied by."""


class RewardConfig(Section):
    """How responses are judged."""

    name: str = "math"
    """"exact_match"; "math" (the last \\boxed{...}), "math:gsm8k" (what follows ####, else \\boxed), "math:last_line";
    "format", "overlong"; your own "package.module:function"; or the URL of a service (docs/rewards.md)."""
    weight: float = 1.0
    """What its values are multiplied by; accuracies are of the values before that, and of this reward alone."""
    terms: tuple[RewardTermConfig, ...] = ()
    """Further rewards that are added, e.g. [{name = "overlong", weight = 1.0}]."""
    timeout_s: float = Field(10.0, gt=0)
    """Deadline of one call, seconds: of a response, of a batch, or of an HTTP request with its retries; past it the
    samples score 0 and are counted."""
    num_workers: int = Field(2, ge=1)
    """Worker processes that judge responses, or HTTP requests in flight at once."""
    batch_size: int = Field(64, ge=1)
    """Responses handed at once to a batch or async function or to a service, rounded up to whole groups."""
    retries: int = Field(3, ge=0)
    """Further attempts of an HTTP request that failed."""
    api_key_env: str = ""
    """Environment variable whose value goes to the service as a bearer token; empty for none."""
    format_pattern: str = ""
    """What "format" wants of the whole response, a regular expression; by default exactly one complete \\boxed{...}."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Over the last so many tokens before rollout.max_response_tokens "overlong" falls from 0 to -1 (arXiv 2503.14476,
    equation 13)."""
