"""The spread of each parameter's gradient over ranks.

| this rank's gradient is                 | kind       | before squaring | counted on      |
|-----------------------------------------|------------|-----------------|-----------------|
| a shard of its own                      | SHARD      | -               | every TP rank   |
| a partial sum of the whole gradient     | PARTIAL    | sum over TP     | TP rank 0       |
| a copy of the whole, equal on all ranks | COPY       | -               | TP rank 0       |
| absent                                  | FROZEN     | -               | nowhere         |

Context parallelism: every kind is also a partial sum over the ranks that share the sequence.

Experts: the gradient is a shard that mixes tokens of every replica in the block (`Parallel.block_group`). It is a
partial sum only if expert parallelism does not span all ranks that share a sample.

The kind is read from attributes that megatron-core sets on parameters. megatron-core reads the same ones to reduce
gradients (`finalize_model_grads`) and to measure their norm (`get_main_grads_for_grad_norm`):

- `tensor_model_parallel`: column and row weights, column biases, embedding and output layer.
- `sequence_parallel` (true or false): norms, routers and row biases.

The q and k norms are always partial: each rank applies the same weight to its own heads. torch's norms have no
attributes; where the sequence is not split their gradients are copies. Any other parameter without attributes is
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torch import nn

from oblr_megatron.errors import UserError
from oblr_megatron.families import EMBEDDING, OUTPUT

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    from oblr_megatron.model.tapped import TappedModel

HEAD_NORMS = ("q_layernorm", "k_layernorm")  # children of megatron's attention modules, applied to the rank's own heads
EXPERT = ".experts."
OWN_OF_EXPERT = re.compile(  # several experts may share other weights, and `moe.splits_of` knows none
    r".*\.experts\.(?:weight[12]|(?:local_experts\.\d+\.)?linear_fc[12]\.(?:weight|bias)\d*)|.*\.lora\.experts\..*"
)


class Kind(Enum):
    """A parameter's gradient on one tensor-parallel rank."""

    SHARD = "a shard of its own"
    PARTIAL = "a partial sum of the whole"
    COPY = "a copy of the whole"
    FROZEN = "absent"


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The measurement of one parameter of this rank.

    Example: Rule("decoder.layers.0.self_attention.q_layernorm.weight", parameter, Kind.PARTIAL)
    """

    name: str  # inside the chunk's module
    param: Parameter
    kind: Kind
    chunk: int = 0  # model chunk of this rank
    tapped: bool = True  # the gradient goes to a sink (model/taps.py), not to main_grad
    tied: bool = False  # shared by embedding and output layer, on one stage or as a copy on two
    expert: bool = False

    @property
    def grad(self) -> Tensor:
        """This parameter's view into megatron's gradient buffer."""
        return self.param.main_grad  # type: ignore[attr-defined]  # set by megatron's data-parallel wrapper


def classify(policy: TappedModel) -> list[Rule]:
    """The rule of every parameter of this rank.

    Raises:
        UserError: no rule covers a trainable parameter.
    """
    parallel, tied = policy.parallel, policy.tied
    rules = []
    for chunk, name, param, head_norm, torch_norm in _parameters(policy.modules):
        expert = EXPERT in name
        kind: Kind | None = Kind.FROZEN
        if param.requires_grad:
            if expert and not OWN_OF_EXPERT.fullmatch(name):
                what = f"the parameter {name!r} is not the weight or bias of one expert's linear_fc1 or linear_fc2"
                raise UserError(what, where="gradnorm", fix="freeze it, or train without gradient norms")
            kind = _kind(param, head_norm=head_norm, expert=expert, sequence_parallel=parallel.sequence_parallel)
            if kind is None and torch_norm and not parallel.sequence_parallel:
                kind = Kind.COPY
        if kind is None:
            raise UserError(
                f"the parameter {name!r} has no mark that says how its gradient is spread over ranks",
                where="gradnorm",
                fix="mark it as megatron-core does (tensor_model_parallel, or sequence_parallel), freeze it, or train "
                "without gradient norms",
            )
        tapped = id(param) in policy.tap.weights
        if expert and kind is not Kind.FROZEN and not tapped and parallel.block_size > 1:
            raise UserError(
                f"the gradient of {name!r} mixes samples of {parallel.block_size} replicas and cannot be tapped",
                where="gradnorm",
                fix="lower expert_model_parallel_size, or train without gradient norms",
            )
        if kind is Kind.PARTIAL and parallel.tp_size == 1:
            kind = Kind.COPY  # one rank holds the whole sum
        rules.append(
            Rule(
                name, param, kind, chunk=chunk, tapped=tapped, tied=tied and name in (EMBEDDING, OUTPUT), expert=expert
            )
        )
    return rules


def _kind(param: Parameter, *, head_norm: bool, expert: bool, sequence_parallel: bool) -> Kind | None:
    """The kind of a trainable parameter; None if its attributes do not determine one.

    Gradients that megatron averages over TP fit no kind. No supported model has any.
    """
    if getattr(param, "average_gradients_across_tp_domain", False) or not (expert or getattr(param, "allreduce", True)):
        return None
    if expert or getattr(param, "tensor_model_parallel", False):
        return Kind.SHARD  # an expert is sharded over expert-tensor-parallel ranks, even over one
    if head_norm:
        return Kind.PARTIAL
    over_tokens = getattr(param, "sequence_parallel", None)
    if over_tokens is None:
        return None
    return Kind.PARTIAL if over_tokens and sequence_parallel else Kind.COPY


def _parameters(chunks: Sequence[Module]) -> Iterator[tuple[int, str, Parameter, bool, bool]]:
    """Every parameter once: (chunk, name, parameter, whether it is a q or k norm's, whether a norm's of torch)."""
    seen: set[int] = set()
    for index, chunk in enumerate(chunks):
        head_norms = {
            id(param)
            for module in chunk.modules()
            for child in HEAD_NORMS
            if getattr(module, child, None) is not None
            for param in getattr(module, child).parameters()
        }
        torch_norms = {id(param) for norm in _norms_of_torch(chunk) for param in norm.parameters()}
        for name, param in chunk.named_parameters():
            if id(param) not in seen:
                seen.add(id(param))
                yield index, name, param, id(param) in head_norms, id(param) in torch_norms


def _norms_of_torch(chunk: Module) -> Iterator[Module]:
    return (module for module in chunk.modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm)))


@contextmanager
def untapped_aside(rules: Sequence[Rule]) -> Iterator[None]:
    """Move the accumulated gradient of untapped parameters out of `main_grad`, and add it back at the end.

    Inside, `main_grad` of an untapped parameter holds only the gradient of the current sample. After an exception it is
    what it was before.
    """
    grads = [rule.grad for rule in rules if not rule.tapped and rule.kind is not Kind.FROZEN]
    before = [grad.clone() for grad in grads]
    for grad in grads:
        grad.zero_()
    try:
        yield
    except BaseException:  # the caller may catch it and go on
        for grad, value in zip(grads, before, strict=True):
            grad.copy_(value)
        raise
    for grad, value in zip(grads, before, strict=True):
        grad.add_(value)
