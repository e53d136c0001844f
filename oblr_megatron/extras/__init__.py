"""Optional parts, reached through `extension.py` alone: each may be deleted, and the rest runs without it.

planner/ (`plan`), quantize/ (`quantize`), cluster/ (the SLURM scripts' preflight and servers), exact_sums/
(`model.batch_invariant`), gym/ (reasoning-gym), speculation/
(`rollout.speculation`), mlflow.py and trackio.py (`log.trackers`).
"""
