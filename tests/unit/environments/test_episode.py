"""What a function returns becomes a sample, or a reason why it does not.

Not covered: processes, engines (tests/e2e/test_environments.py).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.episode import Episode, EpisodeEngine, LimitError, NonsenseError, cut, ended
from oblr_megatron.environments.host import to_sample
from oblr_megatron.environments.messages import Begin, SampleCall
from oblr_megatron.rollout.step_file import SavedStep, read_step, write_step
from oblr_megatron.types import RECORDED, Prompt
from tests.tiny import make_tokenizer

PROMPT = Prompt(row=0, id="p", text="", token_ids=(5, 9), answer="", source="")
NONE = -math.inf


def rows(*recorded: list[tuple[int, float]]) -> np.ndarray:
    return np.array([*recorded], RECORDED)


FIRST = Turn((7, 8), (-0.5, -0.25), "t7t8", "stop", rows([(7, -0.5), (1, -0.9)], [(8, -0.25), (2, NONE)]))
SECOND = Turn((3,), (-1.5,), "t3", "stop", rows([(4, -0.2), (3, -1.5)]))


def engine_of(*turns: Turn, max_tokens: int = 10, max_turns: int = 8) -> EpisodeEngine:
    """An engine with these responses, in the order of the calls."""
    answers = iter(turns)

    async def ask(call: SampleCall) -> Turn:
        return next(answers)

    async def call(tool: str, arguments: Mapping[str, Any]) -> str:
        return "called"

    begin = Begin(number=4, prompt=PROMPT, seed=1, max_tokens=max_tokens)
    return EpisodeEngine(begin, make_tokenizer(), 37, max_turns, ask, call)


def two_turns(engine: EpisodeEngine) -> Episode:
    """Prompt, first turn, an observation of two tokens, second turn."""

    async def run() -> Episode:
        episode = Episode(PROMPT.token_ids)
        episode.wrote(await engine.generate(episode.ids))
        episode.saw([11, 12])
        episode.wrote(await engine.generate(episode.ids))
        return episode

    return asyncio.run(run())


def test_an_episode_becomes_a_sample() -> None:
    engine = engine_of(FIRST, SECOND)
    episode = two_turns(engine)
    episode.reward = np.float32(0.5)  # type: ignore[assignment]  # users return what they have
    found = ended(engine, episode)
    assert (found.number, found.ids, found.mask) == (4, (7, 8, 11, 12, 3), (True, True, False, False, True))
    assert found.logprobs == (-0.5, -0.25, 0.0, 0.0, -1.5)
    assert (found.text, found.finish_reason, found.reward) == ("t3", "stop", 0.5)
    as_tuple = ended(engine, (np.array([7, 8, 11, 12, 3]), torch.tensor([1, 1, 0, 0, 1]), episode.logprobs, 0.5))
    assert as_tuple == found
    other = [(0, NONE), (0, NONE)]  # no token of the environment is drawn
    wanted = rows([(7, -0.5), (1, -0.9)], [(8, -0.25), (2, NONE)], other, other, [(4, -0.2), (3, -1.5)])
    for one in (found, as_tuple, cut(engine)):
        assert one.recorded is not None and one.recorded.tobytes() == wanted.tobytes()
    shortened = ended(engine, ([7, 8, 11, 12, 3], [False] * 4 + [True], [0.0] * 4 + [-1.5])).recorded
    assert shortened is not None and shortened.tolist() == [other] * 4 + [[*map(tuple, wanted[-1].tolist())]]
    assert ended(engine, ([11], [False], [0.0])).recorded is None


def test_a_turn_may_be_left_out_of_training_or_shortened() -> None:
    engine = engine_of(FIRST, SECOND)
    two_turns(engine)
    assert ended(engine, ([7, 8, 11, 12, 3], [False] * 4 + [True], [0.0] * 4 + [-1.5])).mask.count(True) == 1
    assert ended(engine, ([7], [True], [-0.5])).ids == (7,)
    assert ended(engine, ([], [], [])).ids == ()


def test_a_text_that_is_no_unicode_can_be_saved(tmp_path: Path) -> None:
    """Half of a surrogate pair, as json.loads returns it from a tool's answer; whole pairs and the rest stay."""
    engine = engine_of(FIRST, SECOND)
    episode = two_turns(engine)
    episode.text = json.loads(r'"\ud83d \ud83d\ude00 \u00e4 \\"')
    found = ended(engine, episode)
    assert found.text == "\\ud83d \U0001f600 \u00e4 \\"
    sample = to_sample(0, engine.begin, found, version=0)
    path = write_step(tmp_path, SavedStep(1, 1.0, 0, 0, [PROMPT], [sample], [0.0]))
    assert read_step(path).samples == [sample]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (([7, 8, 11, 12, 4], [1, 1, 0, 0, 1], [-0.5, -0.25, 0, 0, -1.5]), "token 4 is marked"),  # another token
        (([7, 8, 11, 13, 3], [1, 1, 0, 0, 1], [-0.5, -0.25, 0, 0, -1.5]), "token 4 is marked"),  # after other tokens
        (([7, 8, 11, 12, 3], [1, 1, 1, 0, 1], [-0.5, -0.25, -1, 0, -1.5]), "token 2 is marked"),  # an observation
        (([7, 8], [1, 1], [-0.5, -0.2]), "log-prob of token 1"),
        (([7, 8], [1, 1], [-0.5, math.nan]), "log-prob of token 1"),
        (([7, 8], [1], [-0.5, -0.25]), "2 tokens, 1 values"),
        (([7, 8], [1, 1], [-0.5]), "1 log-probs"),
        (([7, 37], [1, 0], [-0.5, 0]), "token 37 is outside"),
        (([7, -1], [1, 0], [-0.5, 0]), "token -1 is outside"),
        (([7.5], [0], [0.0]), "not token ids"),
        ((["t7"], [0], [0.0]), "not token ids"),
        (([3] * 11, [0] * 11, [0.0] * 11), "11 tokens"),
        (([7], [1], [-0.5], math.inf), "not a finite number"),
        (([7], [1], [-0.5], "good"), "not a finite number"),
        (([7], [1], ["a"]), "no lists of numbers"),
        ((7, 1, 0), "no lists of numbers"),
        (None, "no Episode"),
        (([7], [1]), "no Episode"),
    ],
)
def test_nonsense(returned: object, reason: str) -> None:
    engine = engine_of(FIRST, SECOND)
    two_turns(engine)
    with pytest.raises(NonsenseError) as caught:
        ended(engine, returned)
    assert reason in str(caught.value)


def test_log_probs_of_candidates_that_share_tokens() -> None:
    """Batching changes the last digits of a log-prob. Each candidate may be returned, with its own."""
    tables = [rows(*([(token, logprob)] for token in (7, 1, 2))) for logprob in (-0.1, -0.1001)]
    candidates = (
        Turn((7, 1, 2), (-0.1, -0.2, -0.3), "A", "stop", tables[0]),
        Turn((7, 1, 3), (-0.1001, -0.2, -0.4), "B", "stop", tables[1]),
    )
    engine = engine_of(*candidates)
    for _ in candidates:
        asyncio.run(engine.generate(PROMPT.token_ids))
    for turn in candidates:
        one = ended(engine, (turn.ids, [1, 1, 1], turn.logprobs))
        assert one.logprobs == turn.logprobs and one.recorded is not None and turn.recorded is not None
        assert one.recorded[0] == turn.recorded[0]
    with pytest.raises(NonsenseError):
        ended(engine, ([7], [1], [-0.10005]))


def test_limits() -> None:
    engine = engine_of(FIRST, Turn((3, 4), (-1.0, -2.0), "t3t4", "length"), max_tokens=6)
    episode = two_turns(engine)
    assert ended(engine, episode).finish_reason == "length"
    roomy = engine_of(FIRST, Turn((3, 4), (-1.0, -2.0), "t3t4", "length"), max_tokens=7)
    assert ended(roomy, two_turns(roomy)).finish_reason == "stop", "the function's own limit"
    with pytest.raises(LimitError):
        asyncio.run(engine.generate(episode.ids))
    few = engine_of(FIRST, SECOND, max_turns=1)
    with pytest.raises(LimitError):
        two_turns(few)
    assert cut(few).ids == (7, 8) and cut(few).mask == (True, True) and cut(few).finish_reason == "length"
    assert cut(engine).ids == (7, 8, 11, 12, 3, 4) and cut(engine).mask == (True, True, False, False, True, True)
    assert cut(engine).logprobs == (-0.5, -0.25, 0.0, 0.0, -1.0, -2.0)
    assert cut(engine_of()).ids == ()


def test_what_an_engine_refuses() -> None:
    for ids in ([37], [-1], ["t"], []):
        with pytest.raises(NonsenseError):
            asyncio.run(engine_of(FIRST).generate(ids))


def test_responses_to_other_prompts_are_no_part_of_the_episode() -> None:
    """A function may ask the policy about anything; only what follows the prompt can be trained on."""
    engine = engine_of(FIRST, SECOND)
    asyncio.run(engine.generate((5,)))
    with pytest.raises(NonsenseError):
        ended(engine, ([7, 8], [1, 1], [-0.5, -0.25]))
    assert cut(engine).ids == ()
