"""Tasks of the package reasoning-gym: rows (the sources "reasoning_gym:NAME") and scores (the reward "reasoning_gym").

Imports no torch at load.
"""
