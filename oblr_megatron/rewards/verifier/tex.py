r"""TeX's rule of arguments: every argument of every command gets braces, so that all other rules see one spelling.

    braced(r"\frac12 + x^\frac a b + \sqrt(y)")      # r"\frac{1}{2} + x^{\frac{a}{b}} + \sqrt{(y)}"

An argument is a group in braces, else the next letter, digit or command. A command brings its own arguments, as in
x^\frac12. Unlike in TeX, an argument that begins with a round bracket ends with it: models write 2^(n+1).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

FUNCTIONS = (
    r"(?:arc(?:sin|cos|tan|cot|sec|csc)|(?:arc|ar)?(?:sinh|cosh|tanh)|sin|cos|tan|cot|sec|csc|log|ln|exp)(?![A-Za-z])"
)
"""Pattern of the names of functions."""

_TEXT = "text textrm textbf textit textnormal textsf texttt mbox hbox emph operatorname operatorname* mathrm"
_ONE = f"""{_TEXT} mathbf mathit mathsf mathtt mathbb mathcal mathfrak mathscr mathnormal boldsymbol bm pmb
    hat widehat bar overline vec overrightarrow overleftarrow dot ddot tilde widetilde sqrt pmod pod cancel"""
_TWO = "frac binom overset underset stackrel"
_COUNTS = {"^": 1, "_": 1}  # of arguments, by command
_COUNTS |= {f"\\{name}": 1 for name in _ONE.split()} | {f"\\{name}": 2 for name in _TWO.split()}
_INFIX = {"\\over": "\\frac", "\\choose": "\\binom"}  # {a \over b}
_TOKEN = re.compile(
    rf"\\(?:{'|'.join(map(re.escape, _TEXT.split()))})\s*\{{[^{{}}]*\}}|\\operatorname\*|\\[A-Za-z]+|\\.|.", re.DOTALL
)
_COMMAND = re.compile(r"[\\^_]")
_ARGUMENT = re.compile(r"\{|\\[A-Za-z]|[\w°+*'-]")


def braced(text: str) -> str:
    """The text with braces around every argument; a command that lacks an argument stays as it is."""
    if not _COMMAND.search(text):
        return text
    groups = [deque[str]()]  # the parts of every open group, read from the right
    for token in reversed(_TOKEN.findall(text)):
        if token == "}":
            groups.append(deque())
        elif token == "{" and len(groups) > 1:
            inner = groups.pop()
            groups[-1].appendleft(f"{{{_joined(inner)}}}")
        else:
            groups[-1].appendleft(_with_arguments(token, groups[-1]) if token in _COUNTS else token)
    while len(groups) > 1:  # a closing brace too many
        inner = groups.pop()
        groups[-1].extendleft(["}", *reversed(inner)])
    return _joined(groups[0])


def _joined(parts: deque[str]) -> str:
    """The text of a group, with a prefix command in place of an infix one."""
    for infix, command in _INFIX.items():
        if parts.count(infix) == 1:
            place, both = parts.index(infix), list(parts)
            above, below = ("".join(side).strip() for side in (both[:place], both[place + 1 :]))
            return f"{command}{{{above}}}{{{below}}}"
    return "".join(parts)


def _with_arguments(command: str, following: deque[str]) -> str:
    """The command with its arguments, which are removed from the parts that follow it."""
    taken: list[str] = []

    def next_part(opening: str, closing: str) -> str:
        """The next bracket of this kind, else nothing."""
        while following and following[0].isspace():
            taken.append(following.popleft())
        return move(_bracket_size(following, opening, closing))

    def move(count: int) -> str:
        moved = [following.popleft() for _ in range(count)]
        taken.extend(moved)
        return "".join(moved)

    written = command + (next_part("[", "]") if command == "\\sqrt" else "")
    for _ in range(_COUNTS[command]):
        argument = next_part("(", ")")
        if not argument and following and _ARGUMENT.match(following[0]):
            argument = move(1)
        if not argument:
            following.extendleft(reversed(taken))
            return command
        written += argument if argument.startswith("{") else f"{{{argument}}}"
    return written


def _bracket_size(parts: Iterable[str], opening: str, closing: str) -> int:
    """Number of parts in the bracket with which the parts begin; 0 if they begin with something else."""
    depth = 0
    for size, part in enumerate(parts, 1):
        depth += (part == opening) - (part == closing)
        if depth <= 0:
            return size if size > 1 else 0
    return 0
