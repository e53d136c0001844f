"""The reloading engine of `push.py`: `python push_reload.py MODEL_DIR FILE` loads FILE into vLLM per line of input."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))  # an engine's environment leaves it out
from push import spec_of

from oblr_megatron.engine.core import EngineServer
from oblr_megatron.engine.plugin import register


def main(directory: str, file: str) -> None:
    """Print "ready", then "loaded" after every load."""
    register()
    server = EngineServer(spec_of(Path(directory), "engine 1"))
    print("\nready", flush=True)
    for _ in sys.stdin:
        server._llm.apply_model(partial(load, file))
        print("\nloaded", flush=True)


def load(file: str, model: Any) -> None:
    """Load a checkpoint's file as vLLM does."""
    model.load_weights(load_file(file).items())


if __name__ == "__main__":
    main(*sys.argv[1:])
