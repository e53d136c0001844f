"""The steps that the benchmark of gradient norms compares: same layers, same samples, gradient, clipping and Adam.

plain         megatron-core, RLOO: no norms
two_pass, stash, bookkeep, auto      the same with exact norms, by `gradnorm.mode`
sketch        as bookkeep, the norms estimated: `gradnorm.source = "sketch"`
plain_torch   plain PyTorch, RLOO: what Opacus works on, so that its base is seen too
opacus_ghost  plain PyTorch with Opacus's ghost norms, all samples in a batch or one by one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from meter import Step
from opacus_ghost import GhostTrainer, Rows, build_model
from shapes import Cell, randomize
from torch import Tensor

from oblr_megatron.gradient import TrainingGradient
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.qwen3 import Policy, build_policy

PLAIN, PLAIN_TORCH, GHOST = "plain", "plain_torch", "opacus_ghost"
GRADNORM: dict[str, dict[str, str]] = {  # the section of the configuration that a mode stands for
    PLAIN: {"mode": "two_pass"},
    "two_pass": {"mode": "two_pass"},
    "stash": {"mode": "stash"},
    "bookkeep": {"mode": "bookkeep"},
    "sketch": {"mode": "bookkeep", "source": "sketch"},
    "auto": {"mode": "auto"},
}
MODES = (*GRADNORM, PLAIN_TORCH, GHOST)
LR = 1e-6


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to make the step of a mode; a mode may have several."""

    mode: str
    detail: str  # which way
    make: Callable[[], Step]  # takes what memory the way keeps from step to step, and gives it back with the step


def build_candidates(cell: Cell, modes: Sequence[str], parallel: Parallel) -> list[Candidate]:
    """The modes asked for, the plain step first, and that of PyTorch with Opacus.

    All of megatron-core's share one policy, all of PyTorch's one model.
    """
    names = [PLAIN, *(mode for mode in modes if mode in GRADNORM and mode != PLAIN)]
    chosen = _chosen(cell) if "auto" in names else ""  # before anything takes memory
    candidates = _megatron(cell, names, chosen, parallel)
    if PLAIN_TORCH in modes or GHOST in modes:
        candidates += _torch(cell, GHOST in modes, parallel.device)
    return candidates


def _chosen(cell: Cell) -> str:
    """What a run of this model and length would choose for "auto"."""
    model = HFDir(Path("unused"), cell.hf_config().to_dict(), (), {}, tied=False, num_bytes=0)
    return choose_norms(model, cell.config("optimal", GRADNORM["auto"]), world_size=1).mode


def _megatron(cell: Cell, modes: Sequence[str], chosen: str, parallel: Parallel) -> list[Candidate]:
    config = cell.config("rloo", GRADNORM[PLAIN])
    policy = build_policy(cell.hf_config(), config.model, parallel)
    randomize(policy.named_parameters())
    optimizer = PolicyOptimizer(policy, config.optimizer)
    details = {"auto": chosen}
    return [
        Candidate(mode, details.get(mode, ""), partial(_megatron_step, cell, mode, chosen, policy, optimizer))
        for mode in modes
    ]


def _megatron_step(cell: Cell, mode: str, chosen: str, policy: Policy, optimizer: PolicyOptimizer) -> Step:
    options = {"mode": chosen} if mode == "auto" else GRADNORM[mode]
    config = cell.config("rloo" if mode == PLAIN else "optimal", options)
    samples = cell.random_samples()
    active = torch.ones(config.num_prompts, dtype=torch.bool)
    gradient = TrainingGradient(policy, config)

    def weigh(prompts: Sequence[int], norms_sq: Tensor) -> Tensor:
        """The one prompt's [1, G] -> [1, G]."""
        return cell.coefficients(config, norms_sq[0])[None]

    def step() -> None:
        found = gradient(samples, weigh, active, norms_wanted=mode != PLAIN)
        optimizer.clip(found.stats.sq_norm)
        optimizer.step(LR)

    return step


def _torch(cell: Cell, with_ghost: bool, device: torch.device) -> list[Candidate]:
    rloo, optimal = cell.config("rloo", GRADNORM[PLAIN]), cell.config("optimal", GRADNORM[PLAIN])
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
