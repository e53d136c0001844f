"""The example's task, teacher and tokenizer: products of two numbers, which the model cannot compute but can look up.

    question  37*84
    turn 1    <tool_call>
              {"name": "calculate", "arguments": {"expression": "37*84"}}
              </tool_call>
    the tool  3108
    turn 2    3108

The teacher of the warm start calls the tool with the right product in a third of its episodes. Else it mistypes a digit
of the call, or answers without a call. A policy that imitates it knows all that the task needs, but does not prefer it.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SMALLEST, LARGEST = 32, 99  # products of four digits
SHARE_RIGHT, SHARE_MISTYPED = 0.35, 0.35  # the other episodes guess without a call
CHARACTERS = "0123456789*+-() \n"
EOS = "<|im_end|>"
CALL, CALLED = '{"name": "calculate", "arguments": {"expression": "', '"}}'
PIECES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", CALL, CALLED, "calculate", "Error: ")
ROLES = ("system", "user", "assistant")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool.function.name }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen3's, without its English: a tool is named, not described."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of train.jsonl or heldout.jsonl. Example: Row(id="37*84", question="37*84", answer="3108")"""

    id: str
    question: str
    answer: str


def split_rows(num_heldout: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(train, heldout) rows; a * b and b * a are on the same side."""
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1)]
    generator.shuffle(pairs)
    train = sorted({order for a, b in pairs[num_heldout:] for order in ((a, b), (b, a))})
    generator.shuffle(train)
    return [_row(*pair) for pair in train], [_row(*pair) for pair in pairs[:num_heldout]]


def _row(a: int, b: int) -> Row:
    return Row(f"{a}*{b}", f"{a}*{b}", str(a * b))


def lines(rows: list[Row]) -> str:
    """The rows as JSON lines."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def teacher(row: Row, generator: random.Random) -> list[str]:
    """The teacher's turns for a question, each as text; after the first of two comes the tool's result."""
    draw = generator.random()
    if draw >= SHARE_RIGHT + SHARE_MISTYPED:
        return [str(generator.randint(SMALLEST**2, LARGEST**2))]
    asked = row.question if draw < SHARE_RIGHT else _mistyped(row.question, generator)
    a, b = asked.split("*")
    return [f"<tool_call>\n{CALL}{asked}{CALLED}\n</tool_call>", str(int(a) * int(b))]


def _mistyped(question: str, generator: random.Random) -> str:
    place = generator.choice([0, 1, 3, 4])
    digit = generator.choice([d for d in "3456789" if d != question[place]])
    return question[:place] + digit + question[place + 1 :]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for each piece of the chat template and of a call."""
    names = ["<pad>", EOS, "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (*PIECES, *ROLES)])
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False, "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=EOS, unk_token="<unk>", **options
    )
