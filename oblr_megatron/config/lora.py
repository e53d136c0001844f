"""Section [model.lora], and its contradictions with the rest of a configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from oblr_megatron.config.section import Section
from oblr_megatron.errors import Problem
from oblr_megatron.families import MATRICES

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def _targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [target for target in targets if target not in MATRICES]
    if unknown or not targets:
        raise ValueError(f"{unknown[0] if unknown else 'nothing'!r} is none of {', '.join(MATRICES)}")
    return tuple(target for target in MATRICES if target in targets)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x. A and B are trained, the model is
    frozen (docs/lora.md)."""

    rank: int = Field(0, ge=0)
    """Rows of A and columns of B. 0: no adapters, all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters, divided by rank."""
    targets: Annotated[tuple[str, ...], AfterValidator(_targets)] = MATRICES
    """Adapted matrices of each layer. In a mixture the last three are those of every expert."""


LORA = LoraConfig()
"""The defaults."""


def lora_problems(config: Config) -> Iterator[Problem]:
    """Options that do not work with adapters."""
    model, rollout = config.model, config.rollout
    drafts = rollout.lora == "adapter" and rollout.speculation != "none"
    losses = bool(model.router_losses)
    unused = [f"model.lora.{key}" for key in ("alpha", "targets") if getattr(model.lora, key) != getattr(LORA, key)]
    unused += ["rollout.lora"] * (rollout.lora != "merged")
    if unused and not model.lora.rank:
        what = f"{unused[0]} is set, but model.lora.rank is 0: all weights would be trained"
        yield what, "set model.lora.rank, e.g. 16"
    for used, what, fix in (
        (model.fp8 != "none", "model.fp8", 'it to "none"'),
        (model.batch_invariant, "model.batch_invariant", "it to false"),
        (rollout.quantization != "none", "rollout.quantization", 'it to "none"'),
        (drafts, "rollout.speculation if adapters are pushed", 'rollout.lora to "merged"'),
        (config.parallel.overlap_grad_reduce, "parallel.overlap_grad_reduce", "it to false"),
        (losses, "a router loss, because adapters leave the routers as they are", "its coefficient to 0"),
    ):
        if model.lora.rank and used:
            yield f"model.lora does not support {what}", f"set {fix}"
