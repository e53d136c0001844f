r"""Where a response states its answer: the last complete \boxed{...}, the text after ####, or the last line.

Each is one linear scan, whatever the text; None means that there is no answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator

MAX_ANSWER_CHARS = 4000
MAX_DEPTH = 64

_TOKEN = re.compile(r"\\boxed(?![A-Za-z])\s*\{|\\.|[{}]", re.DOTALL)
_PLAIN_BRACE = -1
_ANNOUNCEMENT = re.compile(r"(?i:answer)(?:\*\*)?\s*(?:is\s*:?|:|=)(?:\*\*)?|答案(?:是|为)?\s*[:\uff1a]?")


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} whose braces balance; of nested boxes the outermost.

    Examples: "so \boxed{\frac{1}{2}}." -> r"\frac{1}{2}";  r"\boxed{3} or \boxed{4" -> "3";  "42" -> None.
    """
    last = next(iter(deque(complete_boxes(text), maxlen=1)), None)
    return None if last is None else _bounded(text[slice(*last)])


def complete_boxes(text: str) -> Iterator[tuple[int, int]]:
    r"""Where the content of each \boxed{...} begins and ends, by their ends; those that never end aside."""
    opened: list[int] = []  # where the content of each open brace begins
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(_PLAIN_BRACE)
        elif token == "}":
            start = opened.pop() if opened else _PLAIN_BRACE
            if start != _PLAIN_BRACE:
                yield start, match.start()
        elif token.startswith("\\boxed"):
            opened.append(match.end())


def after_hashes(text: str) -> str | None:
    r"""GSM8K's own form: the rest of the line after the last ####; a \boxed{...} where there is none."""
    _, mark, rest = text.rpartition("####")
    line = rest.split("\n", 1)[0].strip()
    return _bounded(line) if mark and line else boxed(text)


def last_line(text: str) -> str | None:
    r"""The last line that is not blank: the \boxed{...} in it, or what follows "answer is" or "Answer:".

    Without either it is the whole line.

    Examples: "So\nAnswer: $42$" -> "$42$"; "The answer is 42." -> "42."; "x = 42" -> "x = 42".
    """
    lines = text.rstrip().rsplit("\n", 1)
    line = lines[-1].strip()
    if (box := boxed(line)) is not None:
        return box
    return _bounded(_ANNOUNCEMENT.split(line)[-1].strip() or line)


def _bounded(answer: str) -> str | None:
    """The answer, unless it is empty or longer or deeper than any real one."""
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return None
    depth = deepest = 0
    for character in answer:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return answer if deepest <= MAX_DEPTH else None


EXTRACTIONS: dict[str, Callable[[str], str | None]] = {
    "math": boxed,
    "math:gsm8k": after_hashes,
    "math:last_line": last_line,
}
