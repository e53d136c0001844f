"""Experiments about the algorithm itself (`oblr-megatron study`), on models small enough for hundreds of runs."""
