"""Processes of a run: launcher, signals, collectives with deadlines, command-line arguments."""
