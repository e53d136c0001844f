"""Section [model.lora], and its contradictions with the rest of a configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from oblr_megatron.config.section import Section
from oblr_megatron.errors import Problem

if TYPE_CHECKING:
    from oblr_megatron.config import Config

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a layer by Hugging Face's names."""


def _targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"{unknown[0] if unknown else 'nothing'!r} is none of {', '.join(TARGETS)}")
    return tuple(target for target in TARGETS if target in targets)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x. A and B are trained, the model is
    frozen (docs/lora.md)."""

    rank: int = Field(0, ge=0)
    """Rows of A and columns of B. 0: no adapters, all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters, divided by rank."""
    targets: Annotated[tuple[str, ...], AfterValidator(_targets)] = TARGETS
    """Adapted matrices of each layer. By default all seven; for a mixture of experts name those of the attention."""


def lora_problems(config: Config) -> Iterator[Problem]:
    """Options that do not work with adapters."""
    reason = ""
    if not config.model.lora.rank:
        return
    if config.model.transformer_impl == "transformer_engine":
        reason = 'transformer_impl "transformer_engine": set it to "local"'
    elif config.model.fp8 != "none":
        reason = 'model.fp8: set it to "none"'
    elif config.model.batch_invariant:
        reason = "model.batch_invariant: set it to false"
    elif config.rollout.quantization != "none":
        reason = 'rollout.quantization: set it to "none"'
    elif config.rollout.lora == "adapter" and config.rollout.speculation != "none":
        reason = 'rollout.speculation if adapters are pushed: set rollout.lora to "merged"'
    elif config.parallel.overlap_grad_reduce:
        reason = "parallel.overlap_grad_reduce: set it to false"
    elif config.model.router_losses:
        reason = "a router loss, because adapters leave the routers as they are: set its coefficient to 0"
    if reason:
        what, _, fix = reason.partition(": ")
        yield f"model.lora does not support {what}", fix
