"""The configuration of a run: one documented field a line, TOML files, dotted overrides. Imports no torch.

    config = load_config("examples/tiny_cpu/config.toml", ["optimizer.lr=1e-3", "algo.baseline=rloo"])

An unknown key, a wrong type or a value out of its bounds raises `UserError` with the key, the value and the remedy.
What depends on the model (heads, layers, vocabulary) or on the number of ranks is checked in `checks.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from oblr_megatron.config_algo import AlgoConfig
from oblr_megatron.config_checkpoint import CheckpointConfig
from oblr_megatron.config_checks import apply_override, check_together
from oblr_megatron.config_data import DataConfig, EvaluateConfig
from oblr_megatron.config_log import LogConfig
from oblr_megatron.config_model import ModelConfig
from oblr_megatron.config_parallel import ParallelConfig
from oblr_megatron.config_reward import RewardConfig
from oblr_megatron.config_rollout import RolloutConfig, WeightsConfig
from oblr_megatron.config_section import Section, section_in
from oblr_megatron.errors import UserError


class GradnormConfig(Section):
    """Squared gradient norms of single responses."""

    source: Literal["exact", "sketch", "logit", "length"] = "exact"
    """What stands for w: the exact norm, or an estimate. "sketch": an unbiased random projection; "logit": the energy
    of the score at the logits, forward only; "length": response tokens. An estimate leaves the gradient unbiased."""
    mode: Literal["auto", "two_pass", "stash", "bookkeep"] = "auto"
    """How norms are computed: "two_pass", a pass of their own; "stash", one pass that keeps a gradient of each response
    of a prompt; "bookkeep", one pass that keeps what weight gradients are made of. "auto" chooses, and says why."""
    stash_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stashed gradients (float64 runs keep float64); norms are taken before they are rounded."""
    stash_offload: bool = False
    """Keep the stashed gradients in host memory."""
    stash_spread: int = Field(1, ge=1)
    """Data-parallel ranks that share the responses of a prompt: each stashes group_size / stash_spread gradients."""
    stash_lag: int = Field(1, ge=0)
    """Further prompts that a rank has buffers for while the norms of other ranks are awaited (stash_spread > 1)."""
    window_tokens: int = Field(65536, ge=1)
    """Tokens whose factors bookkeep holds together; a prompt with more goes alone."""
    sketch_size: int = Field(32, ge=1)
    """m, rows of the sketch's random projections: a norm's relative error is 1 / m to 2 / sqrt(m)."""
    check_every: int = Field(0, ge=0)
    """With an estimated source: every so many steps, log its correlation with the exact norms; 0 never."""
    check_samples: int = Field(16, ge=2)
    """Responses of that check, rounded up to whole prompts."""
    always: bool = False
    """Measure norms even when the baseline does not need them, for the metrics."""


class OptimizerConfig(Section):
    """megatron-core's optimizer."""

    name: Literal["adam", "sgd"] = "adam"
    """Optimizer."""
    lr: float = Field(1e-6, gt=0)
    """eta_0: the rate at the end of warm-up (snr.reference "warmup") or at full signal ("one"); the constant schedule's
    rate, or where the cosine starts."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps in which the rate rises linearly, under every schedule but the controls: they have their source's rates."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Where the cosine schedule ends, as a share of lr."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled for Adam, torch's L2 term for SGD. Norm weights do not decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first moment decay."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second moment decay."""
    adam_eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    sgd_momentum: float = Field(0.0, ge=0, lt=1)
    """SGD's momentum."""
    clip_grad: float = Field(1.0, ge=0)
    """Clip the global gradient norm here, after it was measured; 0 turns it off."""


class Config(Section):
    """A whole run."""

    run_dir: Path
    """Directory the run writes; must be empty or absent."""
    num_steps: int = Field(100, ge=1)
    """Optimizer steps."""
    seed: int = Field(0, ge=0)
    """Seeds data order and sampling."""
    num_prompts: int = Field(128, ge=1)
    """Q, prompts a step."""
    group_size: int = Field(8, ge=1)
    """G, responses a prompt."""
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides, validate.

    Relative paths inside the file are taken from the current directory, as on the command line.

    Raises:
        UserError: the file cannot be read, an override is malformed, a key is unknown, a value is out of bounds.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read the config: {error.strerror}", where=str(path), mend="give an existing TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not a TOML file: {error}", where=str(path), mend="correct the line named") from error
    return parse_config(table, str(path), overrides)


def parse_config(table: dict[str, Any], where: str = "config", overrides: Sequence[str] = ()) -> Config:
    """Validate a plain dict, e.g. the config.json of a finished run; overrides are put into it first.

    Raises:
        UserError: naming the first key that is wrong, its value and the bound.
    """
    for override in overrides:
        apply_override(table, override)
    config = validated(Config, table, where)
    check_together(config, where)
    return config


S = TypeVar("S", bound=Section)


def validated(section: type[S], table: dict[str, Any], where: str) -> S:
    """A section from a plain dict; of a run's config or of another file that is made of sections.

    Raises:
        UserError: naming the first key that is wrong, its value and the bound.
    """
    try:
        return section.model_validate(table)
    except ValidationError as error:
        raise _first_error(error, where, section) from None


def _first_error(error: ValidationError, where: str, root: type[Section]) -> UserError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return UserError(f"unknown key {key!r}", where=where, mend=_nearest(first["loc"], root))
    if first["type"] == "missing":
        return UserError(f"{key!r} is missing", where=where, mend="set it in the file or as an override")
    return UserError(f"{key} = {first['input']!r}: {first['msg']}", where=where, mend="correct the value")


def _nearest(location: tuple[int | str, ...], section: type[Section]) -> str:
    """The remedy for an unknown key: the closest known one, or the list of all."""
    import difflib

    for part in map(str, location[:-1]):
        if part in section.model_fields:  # not the place in a list, or the name of a set
            section = section_in(section.model_fields[part].annotation) or section
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(names)}"
