"""OBLR-PO post-training of Qwen3 on megatron-core with vLLM rollouts."""

__version__ = "0.1.0"
