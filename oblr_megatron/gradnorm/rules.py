"""What a rank's gradient of a parameter is, decided once for every parameter before anything is measured.

| a rank's gradient is                    | kind       | before squaring | counted on      |
|-----------------------------------------|------------|-----------------|-----------------|
| a shard of its own                      | SHARD      | -               | every TP rank   |
| one summand of the whole                | PARTIAL    | sum over TP     | TP rank 0       |
| a copy of the whole, equal on all ranks | COPY       | -               | TP rank 0       |
| absent                                  | FROZEN     | -               | nowhere         |

Under context parallelism each of these is, moreover, a summand over the ranks that share the sequence. An expert's is a
shard that has seen the tokens of every replica in its block (`Parallel.block_group`), and a summand only where expert
parallelism does not span the ranks that share a sample.

The evidence is what megatron-core puts on its parameters, and reads itself when it reduces gradients
(`finalize_model_grads`) and when it measures their norm (`get_main_grads_for_grad_norm`): `tensor_model_parallel` on
column and row weights, column biases, embedding and head; `sequence_parallel`, true or false, on norms, routers and row
biases. The norms of queries and keys are partials over heads, with sequence parallelism or without: every rank
normalises its own heads with the same weight. A parameter that carries no such mark may be anything, so it is refused
by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    from oblr_megatron.model.qwen3 import Policy

HEAD_NORMS = ("q_layernorm", "k_layernorm")  # children of megatron's attention modules, applied to the rank's own heads
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
EXPERT = ".experts."


class Kind(Enum):
    """How the gradient of a parameter is spread over the tensor-parallel ranks."""

    SHARD = "a shard of its own"
    PARTIAL = "one summand of the whole"
    COPY = "a copy of the whole"
    FROZEN = "absent"


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One parameter of this rank.

    Example: Rule("decoder.layers.0.self_attention.q_layernorm.weight", parameter, Kind.PARTIAL)
    """

    name: str  # inside the chunk's module
    param: Parameter
    kind: Kind
    chunk: int = 0  # model chunk of this rank
    tapped: bool = True  # its gradient goes to the sink (model/taps.py), not to main_grad
    tied: bool = False  # embedding and output layer in one, or one of two copies of that
    expert: bool = False

    @property
    def grad(self) -> Tensor:
        """The view of megatron's gradient buffer that this parameter's gradients are added to."""
        return self.param.main_grad  # type: ignore[attr-defined]  # set by megatron's data-parallel wrapper


def classify(policy: Policy) -> list[Rule]:
    """The rule of every parameter of this rank.

    Raises:
        UserError: a trainable parameter that no rule covers.
    """
    parallel, tied = policy.parallel, policy.hf_config.tie_word_embeddings
    rules = []
    for chunk, name, param, head_norm in _parameters([chunk.module for chunk in policy.chunks]):
        expert = EXPERT in name
        kind: Kind | None = Kind.FROZEN
        if param.requires_grad:
            kind = _kind(param, head_norm=head_norm, expert=expert, sequence_parallel=parallel.sequence_parallel)
        if kind is None:
            raise UserError(
                f"no rule says how the gradient of {name!r} is spread over ranks",
                where="gradnorm",
                fix="freeze the parameter, or choose a baseline that needs no gradient norms",
            )
        tapped = id(param) in policy.tap.weights
        if expert and kind is not Kind.FROZEN and not tapped and parallel.block_size > 1:
            raise UserError(
                f"the gradient of {name!r} mixes samples of {parallel.block_size} replicas, and its factors are out of "
                "reach",
                where="gradnorm",
                fix="lower parallel.expert_model_parallel_size, or choose a baseline that needs no gradient norms",
            )
        if kind is Kind.PARTIAL and parallel.tp_size == 1:
            kind = Kind.COPY  # the only summand is the whole
        rules.append(
            Rule(
                name,
                param,
                kind,
                chunk=chunk,
                tapped=tapped,
                tied=tied and name in (EMBEDDING, OUTPUT),
                expert=expert,
            )
        )
    return rules


def _kind(param: Parameter, *, head_norm: bool, expert: bool, sequence_parallel: bool) -> Kind | None:
    """The kind of a trainable parameter, None where there is no evidence.

    A parameter whose gradient megatron averages over TP is neither a partial nor a copy; none occurs in a Qwen3.
    """
    if getattr(param, "average_gradients_across_tp_domain", False) or not (expert or getattr(param, "allreduce", True)):
        return None
    if expert or getattr(param, "tensor_model_parallel", False):
        return Kind.SHARD  # an expert's: of the expert-tensor-parallel ranks, however few
    if head_norm:
        return Kind.PARTIAL
    over_tokens = getattr(param, "sequence_parallel", None)
    if over_tokens is None:
        return None
    return Kind.PARTIAL if over_tokens and sequence_parallel else Kind.COPY


def _parameters(chunks: list[Module]) -> Iterator[tuple[int, str, Parameter, bool]]:
    """Every parameter once: its chunk, its name, itself, whether it belongs to a norm of queries or keys."""
    seen: set[int] = set()
    for index, chunk in enumerate(chunks):
        head_norms = {
            id(param)
            for module in chunk.modules()
            for child in HEAD_NORMS
            if getattr(module, child, None) is not None
            for param in getattr(module, child).parameters()
        }
        for name, param in chunk.named_parameters():
            if id(param) not in seen:
                seen.add(id(param))
                yield index, name, param, id(param) in head_norms
