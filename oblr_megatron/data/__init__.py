"""From rows of a data set to microbatches: `rows` and `prompts` before the rollout, `packing` after it.

Imports neither megatron nor vLLM.
"""
