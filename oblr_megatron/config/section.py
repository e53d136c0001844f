"""What every section of the configuration is. Imports no torch."""

from __future__ import annotations

from typing import Any, TypeGuard, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A table of the TOML file: unknown keys fail, docstrings under the fields are their documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_silent_conversion(cls, value: Any, info: ValidationInfo) -> Any:
        """A number in quotes, or a truth value for a number, is a mistake and not a spelling."""
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
    """Whether a field is a table of the file."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds, as a table or as the entries of a list or table; None if it holds values."""
    if is_section(annotation):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)
