"""Steps of the gradient-norm benchmark: gradient, clipping and Adam on the same layers and samples.

- plain: megatron-core, RLOO, no norms
- inline: the same with exact norms that only later steps read
- two_pass, stash, bookkeep, auto: exact norms that the step's own baseline reads, by `gradnorm.mode`
- tempered: `pooled` and `algo.norm_power` with one response to each prompt, in the mode that "auto" selects
- tempered_logit: the same with `gradnorm.source = "logit"`
- plain_torch: plain PyTorch, RLOO; the base of opacus_ghost
- opacus_ghost: plain PyTorch with Opacus's ghost norms, all samples in one batch or one by one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from meter import Step
from opacus_ghost import GhostTrainer, Rows, build_model
from shapes import Cell, randomize

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.algo.formulas import History
from oblr_megatron.checkpoint.hf_dir import HFDir
from oblr_megatron.config import Config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.memory.select_mode import with_mode
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.preflight.inputs import select_mode
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step

PLAIN, INLINE, PLAIN_TORCH, GHOST = "plain", "inline", "plain_torch", "opacus_ghost"
TEMPERED, TEMPERED_LOGIT = "tempered", "tempered_logit"
GRADNORM: dict[str, dict[str, Any]] = {  # mode -> [gradnorm] section
    PLAIN: {"mode": "two_pass"},
    INLINE: {"mode": "inline", "always": True},
    "two_pass": {"mode": "two_pass"},
    "stash": {"mode": "stash"},
    "bookkeep": {"mode": "bookkeep"},
    "auto": {"mode": "auto"},
    TEMPERED: {"mode": "auto"},
    TEMPERED_LOGIT: {"source": "logit"},
}
MODES = (*GRADNORM, PLAIN_TORCH, GHOST)
EARLIER = History(running_mean_norm=1.0)  # so that tempering has a factor
LR = 1e-6


@dataclass(frozen=True, slots=True)
class Candidate:
    """One variant of a mode's step; a mode may have several."""

    mode: str
    detail: str  # name of the variant
    make: Callable[[], Step]  # allocates the variant's persistent memory, which is freed with the step


def build_candidates(cell: Cell, modes: Sequence[str], parallel: Parallel) -> list[Candidate]:
    """Candidates of the plain step and the given modes, plus PyTorch's plain step if Opacus is measured.

    All megatron-core candidates share one policy; all PyTorch candidates share one model.
    """
    configs = {mode: _config(cell, mode) for mode in dict.fromkeys((PLAIN, *modes)) if mode in GRADNORM}
    candidates = _megatron(cell, configs, parallel)
    if PLAIN_TORCH in modes or GHOST in modes:
        candidates += _torch(cell, GHOST in modes, parallel.device)
    return candidates


def _config(cell: Cell, mode: str) -> Config:
    """Config of a mode. "auto" is resolved for this model, length and free memory."""
    if mode in (TEMPERED, TEMPERED_LOGIT):
        config = cell.config("pooled", GRADNORM[mode], alone=True, norm_power=0.25)
    else:
        config = cell.config("rloo" if mode in (PLAIN, INLINE) else "optimal", GRADNORM[mode])
    if config.gradnorm.mode != "auto":
        return config
    model = HFDir(config.model.path, cell.hf_config().to_dict(), (), {}, tied=False, num_bytes=0)
    return with_mode(config, select_mode(model, config, world_size=1).mode)


def _megatron(cell: Cell, configs: Mapping[str, Config], parallel: Parallel) -> list[Candidate]:
    plain = configs[PLAIN]
    policy = build_policy(cell.hf_config(), plain.model, parallel)
    randomize(policy.named_parameters())
    optimizer = PolicyOptimizer(policy, plain.optimizer)
    details = {
        mode: config.gradnorm.mode if GRADNORM[mode].get("mode") == "auto" else "" for mode, config in configs.items()
    }
    return [
        Candidate(mode, details[mode], partial(_megatron_step, cell, config, policy, optimizer))
        for mode, config in configs.items()
    ]


def _megatron_step(cell: Cell, config: Config, policy: Policy, optimizer: PolicyOptimizer) -> Step:
    batch = whole_step(Batch([], cell.random_samples(), cell.scored(alone=config.group_size == 1)))
    gradient, advantage = StepGradient(policy, config), AdvantageRule(batch.scored, config, EARLIER)

    def step() -> None:
        gradient.begin(1).add(batch, advantage)
        (stats,) = gradient.updates()
        optimizer.clip(stats.sq_norm)
        optimizer.step(LR)

    return step


def _torch(cell: Cell, with_ghost: bool, device: torch.device) -> list[Candidate]:
    rloo, optimal = _config(cell, PLAIN), _config(cell, "two_pass")
    model = build_model(cell.hf_config(), torch.float32, device)
    randomize(model.named_parameters())
    trainer = GhostTrainer(model, rloo.optimizer, LR)
    coefficients = cell.coefficients(rloo, torch.ones(cell.samples))
    whole = Rows.of(cell.random_samples(), device)

    def plain() -> None:
        trainer.plain_gradient(whole.split(), coefficients)
        trainer.update()

    def ghost(batches: list[Rows]) -> None:
        trainer.ghost_gradient(batches, partial(cell.coefficients, optimal))
        trainer.update()

    candidates = [Candidate(PLAIN_TORCH, "", lambda: plain)]
    if with_ghost:
        candidates.append(Candidate(GHOST, "one batch", lambda: partial(ghost, [whole])))
        candidates.append(Candidate(GHOST, "one by one", lambda: partial(ghost, whole.split())))
    return candidates
