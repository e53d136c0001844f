r"""Are two answers equal? Exact: no tolerance, no rounding; lists and sets ignore order, tuples and matrices keep it.

The gold answer is trusted, the prediction is not. Everything that needs computer algebra goes through the `symbolic`
argument: in a worker process it is the real thing, elsewhere `unsettled`, which ends the comparison with `Unsettled`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from oblr_megatron.rewards.normalize import compact, normalize
from oblr_megatron.rewards.quantity import Quantity, read_base, read_marks, read_number
from oblr_megatron.rewards.structure import Group, Leaf, Named, Node, Relation, has_grouping, parse

Symbolic = Callable[[str, str], bool]

MAX_INLINE_ITEMS = 32  # longer lists are compared in a worker, under its deadline

_OPERATORS = re.compile(
    r"\\(sum|prod|coprod|i{0,3}nt|oint|lim|limsup|liminf|gcd|lcm|max|min|sup|inf|det|dim|deg|b?mod|pmod|pod|bigcup|bigcap)"
    r"(?![A-Za-z])|\\text\{\s*(lcm|gcd|max|min|mod|rank|tr|det|lim|sum|prod|gdc|hcf)\s*\}"
    r"|(?<![A-Za-z\\])(gcd|lcm|max|min|sum|prod|mod|lim|int|det|hcf)(?![A-Za-z])"
    r"|\\begin\{(v)matrix\}|\\frac\s*\{\s*(?:d|\\partial)[^{}]{0,40}\}\s*\{\s*(d|\\partial)"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z][A-Za-z .'-]*")
_PLAIN_WORDS = {"yes", "no", "odd", "even", "true", "false", "none", "all"}
_APART = re.compile(r"(?<![_^0-9.])(?<!frac )[0-9.]+ [0-9.]")  # two numbers with nothing between them
_LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_CONSTANTS = {"e", "i"}


class Unsettled(Exception):
    """The comparison needs computer algebra."""


def unsettled(gold: str, prediction: str) -> NoReturn:
    """Stands for computer algebra where there is none."""
    raise Unsettled


def equal_answers(prediction: str, gold: str, symbolic: Symbolic) -> bool:
    r"""Whether an extracted answer equals the gold one.

    Examples: ("0.5", r"\frac12") True; ("0.33", r"\frac13") False; ("3,1", "1, 3") True; ("(3,1)", "(1,3)") False;
    ("5", r"5\text{ cm}") True; ("1,234", "1234") True; ("3 or 5", "3") False; ("52_7", "52_8") False.
    """
    expected, given = normalize(gold), normalize(prediction)
    if not given:
        return False
    if compact(expected) == compact(given):
        return True
    readings = [False, True] if has_grouping(expected) or has_grouping(given) else [False]
    undecided = False
    for grouped in readings:
        try:
            if _equal(parse(expected, grouped=grouped), parse(given, grouped=grouped), symbolic):
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
        return _equal_leaves(gold.text, given.text, symbolic)
    return _algebra_of_sets(gold) and _algebra_of_sets(given) and symbolic(gold.text, given.text)


def _equal_named(gold: Node, given: Node, symbolic: Symbolic) -> bool:
    if isinstance(gold, Named) and isinstance(given, Named):
        if _names_agree(gold.name, given.name):
            return _equal(gold.value, _with_argument(gold.name, given), symbolic)
        lines = all(isinstance(side.value, Leaf) and "(" not in side.name for side in (gold, given))
        return lines and symbolic(gold.text, given.text)  # x = (y - 3)/2 is y = 2x + 3
    if isinstance(gold, Named):
        if isinstance(given, Relation):
            return symbolic(gold.text, given.text)
        return _equal(gold.value, given, symbolic)
    assert isinstance(given, Named)
    if isinstance(gold, Relation):
        return symbolic(gold.text, given.text)
    return _equal(gold, given.value, symbolic)


def _names_agree(gold: str, given: str) -> bool:
    """Whether two names may stand for the same thing: words and angles always do, y may be a function's value."""
    if any(name.startswith(("\\text", "\\angle", "\\text")) for name in (gold, given)):
        return True
    heads = [re.split(r"[(]", name, maxsplit=1)[0] for name in (gold, given)]
    if "y" in heads and any("(" in name for name in (gold, given)):
        return True
    if not all("_" in head for head in heads):
        heads = [head.split("_")[0] for head in heads]
    return heads[0] == heads[1]


def _with_argument(gold_name: str, given: Named) -> Node:
    """A function's value with its argument renamed to the gold's: f(t) = t + 1 is f(x) = x + 1."""
    names = [re.fullmatch(r"[^(]*\(([A-Za-z])\)", name) for name in (gold_name, given.name)]
    if not (names[0] and names[1] and isinstance(given.value, Leaf)):
        return given.value
    new, old = names[0].group(1), names[1].group(1)
    text = given.value.text
    if new == old or any(match.group() == new for match in _LETTER.finditer(text)):
        return given.value
    return Leaf(_LETTER.sub(lambda match: new if match.group() == old else match.group(), text))


def _equal_relation(gold: Node, given: Node, symbolic: Symbolic) -> bool:
    if isinstance(gold, Relation):
        return isinstance(given, (Relation, Leaf)) and isinstance(given, Relation) and symbolic(gold.text, given.text)
    assert isinstance(given, Relation)
    if set(given.signs) != {"="} or not isinstance(gold, Leaf) or _has_variable(gold.text):
        return False
    stated = [part for part in given.parts[:-1] if not _has_variable(part)]  # "2 + 3 = 5" states its left side too
    return all(_equal_leaves(gold.text, part, symbolic) for part in (given.parts[-1], *stated))


def _has_variable(text: str) -> bool:
    """Whether letters other than constants occur, outside of units and words."""
    letters = (match.group(1) for match in _LETTER.finditer(_TEXT.sub("", read_marks(text).core)))
    return any(letter and letter not in _CONSTANTS for letter in letters)


def _equal_groups(gold: Group, given: Group, symbolic: Symbolic) -> bool:
    if gold.kind == "union" and given.kind == "list" and all(isinstance(item, Named) for item in given.items):
        given = Group(given.text, "union", given.items)  # x < 2 or x > 3
    kinds = {gold.kind, given.kind}
    column = next((group for group in (gold, given) if group.kind == "matrix" and _is_column(group)), None)
    if column is not None and kinds == {"matrix", "()"}:
        return _equal_groups(*(_flat(group) for group in (gold, given)), symbolic)
    if "union" in kinds and "list" not in kinds:
        return _unordered(gold, given, symbolic) or symbolic(gold.text, given.text)
    if len(kinds) > 1 or len(gold.items) != len(given.items):
        return False
    if symbolic is unsettled and len(gold.items) > MAX_INLINE_ITEMS:
        raise Unsettled
    if gold.kind in ("list", "union"):
        return _unordered(gold, given, symbolic)
    return all(_equal(a, b, symbolic) for a, b in zip(gold.items, given.items, strict=True))


def _unordered(gold: Group, given: Group, symbolic: Symbolic) -> bool:
    """Every item has its own partner; equality is transitive, so the first free partner will do."""
    if gold.kind != given.kind or len(gold.items) != len(given.items):
        return False
    free = list(given.items)
    for item in gold.items:
        partner = next((other for other in free if _equal(item, other, symbolic)), None)
        if partner is None:
            return False
        free.remove(partner)
    return True


def _is_column(group: Group) -> bool:
    return all(isinstance(row, Group) and len(row.items) == 1 for row in group.items)


def _flat(group: Group) -> Group:
    rows = group.items if group.kind == "matrix" else ()
    entries = tuple(row.items[0] for row in rows if isinstance(row, Group))
    return Group(group.text, "()", entries) if rows else group


def _algebra_of_sets(node: Node) -> bool:
    """Whether computer algebra can read this node as a set or matrix although the forms differ."""
    signs = ("\\cup", "\\cap", "\\setminus", "\\infty", "\\mathbb", "matrix")
    return isinstance(node, (Group, Leaf)) and any(sign in node.text for sign in signs)


def _equal_leaves(gold: str, given: str, symbolic: Symbolic) -> bool:
    if compact(gold) == compact(given):
        return True
    if (word := _as_word(gold)) is not None:
        return word == (_as_word(given) or _word_form(given))
    if _TEXT.fullmatch(given) and not re.fullmatch(r"\\text\{\s*[A-Za-z]\s*\}", given):
        return False
    if read_base(gold) or read_base(given):
        return _equal_with_base(gold, given)
    expected, found = read_marks(gold), read_marks(given)
    number, other = read_number(expected.core), read_number(found.core)
    if number is not None and other is not None:
        number, other = number * expected.scale, other * found.scale
        shares = [value / 100 if mark.percent else value for value, mark in ((number, expected), (other, found))]
        return number == other or shares[0] == shares[1]
    if not _operators(found.core) <= _operators(expected.core) or _APART.search(found.core):
        return False
    return _equal_expressions(expected, found, symbolic)


def _equal_expressions(gold: Quantity, given: Quantity, symbolic: Symbolic) -> bool:
    a, b = (quantity.core if quantity.scale == 1 else f"{quantity.scale}({quantity.core})" for quantity in (gold, given))
    if symbolic(a, b):
        return True
    if gold.degree != given.degree and "\\pi" in a + b:  # one in degrees, the other in radians
        a, b = (f"\\frac{{\\pi}}{{180}}({c})" if q.degree else c for q, c in ((gold, a), (given, b)))
        return symbolic(a, b)
    return False


def _equal_with_base(gold: str, given: str) -> bool:
    """A gold in a base wants that base; a plain gold takes the value."""
    expected, found = read_base(gold), read_base(given)
    if expected is not None:
        return found is not None and found[1] == expected[1] and int(*found) == int(*expected)
    value = read_number(read_marks(gold).core)
    return found is not None and value is not None and int(*found) == value


def _operators(text: str) -> set[str]:
    """Operators that would make an unevaluated expression score as its value."""
    return {next(name for name in match.groups() if name) for match in _OPERATORS.finditer(text)}


def _as_word(text: str) -> str | None:
    r"""The word an answer consists of, or None: all of it in \text, or letters that can be no product of variables."""
    if match := _TEXT.fullmatch(text):
        return _word_form(match.group(1))
    if _WORD.fullmatch(text) and (len(text) >= 4 or text.casefold() in _PLAIN_WORDS):
        return _word_form(text)
    return None


def _word_form(text: str) -> str:
    """Case is ignored from two letters on; brackets around an option letter, too."""
    text = " ".join(_TEXT.sub(r"\1", text).strip(" ().'\"").split())
    return text.casefold() if len(text) > 1 else text


__all__ = ["Symbolic", "Unsettled", "equal_answers", "unsettled"]
