"""The configuration of a run, from a TOML file and dotted overrides. Imports no torch.

    config = load_config("examples/tiny_cpu/config.toml", ["optimizer.lr=1e-3", "algo.baseline=rloo"])

An unknown key, a wrong type or a value out of bounds raises `UserError` with the key, the value and the fix.
`checks/layout.py` checks what depends on the model or the number of ranks.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import BASELINES
from oblr_megatron.config.checkpoint import CheckpointConfig
from oblr_megatron.config.checks import apply_override, check_together
from oblr_megatron.config.data import DataConfig, EvaluateConfig
from oblr_megatron.config.gradnorm import GradnormConfig
from oblr_megatron.config.log import LogConfig
from oblr_megatron.config.model import ModelConfig
from oblr_megatron.config.optimizer import OptimizerConfig
from oblr_megatron.config.parallel import ParallelConfig
from oblr_megatron.config.refused_keys import REFUSED_KEYS
from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.config.rollout import RolloutConfig, WeightsConfig
from oblr_megatron.config.section import Section, section_in
from oblr_megatron.errors import UserError


class Config(Section):
    """The configuration of a run."""

    run_dir: Path
    """Output directory; must be empty or absent, unless the run is resumed."""
    num_steps: int = Field(100, ge=1)
    """Optimizer steps."""
    seed: int = Field(0, ge=0)
    """Seed of data order and sampling."""
    num_prompts: int = Field(128, ge=1)
    """Q, prompts per step."""
    group_size: int = Field(8, ge=1)
    """G, responses per prompt."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    reward: RewardConfig = RewardConfig()
    gradnorm: GradnormConfig = GradnormConfig()
    algo: AlgoConfig = AlgoConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()

    @property
    def uses_norms(self) -> bool:
        """Whether a step needs w, exact or estimated: for the baseline or because of gradnorm.always."""
        return BASELINES[self.algo.baseline].needs_norms or self.gradnorm.always

    @property
    def measures_norms(self) -> bool:
        """Whether a step measures norms in backward passes; the other sources need none."""
        return self.uses_norms and self.gradnorm.source in ("exact", "sketch")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides and validate.

    Relative paths in the file refer to the current directory, as on the command line.

    Raises:
        UserError: the file cannot be read, an override is malformed, a key is unknown, a value is out of bounds.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read the config: {error.strerror}", where=str(path), fix="give an existing TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not a TOML file: {error}", where=str(path), fix="correct that line") from error
    return parse_config(table, str(path), overrides)


def parse_config(table: dict[str, Any], where: str = "config", overrides: Sequence[str] = ()) -> Config:
    """Validate a plain dict, e.g. the config.json of a finished run, after applying the overrides to it.

    Raises:
        UserError: names the first wrong key, its value and the bound.
    """
    for override in overrides:
        apply_override(table, override)
    config = validated(Config, table, where)
    check_together(config, where)
    return config


S = TypeVar("S", bound=Section)


def validated(section: type[S], table: dict[str, Any], where: str) -> S:
    """Validate a plain dict as any section.

    Raises:
        UserError: names the first wrong key, its value and the bound.
    """
    try:
        return section.model_validate(table)
    except ValidationError as error:
        raise _first_error(error, where, section) from None


def _first_error(error: ValidationError, where: str, root: type[Section]) -> UserError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        if key in REFUSED_KEYS:
            reason, instead = REFUSED_KEYS[key]
            return UserError(f"unknown key {key!r}: {reason}", where=where, fix=instead)
        return UserError(f"unknown key {key!r}", where=where, fix=_nearest(first["loc"], root))
    if first["type"] == "missing":
        return UserError(f"{key!r} is missing", where=where, fix="set it in the file or as an override")
    return UserError(f"{key} = {first['input']!r}: {first['msg']}", where=where, fix="correct the value")


def _nearest(location: tuple[int | str, ...], section: type[Section]) -> str:
    """The fix for an unknown key: the closest known key, or the list of all keys."""
    import difflib

    for part in map(str, location[:-1]):
        if part in section.model_fields:  # else an index of a list or the name of a held-out set
            section = section_in(section.model_fields[part].annotation) or section
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(names)}"
