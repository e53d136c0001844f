"""Checkpoints of runs, and Hugging Face directories: check, load, save, convert, resume."""

import oblr_megatron.model as _model  # noqa: F401  silences what megatron-core says at import; imports nothing else
