"""The base class of all configuration sections. Imports no torch."""

from __future__ import annotations

import math
import os
from datetime import date, time
from errno import ENAMETOOLONG
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = 2**63 - 1
"""Largest integer of TOML."""
MOST_RESPONSES = 2**20
"""Most prompts of a step, and most responses to one."""
LONGEST_WAIT_S = 2_000_000
"""Longest deadline, 23 days: poll(2), by which a wait ends, takes at most 2^31 milliseconds."""


class Section(BaseModel):
    """A table of the TOML file. Unknown keys fail; the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_silent_conversion(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a quoted number, and a truth value in place of a number; pydantic would convert both.

        A list of texts may be written as its only text.
        """
        assert info.field_name is not None, "pydantic validates fields by name"
        annotation = cls.model_fields[info.field_name].annotation
        kinds = set(get_args(annotation)) or {annotation}
        if get_origin(annotation) is tuple:
            return _entries(value, annotation)
        of_section = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
        if not of_section and _too_large(value):  # a section's keys are checked there, and named
            raise ValueError("give a number below 2^63")
        if get_origin(annotation) is dict:
            return value
        if value == "none" and type(None) in kinds:
            return None  # a command line has no other word for it
        if kinds & {int, float} and isinstance(value, (bool, str)):
            raise ValueError(_as_number(value))
        if bool in kinds and not isinstance(value, bool):
            raise ValueError("give true or false")
        if kinds & {str, Path} and isinstance(value, (int, float, date, time)):
            raise PydanticCustomError("not_text", "give text, in quotes")
        if Path in kinds and isinstance(value, (str, Path)):
            written_out(str(value))
            if not _possible(str(value)):
                raise ValueError("no file can have this name")
        return value


def _as_number(value: Any) -> str:
    """How a text is written as a number, e.g. ".001", which TOML does not read."""
    try:
        number = float(value) if isinstance(value, str) and "_" not in value else math.nan
    except ValueError:
        number = math.nan
    return f"write {number:g}, without quotes" if math.isfinite(number) else "give a number, without quotes"


def written_out(path: str) -> str:
    """Refuse a path that only a shell would expand; it would become a directory with the name `~` or `$HOME`.

    Also refuse one that is not UTF-8: JSON cannot hold it, and so not the run's config.json.

    Raises:
        PydanticCustomError: with its fix.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("not_utf8", "the path is not UTF-8", {"fix": "rename the file"}) from None
    if path.startswith("~") or "$" in path:
        expanded = os.path.expanduser(os.path.expandvars(path))
        example = "" if expanded.startswith("~") or "$" in expanded else f": {expanded}"
        fix = f"write the path out, because nothing expands it here{example}"
        raise PydanticCustomError("not_expanded", "a path with ~ or $ is taken literally", {"fix": fix})
    return path


def _entries(value: Any, annotation: Any) -> Any:
    """The entries of a list: "a" stands for ["a"] in a list of texts. Sections have their own short forms."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        raise ValueError('quote the entries of a list: ["a", "b"]')
    if section_in(annotation) or {int, float} & set(get_args(annotation)):
        return value
    return (value,) if isinstance(value, str) else value


def _too_large(value: Any) -> bool:
    """Whether a value, or an entry of a table or list, is an integer that TOML and JSON cannot hold."""
    if isinstance(value, (dict, list)):
        return any(map(_too_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > LARGEST


def _possible(path: str) -> bool:
    """Whether the file system takes such a path; functions of `pathlib` raise an OSError for others."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno != ENAMETOOLONG
    except ValueError:  # a null character, or half of a surrogate pair
        return False
    return True


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Whether a field is a section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds directly or as entries of a list or table; None for plain values."""
    if is_section(annotation):
        return annotation
    return next((section for part in get_args(annotation) if (section := section_in(part))), None)
