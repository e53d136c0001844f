"""The model on a CPU: the shim for megatron-core (shim.py), and operations and attention on torch's kernels.

from oblr_megatron.model import cpu

cpu.install()  # before the model is built; does nothing if CUDA is available
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from oblr_megatron.model.cpu.shim import cuda_type_names, install, installed, uninstall

META = torch.device("meta")

__all__ = ["META", "cuda_type_names", "install", "installed", "on_meta", "uninstall", "without_gpus"]


@contextmanager
def without_gpus() -> Iterator[None]:
    """megatron-core as on a CPU. With GPUs it would hold memory of one, and set a random state for each weight."""
    before, available = installed(), torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield  # `initialize` installs the shim
    finally:
        torch.cuda.is_available = available
        if not before:
            uninstall()


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors on the meta device, also where megatron-core asks for the current CUDA device. In `without_gpus`.

    The shim has made `Tensor.cuda` the identity.
    """
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: META  # type: ignore[assignment, return-value]
    try:
        with META:
            yield
    finally:
        torch.cuda.current_device = current
