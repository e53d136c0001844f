"""The model on a CPU: the shim for megatron-core (shim.py), and operations and attention on torch's kernels.

from oblr_megatron.model import cpu

cpu.install()  # before the model is built; does nothing if CUDA is available
"""

from oblr_megatron.model.cpu.shim import cuda_type_names, install, installed, uninstall

__all__ = ["cuda_type_names", "install", "installed", "uninstall"]
