"""The policy: Qwen3 on megatron-core, its parallel layout, its forward and backward passes, and its optimizer."""

import warnings

# At import megatron-core warns about optional packages (six times), about its own defaults, and about GPUs on a CPU.
# Users cannot act on these warnings, and other messages would be lost among them.
for _message in (
    ".*Apex (is|are) not installed.*",
    "full scope is deprecated.*",
    "When using async grad allreduce.*",
    "MimoModelConfig is experimental.*",  # from 0.19 on; no part of a GPTModel
):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
