"""The policy: a Qwen3 on megatron-core, its parallel layout, its passes and its optimizer."""

import warnings

# megatron-core says at import, six times over, which optional packages it does without, deprecates a default of its own
# and gives advice for GPUs on a CPU. None of it is news to a user, and it would bury what is.
for _message in (".*Apex (is|are) not installed.*", "full scope is deprecated.*", "When using async grad allreduce.*"):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
