"""The configuration of a run: one file per section, joined in `run.py`. Imports no torch."""

from oblr_megatron.config.optimizer import OptimizerConfig
from oblr_megatron.config.run import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    WeightsConfig,
    load_config,
    parse_config,
    validated,
    with_own_scores,
)

__all__ = [
    "Config",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "WeightsConfig",
    "load_config",
    "parse_config",
    "validated",
    "with_own_scores",
]
