"""Data set rows -> prompts (before the rollout); samples -> microbatches (after it). Imports neither megatron nor vLLM.

sources.py -> rows.py -> template.py, prompt_set.py -> training.py, prompts.py     packing.py
"""
