r"""Extract the answer of a response: the last complete \boxed{...}, the text after ####, or the last line.

Each function is a linear scan and returns None if there is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import accumulate

MAX_ANSWER_CHARS = 4000
MAX_DEPTH = 64

_TOKEN = re.compile(r"\\boxed(?![A-Za-z])\s*\{|\\.|[{}]", re.DOTALL)
_PLAIN_BRACE = -1
_EMPHASIS = ("**", "__", "*", "_")
_MARK = r"(?:\*\*|__|[*_])?"
_ANNOUNCEMENT = re.compile(rf"(?i:answer){_MARK}\s*(?:is\s*:?|:|=){_MARK}|答案(?:是|为)?\s*[:\uff1a]?")


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} with balanced braces; the outermost of nested boxes.

    Examples: "so \boxed{\frac{1}{2}}." -> r"\frac{1}{2}";  r"\boxed{3} or \boxed{4" -> "3";  "42" -> None.
    """
    boxes = list(complete_boxes(text))
    return _bounded(text[slice(*boxes[-1])]) if boxes else None


def complete_boxes(text: str) -> Iterator[tuple[int, int]]:
    r"""(start, end) of the content of each complete \boxed{...}, ordered by end."""
    opened: list[int] = []  # start of the content of each open box; _PLAIN_BRACE for other braces
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
    r"""GSM8K's format: the rest of the line after the last ####; without ####, the last \boxed{...}.

    A line without a digit may be a heading: a box below it is the answer.
    """
    before, mark, rest = text.rpartition("####")
    line = _closed(rest.split("\n", 1)[0].strip(), before.rpartition("\n")[2])
    if mark and not any(map(str.isdigit, line)) and (box := boxed(rest)) is not None:
        return box
    return _bounded(line) if mark and line else boxed(text)


def last_line(text: str) -> str | None:
    r"""In the last non-blank line: the \boxed{...}, else the text after "answer is" or "Answer:", else the whole line.

    Examples: "So\nAnswer: $42$" -> "$42$"; "The answer is 42." -> "42."; "x = 42" -> "x = 42".
    """
    lines = text.rstrip().rsplit("\n", 1)
    line = lines[-1].strip()
    if (box := boxed(line)) is not None:
        return box
    answer = _ANNOUNCEMENT.split(line)[-1].strip()
    return _bounded(_closed(answer, line[: len(line) - len(answer)]) or line)


def _closed(answer: str, before: str) -> str:
    """The answer without emphasis that ends there and was opened before it: "**Answer: 5**" has the answer "5"."""
    for mark in _EMPHASIS:
        bare = answer.rstrip(". ").removesuffix(mark).rstrip()
        if answer.rstrip(". ").endswith(mark) and mark not in bare and before.count(mark) % 2:
            answer = bare
    return answer


def _bounded(answer: str) -> str | None:
    """The answer; None if it is empty, or longer or more deeply nested than any real answer."""
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return None
    depths = accumulate((character in "{([") - (character in "})]") for character in answer)
    return answer if max(depths) <= MAX_DEPTH else None


EXTRACTIONS: dict[str, Callable[[str], str | None]] = {
    "math": boxed,
    "math:gsm8k": after_hashes,
    "math:last_line": last_line,
}
