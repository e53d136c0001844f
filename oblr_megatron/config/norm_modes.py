"""The one rule for the modes (`gradnorm.mode`) that can compute a run's norms. Imports no torch.

The check of a configuration, the choice of "auto" and the dry run all ask here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oblr_megatron.config.baselines import facts_of
from oblr_megatron.errors import Problem

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def mode_problem(config: Config, mode: str, *, block: int = 1) -> Problem | None:
    """Why a mode cannot compute norms and gradient; None if it can, or if the run measures no norms.

    One pass scales the whole gradient of a response by one number A. FP8 layers expose no factors of the weight
    gradients, so norms need whole gradients of single samples.

    Args:
        config: the run; its own `gradnorm.mode` is not read.
        mode: "inline", "two_pass", "stash" or "bookkeep".
        block: replicas that share experts; not known before the model is.
    """
    if config.compares_norms:
        return _fp8_problem(config, "two_pass", block)
    if not config.measures_norms or mode == "auto":
        return None
    return _fp8_problem(config, mode, block) or (None if mode == "two_pass" else _one_pass_problem(config, mode, block))


def _fp8_problem(config: Config, mode: str, block: int) -> Problem | None:
    if config.model.fp8 == "none":
        return None
    if mode in ("bookkeep", "inline"):
        what = f"FP8 layers expose no factors, so {mode} would keep whole gradients"
        return what, 'set gradnorm.mode to "two_pass" or "stash"'
    if block > 1:
        what = f"{block} replicas share experts, but FP8 layers expose no factors to tell their samples apart"
        return what, 'set model.fp8 to "none", or lower parallel.expert_model_parallel_size'
    return None


def _one_pass_problem(config: Config, mode: str, block: int) -> Problem | None:
    algo, facts, what = config.algo, facts_of(config.algo.baseline), ""
    if mode == "inline" and config.reads_own_norms:
        what = f"{config.reads_own_norms} reads norms of its own step, which come too late in one pass"
        return what, 'set gradnorm.mode to "auto"'
    if mode != "inline" and algo.keep < 1:
        what = f"algo.keep {algo.keep:g} leaves out single responses, but {mode} needs all of a group"
        return what, 'set gradnorm.mode to "auto"'
    if facts.needs_norms and facts.divisor == "centred_std":
        what = (
            f"algo.baseline {algo.baseline!r} divides by a deviation over all prompts; one pass knows the norms of some"
        )
    elif config.gradnorm.sample_fraction < 1:
        what = "gradnorm.sample_fraction below 1 measures some samples, but one pass measures all"
    elif algo.kl_coefficient:
        what = f"algo.kl_coefficient {algo.kl_coefficient:g} adds a KL penalty's gradient, which one pass would scale"
    elif config.model.router_losses:
        what = "router losses (model.moe_aux_loss_coeff, moe_z_loss_coeff) add a gradient of no single sample"
    elif block > 1:
        what = f"{block} replicas share experts, so expert gradients mix samples of several replicas"
    return (what, 'set gradnorm.mode to "two_pass" or "auto"') if what else None
