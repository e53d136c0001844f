"""Write docs/config.md from oblr_megatron/config: every field with type, default and meaning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from oblr_megatron.config import Config
from oblr_megatron.config.data import SourceConfig
from oblr_megatron.config.section import Section, is_section, section_in

TARGET = Path(__file__).resolve().parent.parent / "docs" / "config.md"
ENTRIES_ELSEWHERE = ("exclude", "data")  # their entries are sources, documented under data.train
HEADER = """\
# Configuration

A run is one TOML file; `oblr-megatron init` writes a first one ([first run](first_run.md)). `section.key=value` on the
command line overrides a key. The value is TOML; other text is taken as it is, so paths and names need no quotes, and a
list of one text needs no brackets. Paths are taken from the current directory. A default of `none`
means that the key is not set. Made by `python tools/config_doc.py` from `oblr_megatron/config/`.
"""


def document() -> str:
    """The whole page: top-level keys, then one table per section."""
    plain, sections = [], []
    for name, field in Config.model_fields.items():
        if is_section(field.annotation):
            sections += _tables(name, field.annotation)
        else:
            plain.append(_row(name, field))
    return "\n".join([HEADER, *_table("Top level", "", plain), *sections]) + "\n"


def _tables(name: str, section: type[Section]) -> list[str]:
    """Tables of a section, of its subsections and of the entries of its lists."""
    rows, inner = [], []
    for key, field in section.model_fields.items():
        if is_section(field.annotation):
            inner += _tables(f"{name}.{key}", field.annotation)
            continue
        rows.append(_row(key, field))
        entry = section_in(field.annotation)
        if entry is not None and key not in ENTRIES_ELSEWHERE:
            inner += _tables(f"[{name}.{key}]", entry)
    return [*_table(f"[{name}]", " ".join((section.__doc__ or "").split()), rows), *inner]


def _table(title: str, intro: str, rows: list[str]) -> list[str]:
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return [f"## {title}\n", *([f"{intro}\n"] if intro else []), *head, *rows, ""]


def _row(name: str, field: Any) -> str:
    default = "required" if field.default is PydanticUndefined else f"`{_toml(field.default)}`"
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {_type(field.annotation)} | {default} | {meaning} |"


def _type(annotation: Any) -> str:
    """A type in words. Literal["a", "b"] -> "a" or "b"; int | None -> int."""
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, tuple):
        kind = "table" if get_origin(annotation) is dict else "list"
        return f"{kind} of {_entries(arguments[-1] if kind == 'table' else arguments[0])}"
    if arguments and all(isinstance(argument, (str, int)) for argument in arguments):
        return " or ".join(map(_toml, arguments))
    if type(None) in arguments:
        return _type(next(a for a in arguments if a is not type(None)))
    return {"str": "string", "Path": "path"}.get(annotation.__name__, annotation.__name__)


def _entries(annotation: Any) -> str:
    """The entry type of a list or table, in words. A source may be written as a path."""
    if found := section_in(annotation):
        return "sources or paths" if found is SourceConfig else "tables"
    if choices := [value for value in get_args(annotation) if isinstance(value, str)]:
        return ", ".join(f'"{choice}"' for choice in choices)
    return {"str": "strings", "Any": "values", "int": "integers"}[annotation.__name__]


def _toml(value: Any) -> str:
    match value:
        case None:
            return "none"
        case ():
            return "[]"
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case _:
            return str(value)


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
    print(f"wrote {TARGET}", file=sys.stderr)
