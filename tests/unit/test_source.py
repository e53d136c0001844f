"""Habits of the package's source: an assert says what holds, and an `except` of everything says why.

Not covered: whether the sentences are true.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import oblr_megatron

FILES = sorted(Path(oblr_megatron.__file__).parent.rglob("*.py"))
BROAD = ("Exception", "BaseException")


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, list[str], ast.AST]]:
    """(place, lines of the file, node) of all nodes of a kind."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kind):
                yield f"{path}:{node.lineno}", text.splitlines(), node  # type: ignore[attr-defined]


def test_asserts_have_messages() -> None:
    assert [place for place, _, node in nodes(ast.Assert) if getattr(node, "msg", None) is None] == []


def test_broad_excepts_give_a_reason() -> None:
    silent = [
        place
        for place, lines, node in nodes(ast.ExceptHandler)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in BROAD))
        and not lines[node.lineno - 1].partition("#")[2].replace("noqa: BLE001", "").strip(" -")
    ]
    assert silent == []
