"""The tokenizer of the tests of data."""

from tests.unit.data.conftest import _no_network, tokenizer

__all__ = ["_no_network", "tokenizer"]
