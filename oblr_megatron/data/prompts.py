"""An endless stream of training prompts: sources mixed by weight, shuffled every epoch, resumable at any prompt.

Sources are mixed by Balinski and Young's quota method (1975), an apportionment rule without randomness. Let W be the
share of a source. After t prompts it has given more than W t - 1 and less than W t + 1 prompts. Among the sources that
stay below this bound with one more prompt, the one with the smallest (taken + 1) / W gives the next.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any

from oblr_megatron.data.prompt_set import PromptSet
from oblr_megatron.data.training import training_sets
from oblr_megatron.errors import UserError
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig, SourceConfig


class PromptStream:
    """An endless stream of prompts: every epoch of a source contains each of its usable rows exactly once.

    The order within an epoch depends on the seed and the epoch number. A batch may span two epochs; no prompt is lost
    or repeated. Several sources are mixed by their weights; each counts its own epochs.

    Example:
        stream = PromptStream(config.data, tokenizer, seed=0, held_out=config.evaluate.data)
        prompts = stream.next_prompts(128)
        state = stream.state_dict()  # {"epoch": 0, "index": 128, "seed": 0, "fingerprint": "3f0c..."}
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        held_out: Mapping[str, SourceConfig] | None = None,
    ) -> None:
        """Open config.train.

        Args:
            config: sources, columns, template and filters.
            tokenizer: see `PromptSet`.
            seed: of the order.
            held_out: benchmarks to exclude from training, in addition to config.exclude.

        Raises:
            UserError: a source cannot be read or has no usable row.
        """
        sets = training_sets(config, tokenizer, held_out or {})
        self._sources = [_Source(prompts, seed, number, config.shuffle) for number, prompts in enumerate(sets)]
        self._weights = whole_weights([_weight(*pair) for pair in zip(config.train, sets, strict=True)])
        self._seed = seed
        self._fingerprint = _fingerprint(sets)
        self.skipped = [skip for prompts in sets for skip in prompts.skipped]  # source by source, each in file order

    @property
    def sets(self) -> list[PromptSet]:
        """The prompts of each source."""
        return [source.prompts for source in self._sources]

    @property
    def num_skipped(self) -> int:
        """The number of skipped rows."""
        return len(self.skipped)

    @property
    def epoch(self) -> int:
        """Epochs completed on every source."""
        return min(source.epoch for source in self._sources)

    def __len__(self) -> int:
        """Usable rows of all sources."""
        return sum(map(len, self._sources))

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        taken = [source.taken for source in self._sources]
        prompts = []
        for _ in range(count):
            number = next_source(taken, self._weights)
            taken[number] += 1
            prompts.append(self._sources[number].next_prompt())
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain JSON values."""
        identity = {"seed": self._seed, "fingerprint": self._fingerprint}
        if len(self._sources) == 1:
            return {**self._sources[0].position(), **identity}
        return {"sources": [source.position() for source in self._sources], "weights": self._weights, **identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position.

        Raises:
            UserError: the position was saved with other data, another seed or other weights.
        """
        weights = self._weights if len(self._sources) > 1 else None
        for key, own in (("fingerprint", self._fingerprint), ("seed", self._seed), ("weights", weights)):
            if state.get(key) != own:
                raise UserError(
                    f"the data position was saved with {key} {state.get(key)!r}, this run has {own!r}",
                    where=", ".join(source.prompts.path for source in self._sources),
                    fix="resume with the saved data, weights, template, benchmarks, seed and data.max_prompt_tokens, "
                    "and with the columns that rewards and environment take",
                )
        for source, position in zip(self._sources, state.get("sources", [state]), strict=True):
            source.seek(position["epoch"], position["index"])


class _Source:
    """One source of a stream and the position in it."""

    def __init__(self, prompts: PromptSet, seed: int, number: int, shuffle: bool) -> None:
        self.prompts = prompts
        self._seed = f"{seed}/{{epoch}}" if number == 0 else f"{seed}/{{epoch}}/{number}"
        self._shuffle = shuffle
        self.seek(0, 0)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def taken(self) -> int:
        """Prompts taken since the run began."""
        return self.epoch * len(self) + self._index

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self._index}

    def seek(self, epoch: int, index: int) -> None:
        self.epoch, self._index = epoch, index
        self._order = list(range(len(self)))
        if self._shuffle:
            random.Random(self._seed.format(epoch=epoch)).shuffle(self._order)

    def next_prompt(self) -> Prompt:
        prompt = self.prompts[self._order[self._index]]
        self._index += 1
        if self._index == len(self):
            self.seek(self.epoch + 1, 0)
        return prompt


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The weights scaled to whole numbers, exactly. [0.5, 0.25] -> [2, 1]"""
    exact = [Fraction(weight) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def next_source(taken: Sequence[int], weights: Sequence[int]) -> int:
    """Position of the source that gives the next prompt.

    Args:
        taken: prompts that each source has given so far.
        weights: positive whole numbers.

    Example: weights [3, 1] give the order 0, 0, 0, 1, 0, 0, 0, 1, ...
    """
    total, given = sum(weights), sum(taken) + 1
    eligible = [source for source, weight in enumerate(weights) if taken[source] * total < weight * given]
    return min(eligible, key=lambda source: Fraction(taken[source] + 1, weights[source]))


def _weight(source: SourceConfig, prompts: PromptSet) -> float:
    """The configured weight, else the number of rows. Either all sources have a weight or none."""
    return len(prompts) if source.weight is None else source.weight


def _fingerprint(sets: list[PromptSet]) -> str:
    return hashlib.sha256("".join(prompts.fingerprint() for prompts in sets).encode()).hexdigest()[:16]
