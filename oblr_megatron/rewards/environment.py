"""The reward that an environment gave (docs/environments.md)."""

from __future__ import annotations

from collections.abc import Sequence

from oblr_megatron.rewards.base import Fault, Reward, RewardResult
from oblr_megatron.types import Prompt, Sample


class EnvironmentReward(Reward):
    """Reads `Sample.environment_reward`.

    0 for an episode that reached a limit before it gave one, and for a failed one, which is counted.
    """

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        faults = {n: fault for n, sample in enumerate(samples) if (fault := _fault(sample)) is not None}
        missing = any(fault == "failed" and samples[n].finish_reason == "stop" for n, fault in faults.items())
        return RewardResult(
            [sample.environment_reward or 0.0 for sample in samples],
            faults=faults,
            error="the environment returned no reward" if missing else None,
        )


def _fault(sample: Sample) -> Fault | None:
    match sample.finish_reason:
        case "failed" | "late" as fault:
            return fault
        case "stop" if sample.environment_reward is None:
            return "failed"
    return None
