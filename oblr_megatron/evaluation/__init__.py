"""Held-out accuracy: responses to benchmarks, their verdicts as files, and figures with intervals."""
