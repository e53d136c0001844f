"""Sampling responses: vLLM engines in processes of their own, behind one protocol."""
