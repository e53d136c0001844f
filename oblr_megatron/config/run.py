"""The configuration of a run, from a TOML file and dotted overrides. Imports no torch.

    config = load_config("examples/tiny_cpu/config.toml", ["optimizer.lr=1e-3", "algo.baseline=rloo"])

An unknown key, a wrong type or a value out of bounds raises `UserError` with the key, the value, the file or command
line that it came from, and the fix.
`checks/layout.py` checks what depends on the model or the number of ranks.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from oblr_megatron.config.algo import AlgoConfig, open_to_preset
from oblr_megatron.config.baselines import facts_of
from oblr_megatron.config.checkpoint import CheckpointConfig
from oblr_megatron.config.checks import apply_override, blamed, problems
from oblr_megatron.config.data import DataConfig, EvaluateConfig, SourceConfig
from oblr_megatron.config.gradnorm import GradnormConfig
from oblr_megatron.config.log import LogConfig
from oblr_megatron.config.model import ModelConfig
from oblr_megatron.config.optimizer import OptimizerConfig
from oblr_megatron.config.parallel import ParallelConfig
from oblr_megatron.config.refused import REFUSED
from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.config.rollout import LARGEST_SUPPORT, RolloutConfig, WeightsConfig
from oblr_megatron.config.section import MOST_RESPONSES, Section, section_in
from oblr_megatron.errors import Problem, UserError
from oblr_megatron.user_functions import forget_edited

LONGEST_SHOWN = 200  # characters of a value in an error message

TIES = 8
"""Tokens recorded beyond top_k, so that a row has an end: vLLM also keeps all that are as likely as the last one."""


class Config(Section):
    """The configuration of a run."""

    run_dir: Path
    """Output directory; must be empty or absent, unless the run is resumed."""
    num_steps: int = Field(100, ge=1)
    """Steps of the run: a batch of samples, and one optimizer update unless algo.updates_per_batch is set."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of data order and sampling."""
    num_prompts: int = Field(128, ge=1, le=MOST_RESPONSES)
    """Q, prompts per step."""
    group_size: int = Field(8, ge=1, le=MOST_RESPONSES)
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
    def token_scale(self) -> float:
        """Tokens that the constant aggregation divides by."""
        return self.algo.token_scale or self.rollout.max_response_tokens

    @property
    def uses_norms(self) -> bool:
        """Whether a step needs w, exact or estimated: for a baseline, of this or later steps, or for the metrics."""
        facts = facts_of(self.algo.baseline)
        return bool(self.reads_own_norms) or facts.pools_norms or self.gradnorm.always

    @property
    def reads_own_norms(self) -> str:
        """The option by which coefficients of a step depend on its own norms, which must come first; "" if none does.

        Examples: "algo.baseline 'optimal'", "algo.norm_power 0.25".
        """
        if facts_of(self.algo.baseline).needs_norms:
            return f"algo.baseline {self.algo.baseline!r}"
        return f"algo.norm_power {self.algo.norm_power:g}" if self.algo.norm_power else ""

    @property
    def measures_norms(self) -> bool:
        """Whether a step measures norms in backward passes; the other sources need none."""
        return self.uses_norms and self.gradnorm.source == "exact"

    @property
    def compares_norms(self) -> bool:
        """Whether some steps measure exact norms to compare the estimates with them (`gradnorm.check_every`)."""
        return self.uses_norms and self.gradnorm.source != "exact" and self.gradnorm.check_every > 0

    @property
    def energies_in_pass(self) -> bool:
        """Whether the gradient pass gives w of source "logit", before its backward: c reads no w of another response.

        Not with a KL penalty or router losses, which need all coefficients before the pass.
        """
        apart = facts_of(self.algo.baseline).needs_norms or self.algo.kl_coefficient or self.model.router_losses
        return self.uses_norms and self.gradnorm.source == "logit" and not apart

    @property
    def replays_support(self) -> bool:
        """Whether samples hold the tokens that each draw could take, so that the trainer renormalises over them."""
        return 0 < self.rollout.top_k <= LARGEST_SUPPORT

    @property
    def recorded_tokens(self) -> int:
        """Tokens that the engine records at each token of a response."""
        centred = self.algo.center_tokens if self.algo.center else 0
        return max(centred, self.rollout.top_k + TIES if self.replays_support else 0)

    @property
    def engine_dtype(self) -> str:
        """Dtype of the engines' weights: rollout.dtype, or by default the trainer's."""
        return self.model.dtype if self.rollout.dtype == "auto" else self.rollout.dtype

    @property
    def stashes(self) -> bool:
        """Whether a step keeps gradients of single responses (mode "stash")."""
        return self.measures_norms and self.gradnorm.mode == "stash"

    @property
    def stash_size(self) -> int:
        """Gradients that mode "stash" keeps at once.

        A prompt's, if its baseline reads their norms, or if pipeline stages want several microbatches; else one.
        """
        together = facts_of(self.algo.baseline).needs_norms or self.parallel.pipeline_model_parallel_size > 1
        return self.group_size if together else 1

    @property
    def per_update(self) -> Config:
        """The run as one optimizer update sees it: with algo.updates_per_batch, its share of the prompts."""
        updates = self.algo.updates_per_batch
        return self if updates == 1 else self.model_copy(update={"num_prompts": self.num_prompts // updates})


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file or the config.json of a run, apply `section.key=value` overrides and validate.

    Relative paths in the file refer to the current directory, as on the command line.

    Raises:
        UserError: the file cannot be read, an override is malformed, a key is unknown, a value is out of bounds.
    """
    return parse_config(read_table(path), str(path), overrides)


def read_table(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file or in the config.json of a run, unchecked.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UserError(
            f"cannot read the config: {error.strerror}", where=str(path), fix="give an existing TOML file"
        ) from error
    except (ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper() or "TOML"
        raise UserError(f"not a {kind} file: {error}", where=str(path), fix="correct that line") from error
    if not isinstance(table, dict):
        raise UserError("not a table of settings", where=str(path), fix="give the config.json of a run, or a TOML file")
    return table


def parse_config(table: dict[str, Any], where: str = "config", overrides: Sequence[str] = ()) -> Config:
    """Validate a plain dict, e.g. the config.json of a finished run, after applying the overrides to it.

    Args:
        table: stays as it is.
        where: its source, for errors. A problem with an override's key is one of the command line.
        overrides: section.key=value strings.

    Raises:
        UserError: names the first wrong key, its value and the bound.
    """
    forget_edited()  # a notebook may have edited a function of the last config
    changed = deepcopy(table)
    for override in overrides:
        key, _, preset = override.partition("=")
        if key.strip() == "algo.preset":
            changed["algo"] = open_to_preset(changed.get("algo", {}), preset.strip().strip("'\""))
    for override in overrides:
        apply_override(changed, override)
    config = validated(Config, changed, where, overrides)
    for what, fix in problems(config):
        raise UserError(what, where=blamed(where, overrides, text=what), fix=fix)
    return with_own_scores(config, config.data.train)


def with_own_scores(config: Config, sources: Iterable[SourceConfig]) -> Config:
    """Let tasks of reasoning-gym score responses, if all sources are such tasks and reward.name is left out."""
    if "name" in config.reward.model_fields_set or not all(source.gym_task for source in sources):
        return config
    return config.model_copy(update={"reward": config.reward.model_copy(update={"name": "reasoning_gym"})})


S = TypeVar("S", bound=Section)


def validated(section: type[S], table: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> S:
    """Validate a plain dict as any section.

    Raises:
        UserError: names the first wrong key, its value and the bound.
    """
    try:
        return section.model_validate(table)
    except ValidationError as error:
        errors = error.errors()
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])  # a misspelt required key
        key = ".".join(str(part) for part in first["loc"])
        what, fix = _explained(key, first, section)
        raise UserError(what, where=blamed(where, overrides, key=key), fix=fix) from None


def _explained(key: str, first: ErrorDetails, root: type[Section]) -> Problem:
    if first["type"] == "extra_forbidden":
        if key in REFUSED:
            reason, instead = REFUSED[key]
            return f"unknown key {_shown(key)}: {reason}", instead
        return f"unknown key {_shown(key)}", _nearest(first["loc"], root)
    if isinstance(first["input"], str) and (refused := REFUSED.get(f"{key}={first['input']}")):
        return f"{key} = {_shown(first['input'])}: {refused[0]}", refused[1]
    if first["type"] == "missing":
        return f"{_shown(key)} is missing", "set it in the file or as an override"
    if first["type"] == "not_text":  # the shell removes one of two pairs of quotes
        text = f'"{first["input"]}"'
        fix = f"write {key} = {text} in a file, {key}='{text}' in a shell"
        return f"{key} = {_shown(first['input'])}: {first['msg']}", fix
    message = first["msg"].removeprefix("Value error, ")
    return f"{key} = {_shown(first['input'])}: {message}", first.get("ctx", {}).get("fix", "correct the value")


def _shown(value: Any) -> str:
    """A value in an error message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _nearest(location: tuple[int | str, ...], section: type[Section]) -> str:
    """The fix for an unknown key: the closest known key, or the list of all keys."""
    import difflib

    for part in map(str, location[:-1]):
        if part in section.model_fields:  # else an index of a list or the name of a held-out set
            section = section_in(section.model_fields[part].annotation) or section
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(names)}"
