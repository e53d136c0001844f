"""From rows of a data set to microbatches: `prompts` before the rollout, `packing` after it. Neither megatron nor vLLM."""
