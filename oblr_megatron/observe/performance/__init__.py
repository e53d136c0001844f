"""Costs of a run: FLOPs, devices, seconds and memory of every rank, profiles."""
