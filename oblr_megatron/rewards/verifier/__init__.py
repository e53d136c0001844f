"""Exact comparison of mathematical answers."""
