"""What a rank's gradient of a parameter is, decided once for every parameter before anything is measured.

| a rank's gradient is                    | kind       | before squaring | counted on      |
|-----------------------------------------|------------|-----------------|-----------------|
| a shard of its own                      | SHARD      | -               | every TP rank   |
| one summand of the whole                | PARTIAL    | sum over TP     | TP rank 0       |
| a copy of the whole, equal on all ranks | COPY       | -               | TP rank 0       |
| absent                                  | FROZEN     | -               | nowhere         |

The evidence is what megatron-core puts on its parameters, and reads itself when it reduces gradients
(`finalize_model_grads`) and when it measures their norm (`get_main_grads_for_grad_norm`): `tensor_model_parallel` on
column and row weights, column biases, embedding and head; `sequence_parallel`, true or false, on norms and row biases.
The norms of queries and keys are partials over heads, with sequence parallelism or without: every rank normalises its
own heads with the same weight. A parameter that carries no such mark may be anything, so it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

HEAD_NORMS = ("q_layernorm", "k_layernorm")  # children of megatron's attention modules, applied to the rank's own heads


class Kind(Enum):
    """How the gradient of a parameter is spread over the tensor-parallel ranks."""

    SHARD = "a shard of its own"
    PARTIAL = "one summand of the whole"
    COPY = "a copy of the whole"
    FROZEN = "absent"


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One parameter of this rank.

    Example: Rule("decoder.layers.0.self_attention.q_layernorm.weight", parameter, Kind.PARTIAL, tied=False)
    """

    name: str  # inside the stage's module
    param: Parameter
    kind: Kind
    tied: bool  # the other end of the pipeline holds a second copy, with a gradient of its own that is to be added

    @property
    def grad(self) -> Tensor:
        """The view of megatron's gradient buffer that this parameter's gradients are added to."""
        return self.param.main_grad  # type: ignore[attr-defined]  # set by megatron's data-parallel wrapper


def classify(stages: Sequence[Module], *, tp_size: int, sequence_parallel: bool) -> list[Rule]:
    """The rule of every parameter of this rank.

    Args:
        stages: the model chunks of this rank, without their data-parallel wrappers.
        tp_size: tensor-parallel ranks.
        sequence_parallel: whether norms and residuals are split over the sequence.

    Raises:
        UserError: a trainable parameter that no rule covers.
    """
    rules = []
    for name, param, head_norm in _parameters(stages):
        kind = (
            _kind(param, head_norm=head_norm, sequence_parallel=sequence_parallel)
            if param.requires_grad
            else Kind.FROZEN
        )
        if kind is None:
            raise UserError(
                f"no rule says how the gradient of {name!r} is spread over ranks",
                where="gradnorm",
                mend="freeze the parameter, or choose a baseline that needs no gradient norms",
            )
        if kind is Kind.PARTIAL and tp_size == 1:
            kind = Kind.SHARD  # the only summand is the whole
        rules.append(Rule(name, param, kind, tied=getattr(param, "shared_embedding", False)))
    return rules


def _kind(param: Parameter, *, head_norm: bool, sequence_parallel: bool) -> Kind | None:
    """The kind of a trainable parameter, None where there is no evidence.

    Experts (`allreduce` false) mix tokens of several samples and data-parallel ranks; a parameter whose gradient
    megatron averages over TP is neither a partial nor a copy. Neither occurs in a dense Qwen3.
    """
    if not getattr(param, "allreduce", True) or getattr(param, "average_gradients_across_tp_domain", False):
        return None
    if getattr(param, "tensor_model_parallel", False):
        return Kind.SHARD
    if head_norm:
        return Kind.PARTIAL
    over_tokens = getattr(param, "sequence_parallel", None)
    if over_tokens is None:
        return None
    return Kind.PARTIAL if over_tokens and sequence_parallel else Kind.COPY


def _parameters(stages: Sequence[Module]) -> Iterator[tuple[str, Parameter, bool]]:
    """Every parameter once: its name, itself, whether it belongs to a norm of queries or keys."""
    seen: set[int] = set()
    for stage in stages:
        head_norms = {
            id(param)
            for module in stage.modules()
            for child in HEAD_NORMS
            if getattr(module, child, None) is not None
            for param in getattr(module, child).parameters()
        }
        for name, param in stage.named_parameters():
            if id(param) not in seen:
                seen.add(id(param))
                yield name, param, id(param) in head_norms
