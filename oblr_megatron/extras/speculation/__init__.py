"""`rollout.speculation`: engines draft tokens for the tail of a rollout, without a change of any draw.

options.py     vLLM's options, and the batch size up to which drafts pay
scheduler.py   vLLM's scheduler, which verifies drafts only where they pay
draws.py       verification with the noise that sampling without drafts would use
"""
