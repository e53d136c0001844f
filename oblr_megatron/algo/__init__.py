"""The algorithm as pure tensor functions: baselines, loss, signal-to-noise estimates, learning-rate schedules.

Nothing here knows of megatron, vLLM or torch.distributed; every function can be tried in a Python prompt.
"""
