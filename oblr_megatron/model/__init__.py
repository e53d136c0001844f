"""The policy: a Qwen3 on megatron-core, its parallel layout, its passes and its optimizer."""

import warnings

# megatron-core says at import, six times over, which optional packages it does without; and deprecates a default of its
# own. Neither is news to a user, and both would bury what is.
for _message in (".*Apex (is|are) not installed.*", "full scope is deprecated.*"):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
