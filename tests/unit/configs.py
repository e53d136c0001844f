"""A run's config from the fields that a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oblr_megatron.config import Config, parse_config

REQUIRED: dict[str, Any] = {"run_dir": "run", "model": {"path": "model"}, "data": {"train": "rows.jsonl"}}


def config_with(*overrides: str, **fields: Any) -> Config:
    """The required fields and these. A table of `fields` keeps the required keys that it does not name."""
    tables = {
        name: REQUIRED.get(name, {}) | value if isinstance(value, Mapping) else value for name, value in fields.items()
    }
    return parse_config(REQUIRED | tables, overrides=overrides)
