"""Weights between Megatron's layout and Hugging Face's: names, gathering, and transport to engines."""
