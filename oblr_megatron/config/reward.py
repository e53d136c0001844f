"""Section [reward]. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import Field

from oblr_megatron.config.section import LONGEST_WAIT_S, Section

ANSWERLESS = ("format", "overlong", "environment")


def reads_answers(name: str) -> bool:
    """Whether the reward extracts answers, which maj@k counts: all built-in ones but ANSWERLESS do."""
    return name not in ANSWERLESS and (":" not in name or name.startswith(("math:", "reasoning_gym:")))


def scores_of(setting: Callable[[str], Any]) -> str:
    """What decides the score of a response, as text. Averages of other scores are not comparable.

    Args:
        setting: dotted keys of a config as JSON -> values (None: not known).
    """
    keys = ["name", "weight", "terms", "format_pattern", "overlong_buffer_tokens"]
    values = {f"reward.{key}": setting(f"reward.{key}") for key in keys}
    names = [values["reward.name"], *(term["name"] for term in values["reward.terms"] or ())]
    for name, key in (("overlong", "rollout.max_response_tokens"), ("environment", "rollout.environment.function")):
        if name in names:
            values[key] = setting(key)
    return "" if set(map(str, values.values())) == {"None"} else json.dumps(values)


class RewardTermConfig(Section):
    """One more reward, added with its weight."""

    name: str
    """As reward.name."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor of its scores."""


class RewardConfig(Section):
    """Scoring of responses."""

    name: str = "math"
    """"exact_match", "math", "math:gsm8k", "math:last_line", "reasoning_gym", "reasoning_gym:whole", "format",
    "overlong", "environment", your own "package.module:function", or the URL of a service (docs/rewards.md). If all of
    data.train is of reasoning_gym, the default is "reasoning_gym"."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor of its scores. Accuracy metrics use this reward alone, without the factor."""
    terms: tuple[RewardTermConfig, ...] = ()
    """More rewards to add, e.g. [{name = "overlong", weight = 0.5}]. DAPO's penalty is at
    most half of the difference between a right and a wrong reward."""
    timeout_s: float = Field(10.0, gt=0, le=LONGEST_WAIT_S)
    """Deadline of one call, seconds: for a response, a batch, or an HTTP request with its retries. After it the samples
    score 0 and are counted."""
    max_failed_steps: int = Field(3, ge=0)
    """Steps in a row in which the reward fails for every response, after which the run ends with status 1. 0: the run
    goes on."""
    num_workers: int = Field(2, ge=1, le=4096)
    """Worker processes, or concurrent HTTP requests."""
    batch_size: int = Field(64, ge=1)
    """Responses per call of a batch function, an async function or a service, rounded up to whole groups."""
    send_rows: bool = False
    """Whether requests to a service contain "rows": the columns of each response's data row."""
    api_key_env: str = ""
    """Environment variable with the bearer token for the service. Empty: no token."""
    format_pattern: str = ""
    """Regular expression that "format" matches against the whole response; by default exactly one complete
    \\boxed{...}."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Tokens before rollout.max_response_tokens over which "overlong" falls from 0 to -1 (arXiv 2503.14476,
    equation 13)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards that are added up, the main one first."""
        return (self.name, *(term.name for term in self.terms))
