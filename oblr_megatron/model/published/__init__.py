"""The published configurations of models, for sizes without local weights. Imports no torch.

published("Qwen3-8B")["num_hidden_layers"]      # 36; also "8B", "qwen3_8b", "Qwen/Qwen3-8B"
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from oblr_megatron.errors import UserError
from oblr_megatron.families import FAMILIES

HERE = Path(__file__).parent
NAMES = tuple(name for family in FAMILIES for name in family.published)


def published(name: str) -> dict[str, Any]:
    """The config.json that was published with a model.

    The name may lack "Qwen/" and "Qwen3-", and may be in any case. "-" and "_" are ignored.

    Raises:
        UserError: no such model.
    """
    wanted = _letters(name.rpartition("/")[2])
    match = next((known for known in NAMES if _letters(known) in (wanted, f"qwen3{wanted}")), None)
    if match is None:
        raise UserError(
            f"no published model is named {name!r}",
            where="model",
            fix=f"name one of {', '.join(NAMES)}, or a directory with a config.json",
        )
    config: dict[str, Any] = json.loads((HERE / f"{match}.json").read_text(encoding="utf-8"))
    return config


def _letters(name: str) -> str:
    """Example: "qwen3_8b" and "Qwen3-8B" -> "qwen38b"."""
    return re.sub(r"[\s_-]", "", name.lower())
