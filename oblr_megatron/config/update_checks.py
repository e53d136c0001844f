"""Checks of algo.updates_per_batch and of the clipped ratios that it needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oblr_megatron.errors import Problem

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def update_problems(config: Config) -> Iterator[Problem]:
    """What several updates on a batch exclude, and what has no effect without them."""
    algo, updates = config.algo, config.algo.updates_per_batch
    if updates == 1:
        if algo.clips and algo.preset is None:  # a preset may be run with a single update
            what = "algo.clip_low, clip_high, clip_dual, ratio and surrogate act on a batch's later updates, but "
            yield what + "algo.updates_per_batch is 1", "set algo.updates_per_batch to 2 or more, or leave them out"
        return
    what = f"algo.updates_per_batch {updates}"
    if config.num_prompts % updates:
        yield f"{what} does not divide num_prompts {config.num_prompts}", "change one of them"
    elif (
        algo.snr.needs_folds and algo.snr.estimator != "prompts" and config.per_update.num_prompts % algo.snr.num_folds
    ):
        yield (
            f"{what} leaves {config.per_update.num_prompts} prompts for each update, which is not a multiple of "
            f"algo.snr.num_folds {algo.snr.num_folds}",
            "lower one of them, or raise num_prompts",
        )
    if algo.clip_dual is not None and algo.surrogate == "cispo":
        yield 'algo.clip_dual has no effect with algo.surrogate "cispo"', "leave it out"
    yield from _on_policy_only(config, what)


def _on_policy_only(config: Config, what: str) -> Iterator[Problem]:
    """Options that need every update to be the first one on its samples."""
    algo = config.algo
    if config.uses_norms or algo.token_wise:
        cause = "gradnorm.always" if config.gradnorm.always else f"algo.baseline {algo.baseline!r}"
        yield (
            f"{what} with {cause}: norms and energies measured before the first update are not those of later ones",
            'set algo.baseline to e.g. "rloo" or "grpo" and gradnorm.always to false, or algo.updates_per_batch to 1',
        )
    if algo.schedule not in ("constant", "cosine"):
        yield (
            f"{what} with algo.schedule {algo.schedule!r}, which takes its rates from signal and noise of the policy",
            'set algo.schedule to "constant" or "cosine", or algo.updates_per_batch to 1',
        )
    if config.rollout.overlap != "none":
        yield (
            f"{what} with rollout.overlap {config.rollout.overlap!r}: mini-batches need the whole batch, with the "
            "weights it was sampled from",
            'set rollout.overlap to "none", or algo.updates_per_batch to 1',
        )
