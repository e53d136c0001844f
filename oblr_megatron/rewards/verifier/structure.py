r"""Parse the structure of an answer: list, set, tuple, interval, matrix, relation, named value, or a single expression.

Only brackets, separators and relation signs are parsed; expressions between them stay text. Round brackets around two
entries may be a point or an open interval: both become a `Group` of kind "()".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from oblr_megatron.rewards.verifier.normalize import compact


@dataclass(frozen=True, slots=True)
class Leaf:
    """An expression. Example: Leaf(r"2\\sqrt{3}")."""

    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """Several entries. The order matters in the kinds "()", "[]", "(]", "[)" and "matrix", not in "list" and "union".

    The items of a matrix are its rows, each a Group "()". Example: Group("(1, 2]", "(]", (Leaf("1"), Leaf("2"))).
    """

    text: str
    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A value with its name. Example: Named("f(x) = x + 1", "f(x)", Leaf("x + 1"))."""

    text: str
    name: str
    value: Node


@dataclass(frozen=True, slots=True)
class Relation:
    """Expressions joined by =, <, ... Example: Relation("x + y = 1", ("=",), ("x + y", "1"))."""

    text: str
    signs: tuple[str, ...]
    parts: tuple[str, ...]


Node = Leaf | Group | Named | Relation

_TOKEN = re.compile(
    r"\\begin\s*\{[A-Za-z]+\*?\}|\\end\s*\{[A-Za-z]+\*?\}|\\[A-Za-z]+|\\.|[()\[\]{},;&=<>]|[^\\()\[\]{},;&=<>]+",
    re.DOTALL,
)
_OPEN = {"(", "[", "{", "\\{", "\\langle"}
_CLOSE = {")": "(", "]": "[", "}": "{", "\\}": "\\{", "\\rangle": "\\langle"}
MAX_PARTS = 16  # relations of more parts are not parsed; every name before "=" is one more level of recursion
_RELATIONS = {"=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx", "\\equiv"}
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|(?:var)?rho|sigma|tau"
    r"|upsilon|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Upsilon|Phi|Psi|Omega|ell)(?![A-Za-z])"
)
"""Pattern of the Greek letters that name quantities, and of \\ell; \\pi is a number."""
_ENTRY = rf"\s*(?:[A-Za-z]|{GREEK})(?:_\{{[0-9]\}})?\s*"
_NAME = re.compile(
    r"(?:\\(?!pi|frac|sqrt|sin|cos|tan|log|ln|infty|left|text)[A-Za-z]+|[A-Za-z])(?:_\{(?:[^{}=]|\\text\{[^{}=]*\})*\})?'*"
    r"(?:\s*\(\s*[A-Za-z0-9]\s*(?:,\s*[A-Za-z]\s*)*\))?"
    rf"|\\angle\s*[A-Za-z0-9_{{}} ]+|\\text\{{[^{{}}]*\}}|\({_ENTRY}(?:,{_ENTRY})+\)"
)
_MATRIX = re.compile(
    r"\\begin\{([pbvBV]?|small)matrix\}(.*)\\end\{\1matrix\}|\\begin\{(array)\}\{[lcr|]*\}(.*)\\end\{array\}", re.S
)
_DOMAIN = re.compile(r"([A-Za-z])\s*\\in\s*\\mathbb\{([A-Z])\}")
_SUCH_THAT = re.compile(r"[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![A-Za-z])|\||:)")
_GROUPED = re.compile(  # group 1: no grouping, since brackets around nothing else make a point or a set
    r"((?:[(\[]|\\\{) ?[-+]? ?[0-9,]+ ?\\?[)\]}])|(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
)


def has_grouping(text: str) -> bool:
    """Whether commas between digits may be thousands separators."""
    return any(match.group(1) is None for match in _GROUPED.finditer(text))


def domains(text: str) -> dict[str, str]:
    r"""Variables of a normalized answer with the sets they are in. Example: r"2k\pi, k \in \mathbb{Z}" -> {"k": "Z"}"""
    return dict(_DOMAIN.findall(text))


def parse(text: str, *, grouped: bool = False) -> Node:
    r"""Parse a normalized answer; with `grouped`, commas between groups of three digits are thousands separators.

    Examples: "1, 2" -> list of two; "1,234" with grouped -> Leaf("1234"); r"x \in [1, 2)" -> Named "x", Group "[)".
    """
    if grouped:
        text = _GROUPED.sub(lambda match: match.group(1) or match.group().replace(",", ""), text)
    items = [item for part in _split(text, {",", ";"}) if (item := part.strip())]
    items = [item for item in items if not _DOMAIN.fullmatch(item)] or items
    items = [sign for item in items for sign in _both_signs(item)]
    if len(items) == 1:
        return _parse_one(items[0])
    return Group(text, "list", tuple(_parse_one(item) for item in items))


def _parse_one(text: str) -> Node:
    text = text.strip()
    parts, signs = chain(text)
    if len(parts) > MAX_PARTS:
        return Relation(text, tuple(signs), tuple(parts))
    if signs:
        return _parse_relation(text, parts, signs)
    if len(members := _split(text, {"\\cup"})) > 1:
        return Group(text, "union", tuple(_parse_one(member) for member in members))
    if (matrix := _MATRIX.fullmatch(text)) and _is_one_environment(text):
        return _parse_matrix(text, matrix.group(2) or matrix.group(4) or "")
    return _parse_bracket(text)


def _parse_bracket(text: str) -> Node:
    first, last = _first_token(text), _enclosing(text)
    if last is None:
        return Leaf(text)
    inner = text[len(first) : len(text) - len(last)].strip()
    if first == "{":
        return _parse_one(inner) if inner else Leaf(text)
    if first == "\\{":
        return _parse_set(text, inner)
    entries = [_parse_one(entry) for entry in _split(inner, {",", ";"}) if entry.strip()]
    if len(entries) == 1:
        matrix = isinstance(entries[0], Group) and entries[0].kind == "matrix"
        return entries[0] if first == "(" or matrix else Leaf(text)
    square = first == "[" and last == "]"
    kind = "()" if first == "\\langle" or (square and len(entries) != 2) else first + last
    return Group(text, kind, tuple(entries))


def _parse_set(text: str, inner: str) -> Node:
    """A set of one number is that number, but a set of one set is not that set."""
    if match := _SUCH_THAT.match(inner):
        return _parse_one(inner[match.end() :])
    items = parse(inner)
    if _enclosing(inner) == "\\}" or (isinstance(items, Leaf) and items.text == "\\emptyset"):
        return Group(text, "list", (items,))
    members = items.items if isinstance(items, Group) and items.kind == "list" else (items,)
    return members[0] if len(members) == 1 else Group(text, "list", members)


def _parse_matrix(text: str, body: str) -> Node:
    if text.startswith(("\\begin{v", "\\begin{V")):
        return Leaf(text)  # a determinant or a norm
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", body) if row.strip()]
    cells = [[cell.strip() for cell in _split(row, {"&"})] for row in rows]
    return Group(text, "matrix", tuple(Group("", "()", tuple(_parse_one(cell) for cell in row)) for row in cells))


def _is_one_environment(text: str) -> bool:
    """Whether a text that begins and ends with environments is only one: a sum of two matrices is not."""
    return all(depth > 0 for _, _, depth in list(_tokens(text))[1:-1])


def _parse_relation(text: str, parts: list[str], signs: list[str]) -> Node:
    """A named value, an interval written as an inequality, or a plain relation."""
    if "\\approx" in signs:  # an exact value and its approximation, or a name and an approximate value
        first = signs.index("\\approx")
        if first == 0 and _NAME.fullmatch(parts[0]):
            exact = parts[1]
        else:  # the equations before it are judged as without it
            exact = " ".join(word for pair in zip(parts, [*signs[:first], ""], strict=False) for word in pair)
        return _parse_one(exact) if exact.strip() else Leaf(text)
    if signs[0] in ("=", "\\in") and _NAME.fullmatch(parts[0]):
        if len(parts) == 2:
            return Named(text, compact(parts[0]), _parse_one(parts[1]))
        rest = text[text.index(signs[0]) + len(signs[0]) :].strip()
        return Named(text, compact(parts[0]), _parse_relation(rest, parts[1:], signs[1:]))
    return _interval(text, parts, signs) or Relation(text, tuple(signs), tuple(parts))


def _interval(text: str, parts: list[str], signs: list[str]) -> Named | None:
    r"""Convert a < x \le b or x > a to an interval."""
    if any(sign not in _FLIPPED for sign in signs):
        return None
    if len(parts) == 2 and _NAME.fullmatch(parts[1]):
        parts, signs = parts[::-1], [_FLIPPED[signs[0]]]
    elif len(parts) == 3 and signs[0] in (">", "\\ge"):
        parts, signs = parts[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    if len(parts) == 2 and _NAME.fullmatch(parts[0]):
        above = signs[0] in (">", "\\ge")
        parts = [parts[1], parts[0], "\\infty"] if above else ["-\\infty", parts[0], parts[1]]
        signs = [_FLIPPED[signs[0]], "<"] if above else ["<", signs[0]]
    if len(parts) != 3 or not _NAME.fullmatch(parts[1]) or not all(sign in ("<", "\\le") for sign in signs):
        return None
    kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Named(text, compact(parts[1]), Group(text, kind, (_parse_one(parts[0]), _parse_one(parts[2]))))


def _tokens(text: str) -> Iterator[tuple[str, int, int]]:
    r"""(token, position, depth); depth 0 is outside of all brackets and environments. Any bracket closes any other."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        closing = token in _CLOSE or token.startswith("\\end")
        depth -= closing
        yield token, match.start(), depth
        depth += token in _OPEN or token.startswith("\\begin")


def _split(text: str, separators: set[str]) -> list[str]:
    """Split at separators outside of brackets. Text with unbalanced brackets is not split."""
    parts, start, level = [], 0, 0
    for token, position, depth in _tokens(text):
        level = depth
        if depth < 0:
            return [text]
        if depth == 0 and token in separators:
            parts.append(text[start:position])
            start = position + len(token)
    return [text] if level > 0 else [*parts, text[start:]]


def chain(text: str) -> tuple[list[str], list[str]]:
    """The parts and the relation signs between them. Example: "x = 2" -> ["x", "2"], ["="]."""
    parts, signs, start = [], [], 0
    for token, position, depth in _tokens(text):
        if depth == 0 and token in _RELATIONS:
            parts.append(text[start:position].strip())
            signs.append(token)
            start = position + len(token)
    return [*parts, text[start:].strip()], signs


def _first_token(text: str) -> str:
    match = _TOKEN.match(text)
    return match.group() if match else ""


def _enclosing(text: str) -> str | None:
    """The closing token, if one pair of brackets encloses the whole text."""
    first = _first_token(text)
    if first not in _OPEN:
        return None
    for token, position, depth in _tokens(text):
        if depth == 0 and position > 0:
            ends = token in _CLOSE and position + len(token) == len(text)
            mixed = first in "([" and token in (")", "]")
            return token if ends and (mixed or _CLOSE[token] == first) else None
    return None


def _both_signs(item: str) -> list[str]:
    r"""The two values of an item with \pm; all its signs are coupled. A set's items are expanded when it is parsed."""
    if item.startswith("\\{") or not re.search(r"\\(?:pm|mp)(?![A-Za-z])", item):
        return [item]
    above = re.sub(r"\\mp(?![A-Za-z])\s*", "-", re.sub(r"\\pm(?![A-Za-z])\s*", "+", item))
    below = re.sub(r"\\mp(?![A-Za-z])\s*", "+", re.sub(r"\\pm(?![A-Za-z])\s*", "-", item))
    return [above, below]
