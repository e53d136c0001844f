"""The environment "tool_loop": the policy calls tools until it answers without a call. Imports no torch.

    turn 1         what the policy writes, e.g. <tool_call>{"name": "calculate", "arguments": {...}}</tool_call>
    observation    the results, as messages of the role "tool" in the chat template
    turn 2         ...

Tool calls have the form of Qwen3's chat template. A call that cannot be read, a tool that raises and one that takes too
long give "Error: ..." as their result. The episode ends with the first turn without a call, or at a limit.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from oblr_megatron.environments.episode import Episode, EpisodeEngine
from oblr_megatron.types import Prompt

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_CALLS = 32
"""Calls of a turn that are made."""
Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments. Example: ("calculate", {"expression": "2+2"})"""


async def tool_loop(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
    """One episode; see the module."""
    episode = Episode(prompt.token_ids)
    while True:
        turn = await engine.generate(episode.ids)
        episode.wrote(turn)
        calls = [] if turn.finish_reason == "length" else tool_calls(turn.text)
        if not calls:
            return episode
        results = await asyncio.gather(*(_result(engine, call) for call in calls[:MOST_CALLS]))
        results += [f"Error: a turn may have {MOST_CALLS} tool calls"] * len(calls[MOST_CALLS:])
        messages = [{"role": "tool", "content": result} for result in results]
        episode.saw(engine.observation(messages, after=turn))


async def _result(engine: EpisodeEngine, call: Call | None) -> str:
    if call is None:
        return 'Error: a tool call must be {"name": ..., "arguments": {...}}'
    return await engine.call(*call)


def tool_calls(text: str) -> list[Call | None]:
    """The calls in a turn: JSON objects with "name" and "arguments" between <tool_call> and </tool_call>.

    None stands for a call that cannot be read.
    """
    calls, end = [], 0
    while (start := text.find(OPEN, end)) >= 0 and (stop := text.find(CLOSE, start)) >= 0:
        calls.append(_call(text[start + len(OPEN) : stop]))
        end = stop + len(CLOSE)
    return calls  # in linear time, unlike a pattern: a policy may repeat the opening tag without end


def _call(text: str) -> Call | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments") or {}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # whatever a policy writes
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
