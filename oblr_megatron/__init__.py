"""OBLR-PO post-training of Qwen3, Qwen2.5 and Llama 3 on megatron-core with vLLM rollouts.

The Python API: `api.py`, docs/first_run.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oblr_megatron.api import Config, RunError, TrainedRun, UserError, evaluate, load_config, parse_config, train
    from oblr_megatron.config.baselines import baseline

__version__ = "0.1.0"
__all__ = [
    "Config",
    "RunError",
    "TrainedRun",
    "UserError",
    "baseline",
    "evaluate",
    "load_config",
    "parse_config",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the API when it is first used, so that `import oblr_megatron` loads nothing else."""
    if name == "baseline":  # modules with baselines are imported before torch is
        from oblr_megatron.config.baselines import baseline

        return baseline
    if name in __all__:
        from oblr_megatron import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
