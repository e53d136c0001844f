"""Hugging Face directories: checked, loaded, written."""
