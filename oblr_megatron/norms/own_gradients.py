"""`main_grad` for a model without megatron-core's data-parallel wrapper.

The passes read and write a parameter's `main_grad`, a view into one of the wrapper's buffers. `OwnGradients` has the
same attributes, and moves the sum to `.grad` when the pass is over. Half-precision weights get an fp32 `main_grad`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn

from oblr_megatron.model.moe import experts_of
from oblr_megatron.model.tapped import TappedModel


class Buffer(NamedTuple):
    """As megatron-core's `_ParamAndGradBuffer`."""

    grad_data: Tensor  # all gradients, flat
    param_index_map: dict[nn.Parameter, tuple[int, int, int]]  # parameter -> start, end, bucket


class OwnGradients(nn.Module):
    """Wraps a model chunk. Outside of `held` the parameters are untouched."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = DistributedDataParallelConfig()
        self.buffers: Any = []  # as in DistributedDataParallel, which also replaces nn.Module.buffers
        self.expert_parallel_buffers: list[Buffer] = []

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The model's forward."""
        return self.module(*inputs, **options)

    def set_is_first_microbatch(self) -> None:
        """Let Transformer Engine's layers round their FP8 weights again; megatron-core's schedule asks for it."""
        module: Any = self.module
        module.set_is_first_microbatch()

    def zero_grad_buffer(self) -> None:
        """Set every `main_grad` to zero."""
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            buffer.grad_data.zero_()

    @contextmanager
    def held(self, tapped: set[int], *, summed: bool) -> Iterator[None]:
        """Give every trainable parameter a `main_grad` of zero, which autograd adds to.

        Args:
            tapped: ids of the parameters that autograd leaves out.
            summed: whether the pass makes a sum of gradients, which is added to `.grad` at the end. Otherwise nothing
                is written to the `main_grad` of tapped parameters, and it takes no memory.
        """
        params = [param for param in self.module.parameters() if param.requires_grad]
        experts = experts_of(self.module)
        before = {param: param.grad for param in params}
        unwanted = set() if summed else tapped  # grouped experts hand zeros to autograd
        hooks = [
            param.register_post_accumulate_grad_hook(_drop if id(param) in unwanted else _to_main_grad)
            for param in params
        ]
        for param in params:
            param.grad = None
        try:
            self.buffers, self.expert_parallel_buffers = (
                [
                    *_buffers([param for param in own if summed or id(param) not in tapped], real=True),
                    *_buffers([param for param in own if not summed and id(param) in tapped], real=False),
                ]
                for own in ([p for p in params if p not in experts], [p for p in params if p in experts])
            )
            yield
            for param in params if summed else ():
                grad = param.main_grad.to(param.dtype)  # type: ignore[attr-defined]  # set by _buffers
                before[param] = grad.clone() if before[param] is None else before[param] + grad
        finally:
            for hook in hooks:
                hook.remove()
            for param in params:
                param.grad = before[param]
                param.__dict__.pop("main_grad", None)  # absent if the buffers did not fit
            self.buffers, self.expert_parallel_buffers = [], []


@contextmanager
def gradient_space(model: TappedModel, *, summed: bool) -> Iterator[None]:
    """`OwnGradients.held` of every chunk that has no data-parallel wrapper."""
    with ExitStack() as stack:
        for chunk in model.chunks:
            if isinstance(chunk, OwnGradients):
                stack.enter_context(chunk.held(model.tap.weights, summed=summed))
        yield


def _buffers(params: Sequence[nn.Parameter], *, real: bool) -> list[Buffer]:
    """Buffers of zeros with the parameters' `main_grad`, one for each dtype; without memory unless `real`."""
    buffers = []
    for dtype in dict.fromkeys(_dtype(param) for param in params):
        own = [param for param in params if _dtype(param) == dtype]
        ends = list(accumulate((param.numel() for param in own), initial=0))
        zero = torch.zeros(ends[-1] if real else 1, dtype=dtype, device=own[0].device)
        flat = zero if real else zero.expand(ends[-1])
        spans = dict(zip(own, pairwise(ends), strict=True))
        for param, (start, end) in spans.items():
            param.main_grad = flat[start:end].view(param.shape)  # type: ignore[attr-defined]
        buffers.append(Buffer(flat, {param: (*span, 0) for param, span in spans.items()}))
    return buffers


def _dtype(param: nn.Parameter) -> torch.dtype:
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


def _drop(param: Tensor) -> None:
    """Hook of autograd: the gradient of a tapped parameter, which is not wanted."""
    param.grad = None


def _to_main_grad(param: Tensor) -> None:
    """Hook of autograd: move a finished gradient, as megatron-core's wrapper does."""
    if param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None
