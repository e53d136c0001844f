"""The published configurations of the Qwen3 family, for sizes without local weights. Imports no torch.

published("Qwen3-8B")["num_hidden_layers"]      # 36; also "8B", "qwen3_8b", "Qwen/Qwen3-8B"
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from oblr_megatron.errors import UserError

HERE = Path(__file__).parent
NAMES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")


def published(name: str) -> dict[str, Any]:
    """The config.json that was published with a model.

    Args:
        name: of the model, with or without "Qwen/" and "Qwen3-", in any case; "_" counts as "-".

    Raises:
        UserError: no such model.
    """
    size = re.sub(r"^(qwen/)?(qwen3-)?", "", name.strip().lower().replace("_", "-"))
    found = next((known for known in NAMES if known.lower() == size), None)
    if found is None:
        raise UserError(
            f"no published Qwen3 model is named {name!r}",
            where="model",
            fix=f"name one of {', '.join(f'Qwen3-{known}' for known in NAMES)}, or a directory with a config.json",
        )
    config: dict[str, Any] = json.loads((HERE / f"{found}.json").read_text(encoding="utf-8"))
    return config


def model_config(model: str | Path) -> dict[str, Any]:
    """The config.json of a directory, or the published one of a name.

    Raises:
        UserError: neither.
    """
    file = Path(model) / "config.json"
    if not file.is_file():
        return published(str(model))
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"not JSON: {error}", where=str(file), fix="give a complete Qwen3 config.json") from error
    return config
