"""The policy: a Qwen3 on megatron-core, its parallel layout, its passes and its optimizer."""
