"""Checkpoints of runs, and Hugging Face directories: check, load, save, convert, resume."""
