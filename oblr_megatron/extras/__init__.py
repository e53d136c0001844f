"""Optional parts, reached through `extension.py` alone: each may be deleted, and the rest runs without it.

planner/ (`plan`), quantize/ (`quantize`), cluster/ (the SLURM scripts' preflight and servers), gym/ (reasoning-gym),
mlflow.py and trackio.py (`log.trackers`).
"""
