"""The policy: a model on megatron-core, its parallel layout, its forward and backward passes, and its optimizer."""

import logging
import warnings

# At import megatron-core warns about optional packages (six times), its own defaults, and GPUs on a CPU.
# Users cannot act on these warnings, and other messages would be lost among them.
for _message in (
    ".*Apex (is|are) not installed.*",
    "full scope is deprecated.*",
    "When using async grad allreduce.*",
    "MimoModelConfig is experimental.*",  # from 0.19 on; no part of a GPTModel
):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
# megatron-core 0.19 imports this module of torch, which logs so on a machine with nvcc and without a GPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not str(record.msg).startswith("No CUDA runtime is found")
)
