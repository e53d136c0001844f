"""The algorithm as pure tensor functions: baselines, loss, signal-to-noise estimates and learning-rate schedules.

No module here uses megatron, vLLM or torch.distributed, so that every function runs in a Python prompt.
"""
