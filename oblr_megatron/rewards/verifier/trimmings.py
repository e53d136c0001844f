r"""What people put around an answer without meaning anything by it: emphasis, colour, size, an announcement, a tick."""

from __future__ import annotations

import re

_MARKERS = ("\\", "*", "`", "nswer", "=", "案")  # where none occurs there is nothing to trim
_GONE = re.compile(
    r"\\(?:text)?color\s*\{[A-Za-z!0-9]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\(?:begin|end)\s*\{(?:aligned|gathered|split)\}"
    r"|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bfseries|mathop|underline|fbox|ensuremath)(?![A-Za-z])"
    r"|\\(?:rm|bf|it)(?=\s*[-0-9\\])|(?<!\{)\\(?:rm|bf|it)(?![A-Za-z])"
)
_BOXED_NUMBER = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_MARKDOWN = re.compile(r"\s*(\*\*|`)(.+)\1[.\s]*", re.DOTALL)
_WORDS = r"\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*"
_BEFORE = re.compile(
    rf"(?:\\text\w*\s*\{{{_WORDS}\}}\s*:?|{_WORDS}|答案(?:是|为)?\s*[:\uff1a]?)(?=.)"
    r"|\s*(?:=|\\(?:therefore|implies|Rightarrow|Longrightarrow)(?![A-Za-z]))",
    re.IGNORECASE | re.DOTALL,
)
_AFTER = re.compile(r"\s*(?:\\\\|\\(?:checkmark|blacksquare|qed))$")


def trim(text: str) -> str:
    r"""An answer without its trimmings.

    Examples: "**5**" -> "5"; r"\color{red}{5}" -> "{5}"; "The answer is 5" -> "5"; "= 5" -> "5".
    """
    if not any(marker in text for marker in _MARKERS):
        return text
    if match := _MARKDOWN.fullmatch(text):
        text = match.group(2)
    if "\\" in text:
        text = _AFTER.sub("", _GONE.sub("", _BOXED_NUMBER.sub(r"\1", text)).rstrip())
    match = _BEFORE.match(text)
    return text[match.end() :] if match else text
