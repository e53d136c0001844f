r"""Compare two answers exactly, without tolerance or rounding. Order matters in tuples and matrices, not in lists.

The gold answer is trusted, the prediction is not. The argument `symbolic` decides pairs that need computer algebra. In
a worker process it is `symbolic.equal_expressions`; elsewhere it is `unsettled`, which raises `Unsettled`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NoReturn

from oblr_megatron.rewards.verifier.leaf import LETTER, Symbolic, equal_leaves, has_variable, operators
from oblr_megatron.rewards.verifier.normalize import compact, normalize
from oblr_megatron.rewards.verifier.structure import (
    GREEK,
    Group,
    Leaf,
    Named,
    Node,
    Relation,
    domains,
    has_grouping,
    parse,
)

MAX_CACHED_CHARS = 200  # longer texts are rare and their parses are large
MAX_INLINE_ITEMS = 32  # longer lists are compared in a worker, under its deadline

_NUMBER = re.compile(r"\s*(-?[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*")
_CHOICE = re.compile(r"(?:\\text\{\s*)?\(?([A-J])\)?\s*\}?")
_LABEL = re.compile(
    r"(?:\\text\{\s*)?(?:(?i:option|choice)\s*)?\(?([A-J])(?:[.)]|:(?= ))\s*(?:\}\s*)?((?![\s},;]).*)"
    r"|(?:\\text\{\s*)?(?i:option|choice) ([A-J])\}?"
)
_STATED = re.compile(r"([A-J])\.(?!.*(?<![A-Za-z])[A-J](?![A-Za-z])).+")  # a gold choice with its text
_GREEK = re.compile(GREEK)
_INDEX_WORD = re.compile(r"\\text\{([^{}]*)\}|\\(?=(?:max|min)(?![A-Za-z]))")
_HEDGED = re.compile(r"(?:^(?:and\b)?|[;.]|\bor\b)\s*\(?([A-H])\)?\s*(?:$|[,;/&.]|(?:or|and|is|are)\b)")


class Unsettled(Exception):
    """The comparison needs computer algebra."""


def unsettled(gold: str, prediction: str) -> NoReturn:
    """The `symbolic` argument of processes that must not run computer algebra."""
    raise Unsettled


def equal_answers(prediction: str, gold: str, symbolic: Symbolic) -> bool:
    r"""Whether an extracted answer equals the gold answer.

    Examples: ("0.5", r"\frac12") True; ("0.33", r"\frac13") False; ("3,1", "1, 3") True; ("(3,1)", "(1,3)") False;
    ("5", r"5\text{ cm}") True; ("1,234", "1234") True; ("3 or 5", "3") False; ("52_7", "52_8") False.
    """
    numbers = plain_number(gold), plain_number(prediction)
    if None not in numbers:
        return numbers[0] == numbers[1]
    expected, given = canonical(gold), canonical(prediction)
    if not given or expected == given:
        return bool(given)
    if (stated := _STATED.fullmatch(expected)) and (choice := _CHOICE.fullmatch(given)):
        return choice.group(1) == stated.group(1)
    if label := _LABEL.fullmatch(normalize(prediction)):
        letter, rest = label.group(1) or label.group(3), label.group(2) or ""
        if not (_LABEL.search(rest) or _CHOICE.fullmatch(rest)):
            if choice := _CHOICE.fullmatch(normalize(gold)):
                others = set(_HEDGED.findall(rest)) - {letter}  # "A. B or C" chooses nothing
                return choice.group(1) == letter and not others
            prediction = rest or prediction
    sets, given_sets = domains(normalize(gold)), domains(normalize(prediction))
    if any(given_sets.get(name, domain) != domain for name, domain in sets.items()):
        return False
    return _equal_in_some_reading(_read(gold)[1], _read(prediction)[1], symbolic)


def plain_number(answer: str) -> Fraction | None:
    """The value of digits with an optional sign and point; None for anything else."""
    match = _NUMBER.fullmatch(answer)
    return Fraction(match.group(1)) if match else None


def canonical(answer: str) -> str:
    """The canonical spelling of an answer, without spaces. Answers with equal spellings are equal."""
    return _read(answer)[0]


def _read(answer: str) -> tuple[str, tuple[Node, ...]]:
    """Canonical text and parse; two parses (without and with digit grouping) if commas may group digits."""
    return (_cached if len(answer) <= MAX_CACHED_CHARS else _parsed)(answer)


def _parsed(answer: str) -> tuple[str, tuple[Node, ...]]:
    text = normalize(answer)
    forms = (parse(text), parse(text, grouped=True)) if has_grouping(text) else (parse(text),)
    return compact(text), forms


_cached = lru_cache(maxsize=2048)(_parsed)  # the responses of a group share the gold answer, and often their answers


def _equal_in_some_reading(gold: tuple[Node, ...], given: tuple[Node, ...], symbolic: Symbolic) -> bool:
    undecided = False
    for reading in range(max(len(gold), len(given))):
        try:
            if _equal(gold[min(reading, len(gold) - 1)], given[min(reading, len(given) - 1)], symbolic):
                return True
        except Unsettled:
            undecided = True
    if undecided:
        raise Unsettled
    return False


def _equal(gold: Node, given: Node, symbolic: Symbolic) -> bool:
    if compact(gold.text) == compact(given.text) != "":
        return True
    if isinstance(gold, Named) or isinstance(given, Named):
        return _equal_named(gold, given, symbolic)
    if isinstance(gold, Relation) or isinstance(given, Relation):
        return _equal_relation(gold, given, symbolic)
    if isinstance(gold, Group) and isinstance(given, Group):
        return _equal_groups(gold, given, symbolic)
    if isinstance(gold, Leaf) and isinstance(given, Leaf):
        return equal_leaves(gold.text, given.text, symbolic)
    return _algebra_of_sets(gold) and _algebra_of_sets(given) and symbolic(gold.text, given.text)


def _equal_named(gold: Node, given: Node, symbolic: Symbolic) -> bool:
    if isinstance(gold, Named) and isinstance(given, Named):
        if _names_agree(gold.name, given.name):
            return _equal(gold.value, _with_argument(gold.name, given), symbolic)
        lines = all(isinstance(side.value, Leaf) and "(" not in side.name for side in (gold, given))
        return lines and symbolic(gold.text, given.text)  # x = (y - 3)/2 is y = 2x + 3
    if isinstance(gold, Relation) or isinstance(given, Relation):
        return symbolic(gold.text, given.text)
    gold, given = (side.value if isinstance(side, Named) else side for side in (gold, given))
    return _equal(gold, given, symbolic)


def _names_agree(gold: str, given: str) -> bool:
    """Whether two names may denote the same quantity: words and angles always may, y may be a function's value."""
    if any(name.startswith(("\\text", "\\angle")) for name in (gold, given)):
        return True
    gold, given = (_INDEX_WORD.sub(r"\1", name) for name in (gold, given))  # m_{\text{max}} is m_{\max}
    if gold.startswith("(") and given.startswith("("):
        return gold == given or sorted(gold) != sorted(given)  # (x,y) = (1,2) is not (y,x) = (1,2)
    heads = [name.partition("(")[0] for name in (gold, given)]
    if "y" in heads and any("(" in name for name in (gold, given)):
        return True
    if not all("_" in head for head in heads):
        heads = [head.split("_")[0] for head in heads]
    return heads[0] == heads[1]


def _with_argument(gold_name: str, given: Named) -> Node:
    """The value of a function after renaming its argument as in the gold answer: f(t) = t + 1 is f(x) = x + 1."""
    names = [re.fullmatch(r"[^(]*\(([A-Za-z])\)", name) for name in (gold_name, given.name)]
    if not (names[0] and names[1] and isinstance(given.value, Leaf)):
        return given.value
    new, old = names[0].group(1), names[1].group(1)
    text = given.value.text
    if new == old or any(match.group() == new for match in LETTER.finditer(text)):
        return given.value
    return Leaf(LETTER.sub(lambda match: new if match.group() == old else match.group(), text))


def _equal_relation(gold: Node, given: Node, symbolic: Symbolic) -> bool:
    if isinstance(gold, Relation):
        return isinstance(given, Relation) and symbolic(gold.text, given.text)
    assert isinstance(given, Relation), "one of the two is a relation"
    if set(given.signs) != {"="} or (isinstance(gold, Leaf) and has_variable(gold.text)):
        return False
    greek = not _GREEK.search(gold.text)  # whether Greek letters stand for a quantity that the gold answer gives
    stated = [part for part in given.parts[:-1] if not _is_name(part, greek)]  # "2 + 3 = 5" states its left side too
    if isinstance(gold, Leaf):
        return all(equal_leaves(gold.text, part, symbolic) for part in (given.parts[-1], *stated))
    return all(_equal(gold, parse(part), symbolic) for part in (given.parts[-1], *stated))


def _is_name(part: str, greek: bool) -> bool:
    r"""Whether one side of an equation names a value instead of stating it: x + y, \sigma^{2}, \gcd(4, 6)."""
    return has_variable(part) or bool(operators(part)) or (greek and _GREEK.search(part) is not None)


def _equal_groups(gold: Group, given: Group, symbolic: Symbolic) -> bool:
    if {gold.kind, given.kind} == {"union", "list"}:
        gold, given = _as_union(gold), _as_union(given)
    if "()" in (gold.kind, given.kind):
        gold, given = _as_point(gold), _as_point(given)
    kinds = {gold.kind, given.kind}
    if "union" in kinds and "list" not in kinds:
        return _unordered(gold, given, symbolic) or symbolic(gold.text, given.text)
    if len(kinds) > 1 or len(gold.items) != len(given.items):
        return False
    if symbolic is unsettled and len(gold.items) > MAX_INLINE_ITEMS:
        raise Unsettled
    if gold.kind in ("list", "union"):
        return _unordered(gold, given, symbolic)
    return all(_equal(a, b, symbolic) for a, b in zip(gold.items, given.items, strict=True))


def _as_union(side: Group) -> Group:
    """A list of inequalities, such as x < 2 or x > 3, is the union of its intervals."""
    named = side.kind == "list" and all(isinstance(item, Named) for item in side.items)
    return Group(side.text, "union", side.items) if named else side


def _unordered(gold: Group, given: Group, symbolic: Symbolic) -> bool:
    """Match each item with a different equal item. Equality is transitive, so greedy matching is exact."""
    if gold.kind != given.kind or len(gold.items) != len(given.items):
        return False
    free = list(given.items)
    for item in gold.items:
        partner = next((other for other in free if _equal(item, other, symbolic)), None)
        if partner is None:
            return False
        free.remove(partner)
    return True


def _as_point(group: Group) -> Group:
    """The point (1, 2) of a column matrix, or of "y = 2, x = 1", where values are sorted by name; else the group."""
    if group.kind == "matrix":
        entries = [row.items[0] for row in group.items if isinstance(row, Group) and len(row.items) == 1]
        is_point = len(entries) == len(group.items) > 0
    else:
        values = {item.name: item.value for item in group.items if isinstance(item, Named) and len(item.name) == 1}
        entries = [values[name] for name in sorted(values)]
        is_point = group.kind == "list" and len(entries) == len(group.items)
    return Group(group.text, "()", tuple(entries)) if is_point else group


def _algebra_of_sets(node: Node) -> bool:
    """Whether computer algebra may read this node as a set or matrix."""
    signs = ("\\cup", "\\cap", "\\setminus", "\\infty", "\\mathbb", "matrix")
    return isinstance(node, (Group, Leaf)) and any(sign in node.text for sign in signs)
