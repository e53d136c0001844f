"""What a chat template writes between two turns of the policy, and the tool calls that a turn holds. Imports no torch.

The policy's own tokens are never encoded again: only the template's text after its turn is, once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\u2402oblr-turn\u2403"  # stands for the policy's turn; no template changes it
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote. Example: ToolCall(name="calculate", arguments={"expression": "2+2"})"""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""  # why it cannot be made


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
    asked = {**(options or {}), "tokenize": False, "add_generation_prompt": True}
    whole = str(tokenizer.apply_chat_template(turns, **asked))
    _before, mark, after = whole.rpartition(_MARK)
    if not mark:
        raise ValueError("the chat template leaves out the assistant's turn before an observation")
    return after.removeprefix(ended)


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn: JSON objects with "name" and "arguments" between <tool_call> and </tool_call>."""
    return [_call(match) for match in _CALL.findall(text)]


def _call(text: str) -> ToolCall:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments") or {}
        if isinstance(name, str) and isinstance(arguments, dict):
            return ToolCall(name, arguments)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # whatever a policy writes
    return ToolCall("", {}, 'a tool call must be {"name": ..., "arguments": {...}}')
