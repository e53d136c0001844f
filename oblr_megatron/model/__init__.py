"""The policy: a model on megatron-core, its parallel layout, its forward and backward passes, and its optimizer."""

import logging
import warnings

# At import megatron-core warns about optional packages (six times), its own defaults, and GPUs on a CPU.
# Users cannot act on these warnings, and other messages would be lost among them.
for _message in (
    ".*Apex (is|are) not installed.*",
    "full scope is deprecated.*",
    "When using async grad allreduce.*",
    "TypedStorage is deprecated.*",  # by which megatron-core frees its gradient buffers
    "MimoModelConfig is experimental.*",  # from 0.19 on; no part of a GPTModel
    "If you are using transformer_engine as the transformer implementation.*",  # about recomputing core_attn
):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
# torch 2.13 has new names for two collectives. megatron-core and we use the names that torch 2.11 also has.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated.*", category=FutureWarning)


def _drop(logger: str, start: str) -> None:
    """Drop the logger's messages that start so."""
    logging.getLogger(logger).addFilter(lambda record: not str(record.msg).startswith(start))


# megatron-core 0.19 imports this module of torch, which logs so on a machine with nvcc and without a GPU.
_drop("torch.utils.cpp_extension", "No CUDA runtime is found")
# 0.19 logs these at each model and each load. Both work as before: see docs/architecture.md.
_drop("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout")
_drop("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED")
_drop("megatron.core.dist_checkpointing.strategies.common", "load_common is deprecated")
