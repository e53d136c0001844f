"""The environment "tool_loop": the policy calls tools until it answers without a call. Imports no torch.

    turn 1         what the policy writes, e.g. <tool_call>{"name": "calculate", "arguments": {...}}</tool_call>
    observation    the results, as messages of the role "tool" in the chat template
    turn 2         ...

Tool calls have the form of Qwen3's chat template. A call that cannot be read, a tool that raises and one that takes too
long give "Error: ..." as their result. The episode ends with the first turn without a call, or at a limit.
"""

from __future__ import annotations

import asyncio

from oblr_megatron.environments.chat import ToolCall, tool_calls
from oblr_megatron.environments.episode import Episode, EpisodeEngine
from oblr_megatron.types import Prompt


async def tool_loop(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
    """One episode; see the module."""
    episode = Episode(prompt.token_ids)
    while True:
        turn = await engine.generate(episode.ids)
        episode.wrote(turn)
        calls = tool_calls(turn.text)
        if turn.finish_reason == "length" or not calls:
            return episode
        results = await asyncio.gather(*(_result(engine, call) for call in calls))
        messages = [{"role": "tool", "content": result} for result in results]
        episode.saw(engine.observation(messages, after=turn))


async def _result(engine: EpisodeEngine, call: ToolCall) -> str:
    return f"Error: {call.error}" if call.error else await engine.call(call.name, call.arguments)
