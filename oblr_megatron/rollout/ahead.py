"""Samples of the next step, which engines draw while the trainer works on this one (`rollout.overlap = "one_step"`).

    ahead = Ahead(engines, stream, config, step=8)      # during step 7, with the weights before its update
    ahead.finish()                                      # before that update: the engines still hold these weights
    prompts, samples = ahead.prompts, ahead.finish()    # in step 8; the samples are one update old

Nothing is in flight between two steps. A checkpoint therefore keeps the position of the data before these prompts. A
resumed run samples them again, with newer weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from oblr_megatron.engine.protocol import RolloutEngine, SamplingRequest, call_seed

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.data.prompts import PromptStream
    from oblr_megatron.rollout.replay import ReplayEngine
    from oblr_megatron.types import Prompt, Sample


class Ahead:
    """The batch of a later step. Every rank makes it and calls every method at the same point."""

    def __init__(self, engines: RolloutEngine, stream: PromptStream | ReplayEngine, config: Config, step: int) -> None:
        """Take the prompts of `step`, counted from 0, and start to sample.

        The engines must not share memory with the trainer by turns.
        """
        self.position: dict[str, Any] = stream.state_dict()
        self.epoch: int = stream.epoch
        """Position in the data before the prompts were taken, and completed passes over it."""
        self.prompts: list[Prompt] = stream.next_prompts(config.num_prompts)
        """The Q prompts of the step."""
        request = SamplingRequest.for_training(config, call_seed(config.seed, step))
        self._flight = engines.begin(self.prompts, request)
        self._samples: list[Sample] | None = None

    def finish(self) -> list[Sample]:
        """Wait for the rest, and return all samples: N = Q * G, prompt-major. Raises as `InFlight.next_groups`."""
        if self._samples is None:
            groups = self._flight.next_groups(math.inf)
            self._samples = [sample for group in groups.values() for sample in group]
        return self._samples
