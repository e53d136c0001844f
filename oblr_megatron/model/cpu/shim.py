"""A shim that lets megatron-core run on a machine without CUDA.

megatron-core asks for the current CUDA device, for `device="cuda"` and for CUDA's random state even if nothing else in
it needs a GPU. `install()` answers these calls with the CPU. It does nothing if CUDA is available, so that it cannot
hide an error on a GPU. `uninstall()` restores every original.

The random state is a separate generator that nothing draws from: weights are loaded and dropout is 0. torch's global
CPU generator is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any

import torch

_CPU = torch.device("cpu")


class Replacements:
    """Attributes of modules, classes and instances that are replaced until `restore`."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the owner itself."""
        if name in vars(owner):
            self.undo.append(partial(setattr, owner, name, vars(owner)[name]))
        else:
            self.undo.append(partial(delattr, owner, name))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Restore the originals, the last one first."""
        while self.undo:
            self.undo.pop()()


_SHIM = Replacements()


def install() -> bool:
    """Install the shim. Returns False and changes nothing if CUDA is available. Safe to call twice."""
    if torch.cuda.is_available():
        return False
    if not _SHIM.undo:
        _replace_device()
        _replace_random_state()
        _replace_rotary()
        _replace_experts()
        _replace_optimizer()
    return True


def uninstall() -> None:
    """Restore every attribute that `install()` replaced."""
    _SHIM.restore()


def installed() -> bool:
    """Whether the shim is installed."""
    return bool(_SHIM.undo)


class _TorchOnCpu:
    """Replaces `torch` in four megatron-core modules: its factory functions read "cuda" as the CPU, unpinned.

    Replacing `torch.zeros` itself would break other modules: `torch.device` as a context recognises factory functions
    by identity, and transformers loads its models inside such a context.
    """

    _FACTORIES = ("zeros", "ones", "tensor")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_cpu(value) if name in self._FACTORIES else value


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _replace_device() -> None:
    """Make the CPU the current device, and synchronization a no-op."""
    import megatron.core.models.common.embeddings.rope_utils as megatron_rope
    import megatron.core.optimizer.optimizer as megatron_optimizer
    import megatron.core.pipeline_parallel.schedules as megatron_schedules
    import megatron.core.transformer.utils as megatron_utils

    _SHIM.replace(torch.cuda, "current_device", lambda: _CPU)
    _SHIM.replace(torch.cuda, "synchronize", lambda device=None: None)
    _SHIM.replace(torch.cuda, "current_stream", lambda device=None: None)  # 0.19 asks before each reduction
    _SHIM.replace(torch.Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor)
    for module in (megatron_optimizer, megatron_rope, megatron_schedules, megatron_utils):
        _SHIM.replace(module, "torch", _TorchOnCpu())


def _replace_random_state() -> None:
    """Let megatron's tracker and recomputation save and restore the state of a generator that nothing draws from."""
    import megatron.core.tensor_parallel.random as megatron_random

    generator = torch.Generator(_CPU)

    def get_state(device: Any = None) -> torch.Tensor:
        return generator.get_state()

    def set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        generator.set_state(state)

    _SHIM.replace(torch.cuda, "get_rng_state", get_state)
    _SHIM.replace(torch.cuda.random, "get_rng_state", get_state)
    _SHIM.replace(torch.cuda, "manual_seed", generator.manual_seed)
    # Not torch.cuda.set_rng_state: megatron queues each call until CUDA is initialised, so the queue would grow.
    _SHIM.replace(megatron_random, "_set_cuda_rng_state", set_state)
    # For fp8=False, output-discarding recomputation asks Transformer Engine about FP8.
    checkpoint = megatron_random.CheckpointWithoutOutput
    _SHIM.replace(checkpoint, "__init__", partialmethod(checkpoint.__init__, fp8=None))


def _replace_rotary() -> None:
    """Turn queries and keys by `operations.apply_rotary`."""
    import megatron.core.models.common.embeddings.rope_utils as megatron_rope

    from oblr_megatron.model.cpu.operations import apply_rotary

    name = "_apply_rotary_pos_emb_bshd"
    _SHIM.replace(megatron_rope, name, partial(apply_rotary, getattr(megatron_rope, name)))


def _replace_experts() -> None:
    """Let a mixture of experts run without Transformer Engine, CUDA streams and NCCL.

    The router reads the name of Transformer Engine's matrix product, which is unbound if that is not installed. The
    dispatcher copies token counts to the host in a separate stream. gloo gathers only tensors of equal size.
    """
    import megatron.core.tensor_parallel.mappings as megatron_mappings
    import megatron.core.transformer.moe.moe_utils as megatron_moe
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def counts_to_host(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(dispatcher, name)
            setattr(dispatcher, name, counts.numpy() if isinstance(counts, torch.Tensor) else counts)
        return tokens_per_expert

    gather = megatron_mappings._gather_along_first_dim
    _SHIM.replace(megatron_moe, "te_general_gemm", None)
    _SHIM.replace(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object())  # must exist; nothing uses it
    _SHIM.replace(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", counts_to_host)
    _SHIM.replace(megatron_mappings, "_gather_along_first_dim", partial(_gather, gather))


def _replace_optimizer() -> None:
    """Update weights by torch, as without Transformer Engine and apex: their kernels need CUDA."""
    import megatron.core.optimizer as megatron_optimizers
    import megatron.core.optimizer.clip_grads as megatron_clipping
    import megatron.core.optimizer.distrib_optimizer as megatron_distributed
    import megatron.core.optimizer.optimizer as megatron_optimizer
    from megatron.core import utils

    local = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
    }
    replaced: dict[Any, dict[str, Any]] = {
        megatron_optimizers: {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True},
        megatron_distributed: {
            "Adam": torch.optim.Adam,
            "HAVE_APEX_OR_TE": False,
            "USING_TE_OPTIMIZER": False,
            "USING_APEX_OPTIMIZER": False,
        },
        megatron_optimizer: local,
        megatron_clipping: local | {"l2_norm_impl": utils.local_multi_tensor_l2_norm},
    }
    if hasattr(megatron_clipping, "multi_tensor_scale_tensor_impl"):  # from 0.19 on
        replaced[megatron_clipping]["multi_tensor_scale_tensor_impl"] = None
    for module, values in replaced.items():
        for name, value in values.items():
            _SHIM.replace(module, name, value)


def _gather(
    original: Callable[..., torch.Tensor], input_: torch.Tensor, group: Any, sizes: Any = None, *rest: Any
) -> Any:
    """All-gather rows, sizes[r] of them from rank r; padded to equal size for the exchange."""
    if sizes is None or group.size() == 1:
        return original(input_, group, sizes, *rest)
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Make CPU tensors report the CUDA name of their type, while megatron-core sorts parameters by type name.

    Its mixed-precision optimizer recognises bf16 weights only by 'torch.cuda.BFloat16Tensor'. Does nothing unless the
    shim is installed.
    """
    if not _SHIM.undo:
        yield
        return
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(tensor, dtype, **kwargs)
        return original(tensor).replace("torch.", "torch.cuda.")

    renamed = Replacements()
    renamed.replace(torch.Tensor, "type", type_name)
    try:
        yield
    finally:
        renamed.restore()
