"""Evaluation on held-out sets: sample responses, score them, save them, and compute accuracies with intervals."""
