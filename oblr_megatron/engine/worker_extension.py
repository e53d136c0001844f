"""What a vLLM worker in an API server can be asked beside vLLM's own methods (its option --worker-extension-cls)."""

from __future__ import annotations

from typing import Any

from oblr_megatron.weights.verify import Digests, read_back


class ReadBack:
    """Mixed into vLLM's worker class; the method's name is what the server calls."""

    model_runner: Any

    def oblr_read_back(self) -> Digests:
        """Digests of the weights that are in place; see `weights.verify`."""
        return read_back(self.model_runner.get_model())
