"""Training prompts without end: sources mixed by weight, a shuffle per epoch, and an exact position to resume from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.data.mixture import next_source, whole_weights
from oblr_megatron.data.prompt_set import PromptSet
from oblr_megatron.data.rows import Skipped
from oblr_megatron.data.training import training_sets
from oblr_megatron.errors import UserError
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig, SourceConfig


class PromptStream:
    """Prompts without end: every epoch of a source holds each of its usable rows exactly once.

    The order within an epoch is drawn from the seed and the epoch. A batch that begins at the end of an epoch goes on
    in the next one: within an epoch no prompt is lost or repeated. Several sources take turns by their weights
    (mixture.py), each with epochs of its own.

    Example:
        stream = PromptStream(config.data, tokenizer, seed=0, held_out=config.evaluate.data)
        prompts = stream.take(128)
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
            held_out: further sets whose questions are kept out, beside config.exclude.

        Raises:
            UserError: a source cannot be read, or holds no usable row.
        """
        sets = training_sets(config, tokenizer, held_out or {})
        self._lanes = [_Lane(prompts, seed, number, config.shuffle) for number, prompts in enumerate(sets)]
        self._weights = whole_weights([_weight(*pair) for pair in zip(config.train, sets, strict=True)])
        self._seed = seed
        self._fingerprint = _fingerprint(sets)

    @property
    def skipped(self) -> list[Skipped]:
        """Rows left out: source by source, each in file order."""
        return [skip for lane in self._lanes for skip in lane.prompts.skipped]

    @property
    def num_skipped(self) -> int:
        """How many rows that is."""
        return sum(len(lane.prompts.skipped) for lane in self._lanes)

    @property
    def epoch(self) -> int:
        """Passes that were completed over every source."""
        return min(lane.epoch for lane in self._lanes)

    def __len__(self) -> int:
        """Usable rows of all sources."""
        return sum(map(len, self._lanes))

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        taken = [lane.taken for lane in self._lanes]
        prompts = []
        for _ in range(count):
            source = next_source(taken, self._weights)
            taken[source] += 1
            prompts.append(self._lanes[source].take())
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; plain JSON values."""
        whose = {"seed": self._seed, "fingerprint": self._fingerprint}
        if len(self._lanes) == 1:
            return {**self._lanes[0].position(), **whose}
        return {"sources": [lane.position() for lane in self._lanes], "weights": self._weights, **whose}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the prompt that would have come next.

        Raises:
            UserError: the position belongs to other data, another seed or other weights.
        """
        weights = self._weights if len(self._lanes) > 1 else None
        for key, own in (("fingerprint", self._fingerprint), ("seed", self._seed), ("weights", weights)):
            if state.get(key) != own:
                raise UserError(
                    f"the saved data position belongs to another {key} ({state.get(key)!r}, now {own!r})",
                    where=", ".join(lane.prompts.path for lane in self._lanes),
                    fix="resume with the data, weights, template and seed the run was started with",
                )
        for lane, position in zip(self._lanes, state.get("sources", [state]), strict=True):
            lane.seek(position["epoch"], position["index"])


class _Lane:
    """One source of a stream, and where it stands."""

    def __init__(self, prompts: PromptSet, seed: int, number: int, shuffle: bool) -> None:
        self.prompts = prompts
        self._seed = f"{seed}/{{epoch}}" if number == 0 else f"{seed}/{{epoch}}/{number}"
        self._shuffle = shuffle
        self.seek(0, 0)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def taken(self) -> int:
        """Prompts given since the run began."""
        return self.epoch * len(self) + self._index

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self._index}

    def seek(self, epoch: int, index: int) -> None:
        self.epoch, self._index = epoch, index
        self._order = list(range(len(self)))
        if self._shuffle:
            random.Random(self._seed.format(epoch=epoch)).shuffle(self._order)

    def take(self) -> Prompt:
        prompt = self.prompts[self._order[self._index]]
        self._index += 1
        if self._index == len(self):
            self.seek(self.epoch + 1, 0)
        return prompt


def _weight(source: SourceConfig, prompts: PromptSet) -> float:
    """Of a source in the mixture: its own, else its number of rows (all of them have one, or none)."""
    return len(prompts) if source.weight is None else source.weight


def _fingerprint(sets: list[PromptSet]) -> str:
    """Of one source its own, as positions saved before there were mixtures have it."""
    own = [prompts.fingerprint() for prompts in sets]
    return own[0] if len(own) == 1 else hashlib.sha256("".join(own).encode()).hexdigest()[:16]
