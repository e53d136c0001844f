"""Arguments and results of an environment function, and the checks of its results. Imports no torch."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oblr_megatron.data.chat import with_chat_template
from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.messages import Begin, Ended, SampleCall
from oblr_megatron.processes.calls import score_of
from oblr_megatron.types import RECORDED, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\u2402oblr-turn\u2403"  # stands for the policy's turn; no template changes it
ROUNDING = 1e-6
"""A log-prob that a function returns may differ by this much from the engine's."""


class LimitError(Exception):
    """The episode has reached its number of turns or tokens. A function that lets it pass ends its episode there."""


class NonsenseError(ValueError):
    """A function returned something that cannot be trained on."""


class Draw(NamedTuple):
    """A token that the policy drew. Example: Draw(-0.25, None)"""

    logprob: float
    recorded: NDArray[Any] | None  # its row of `Sample.recorded`


@dataclass(slots=True)
class Episode:
    """All that follows the prompt; what an environment function returns.

    Example after one turn and an observation: Episode((5, 9), tokens=[7, 1, 4], mask=[True, True, False],
                                                       logprobs=[-0.1, -0.02, 0.0])
    """

    prompt_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True where the policy wrote the token
    logprobs: list[float] = field(default_factory=list)  # 0 where it did not
    reward: float | None = None
    text: str = ""  # what rewards read: by default the policy's last turn

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and tokens: the prompt of the next turn."""
        return (*self.prompt_ids, *self.tokens)

    def wrote(self, turn: Turn) -> None:
        """Append a response of the policy."""
        self.tokens += turn.ids
        self.mask += [True] * len(turn.ids)
        self.logprobs += turn.logprobs
        self.text = turn.text

    def saw(self, ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.tokens += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)


@dataclass(slots=True)
class EpisodeEngine:
    """The handle that an environment function gets; one for each episode."""

    begin: Begin
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_turns: int
    _send: Callable[[SampleCall], Awaitable[Turn]]
    _call: Callable[[str, Mapping[str, Any]], Awaitable[str]]
    template_options: Mapping[str, Any] = field(default_factory=dict)  # data.chat_template_options
    turns: list[tuple[tuple[int, ...], Turn]] = field(default_factory=list)  # (prompt of the turn, response)
    _calls: int = 0

    async def generate(self, ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[int] = ()) -> Turn:
        """Sample the policy's response to `ids`. Calls may run at the same time.

        Args:
            ids: token ids; text is never tokenised again.
            max_tokens: of the response; by default, and at most, what the episode has left.
            stop: tokens that end the response and are its last one, in addition to the model's.

        Raises:
            LimitError: the episode has no turn or no token left.
            ValueError: there are no ids, or one is not of the vocabulary.
        """
        asked = checked_ids(ids, self.vocab_size, "the prompt of a turn")
        if not asked:
            raise NonsenseError("the prompt of a turn has no tokens")
        room = self.room(asked)
        if self._calls >= self.max_turns:
            raise LimitError(f"the episode has had its {self.max_turns} turns (rollout.environment.max_turns)")
        if room < 1:
            raise LimitError("the episode has used all its tokens (rollout.max_response_tokens)")
        most = room if max_tokens is None else max(1, min(room, max_tokens))
        call, self._calls = self._calls, self._calls + 1
        stops = checked_ids(stop, self.vocab_size, "stop")
        turn = await self._send(SampleCall(self.begin.number, call, asked, most, stops))
        self.turns.append((asked, turn))
        return turn

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of rollout.environment.tools in a worker process; what it returned, or "Error: ..."."""
        return await self._call(tool, arguments)

    def room(self, ids: Sequence[int]) -> int:
        """Tokens that may still follow `ids`."""
        return len(self.begin.prompt.token_ids) + self.begin.max_tokens - len(ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text of the environment, without special tokens of their own accord."""
        return list(self.tokenizer.encode(_encodable(text), add_special_tokens=False))

    def observation(self, messages: Sequence[Mapping[str, Any]], after: Turn) -> list[int]:
        """Token ids of the chat template's text between the policy's turn and its next one, encoded once.

        The policy's own tokens are never encoded again.

        Args:
            messages: of the environment, e.g. [{"role": "tool", "content": "42"}].
            after: the policy's turn before them, with ids that stay as they are.
        """
        ended = str(self.tokenizer.decode(list(after.ids[-1:]))) if after.finish_reason == "stop" else ""
        return self.encode(observation_text(self.tokenizer, messages, ended, self.template_options))

    def written(self, tokens: Sequence[int]) -> dict[int, list[Draw]]:
        """Places in `tokens` where the engine drew exactly this token after exactly the tokens before.

        Several turns may have drawn it, and batching changes a log-prob's last digits.
        """
        whole = (*self.begin.prompt.token_ids, *tokens)
        first = len(self.begin.prompt.token_ids)
        drawn: dict[int, list[Draw]] = {}
        for asked, turn in self.turns:
            if len(asked) < first or whole[: len(asked)] != asked:
                continue
            rows = [None] * len(turn.ids) if turn.recorded is None else turn.recorded
            draws = zip(turn.ids, turn.logprobs, rows, strict=True)
            for place, (token, logprob, row) in enumerate(draws, start=len(asked)):
                if place >= len(whole) or whole[place] != token:
                    break
                drawn.setdefault(place - first, []).append(Draw(logprob, row))
        return drawn


def observation_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    ended: str,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The template's text from the end of the policy's turn to the beginning of its next one.

    Args:
        tokenizer: with a chat template.
        messages: of the environment.
        ended: text of the token that ended the policy's turn, which the template writes as well; "" for none.
        options: of the template (data.chat_template_options), as for the prompt.

    Raises:
        ValueError: the template leaves out the turn before the messages.

    Example for Qwen3 after "<|im_end|>", line by line: "", "<|im_start|>user", "<tool_response>", "42",
    "</tool_response><|im_end|>", "<|im_start|>assistant", "".
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, *map(dict, messages)]
    whole = with_chat_template(turns, options or {}, tokenizer)
    _before, mark, after = whole.rpartition(_MARK)
    if not mark:
        raise ValueError("the chat template leaves out the assistant's turn before an observation")
    return after.removeprefix(ended)


def ended(engine: EpisodeEngine, returned: object) -> Ended:
    """The message about an episode that returned.

    Args:
        engine: of the episode.
        returned: an `Episode`, or (tokens, mask, log-probs) or (tokens, mask, log-probs, reward).

    Raises:
        NonsenseError: it cannot be trained on; says why.
    """
    episode = _as_episode(engine, returned)
    tokens, mask = checked_ids(episode.tokens, engine.vocab_size, "tokens"), tuple(map(bool, episode.mask))
    if not len(tokens) == len(mask) == len(episode.logprobs):
        raise NonsenseError(f"{len(tokens)} tokens, {len(mask)} values of the mask, {len(episode.logprobs)} log-probs")
    if len(tokens) > engine.begin.max_tokens:
        raise NonsenseError(f"{len(tokens)} tokens; rollout.max_response_tokens is {engine.begin.max_tokens}")
    drawn, chosen = engine.written(tokens), {}
    for place, (own, given) in enumerate(zip(mask, episode.logprobs, strict=True)):
        if not own:
            continue
        if place not in drawn:
            raise NonsenseError(f"token {place} is marked as the policy's, but the engine did not draw it there")
        draw = chosen[place] = _nearest(drawn[place], given)
        if not abs(draw.logprob - given) <= ROUNDING:
            raise NonsenseError(f"the log-prob of token {place} is {given!r:.40}; the engine's was {draw.logprob:g}")
    reward = None
    if episode.reward is not None and (reward := score_of(episode.reward).value) is None:
        raise NonsenseError(f"the reward {episode.reward!r:.40} is not a finite number")
    reason: FinishReason = "length" if _cut(engine, tokens) else "stop"
    logprobs, recorded = _laid_out(chosen, len(tokens))
    text = _encodable(episode.text)
    return Ended(engine.begin.number, tokens, logprobs, mask, text, reason, reward, recorded=recorded)


def cut(engine: EpisodeEngine) -> Ended:
    """The message about an episode that reached a limit: its longest turn with all that came before it."""
    prompt = tuple(engine.begin.prompt.token_ids)
    own = [(asked, turn) for asked, turn in engine.turns if asked[: len(prompt)] == prompt]
    if not own:
        return Ended(engine.begin.number, finish_reason="length")
    asked, last = max(own, key=lambda pair: len(pair[0]) + len(pair[1].ids))
    tokens = (*asked, *last.ids)[len(prompt) :]
    chosen = {place: draws[-1] for place, draws in engine.written(tokens).items()}
    mask = tuple(place in chosen for place in range(len(tokens)))
    logprobs, recorded = _laid_out(chosen, len(tokens))
    return Ended(engine.begin.number, tokens, logprobs, mask, last.text, "length", recorded=recorded)


def _nearest(draws: Sequence[Draw], logprob: float) -> Draw:
    """The draw with the log-prob that is closest."""
    return min(draws, key=lambda draw: abs(draw.logprob - logprob))


def _laid_out(chosen: Mapping[int, Draw], count: int) -> tuple[tuple[float, ...], NDArray[Any] | None]:
    """Log-probs and recorded tokens of `count` places. Those of the environment have 0, and name no token."""
    logprobs = tuple(chosen[place].logprob if place in chosen else 0.0 for place in range(count))
    rows = {place: draw.recorded for place, draw in chosen.items() if draw.recorded is not None}
    if not rows:
        return logprobs, None
    recorded = np.zeros((count, len(next(iter(rows.values())))), RECORDED)
    recorded["logprob"] = -np.inf
    for place, row in rows.items():
        recorded[place] = row
    return logprobs, recorded


def checked_ids(ids: Sequence[int], vocab_size: int, what: str) -> tuple[int, ...]:
    """Token ids as plain integers.

    Raises:
        NonsenseError: one is no integer, or outside the vocabulary.
    """
    try:
        checked = tuple(operator.index(token) for token in ids)
    except TypeError:
        raise NonsenseError(f"{what}: {ids!r:.60} are not token ids") from None
    outside = next((token for token in checked if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise NonsenseError(f"{what}: token {outside} is outside the vocabulary of {vocab_size}")
    return checked


def _encodable(text: str) -> str:
    r"""A text of the environment that files and tokenizers can take. Half of a surrogate pair becomes e.g. \ud83d."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def _as_episode(engine: EpisodeEngine, returned: object) -> Episode:
    if isinstance(returned, Episode):
        return returned
    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        raise NonsenseError(f"{returned!r:.60} is no Episode and no (tokens, mask, log-probs[, reward])")
    try:
        tokens, mask, logprobs = (list(part) for part in returned[:3])
        numbers = [float(value) for value in logprobs]
    except (TypeError, ValueError) as error:
        raise NonsenseError(f"tokens, mask or log-probs are no lists of numbers: {error}") from None
    reward = returned[3] if len(returned) == 4 else None
    text = engine.turns[-1][1].text if engine.turns else ""
    return Episode(engine.begin.prompt.token_ids, tokens, mask, numbers, reward, text)


def _cut(engine: EpisodeEngine, tokens: Sequence[int]) -> bool:
    """Whether the tokens end with a turn that had no room left; one that the function limits itself is not cut."""
    whole = (*engine.begin.prompt.token_ids, *tokens)
    return len(tokens) == engine.begin.max_tokens and any(
        turn.finish_reason == "length" and (*asked, *turn.ids) == whole for asked, turn in engine.turns
    )
