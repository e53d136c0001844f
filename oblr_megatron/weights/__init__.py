"""Weights between Megatron's layout and Hugging Face's: the name table and the streaming gather."""
