"""The base class of all configuration sections. Imports no torch."""

from __future__ import annotations

from typing import Any, TypeGuard, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A table of the TOML file. Unknown keys fail; the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_silent_conversion(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a quoted number, and a truth value in place of a number; pydantic would convert both."""
        assert info.field_name is not None, "pydantic validates fields by name"
        kinds = set(get_args(cls.model_fields[info.field_name].annotation)) or {
            cls.model_fields[info.field_name].annotation
        }
        if kinds & {int, float} and isinstance(value, (bool, str)):
            raise ValueError("give a number, without quotes")
        if bool in kinds and not isinstance(value, bool):
            raise ValueError("give true or false")
        return value


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Whether a field is a section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds directly or as entries of a list or table; None for plain values."""
    if is_section(annotation):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)
