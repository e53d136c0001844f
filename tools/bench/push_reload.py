"""`push.py`'s other engine: `python push_reload.py MODEL_DIR FILE` loads FILE into vLLM for each line it reads."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from push import spec_of
from safetensors.torch import load_file

from oblr_megatron.engine.core import EngineServer
from oblr_megatron.engine.plugin import register


def main(directory: str, file: str) -> None:
    """Say "ready", and "loaded" after every load."""
    register()
    server = EngineServer(spec_of(Path(directory), "engine 1"))
    print("\nready", flush=True)
    for _ in sys.stdin:
        server._llm.apply_model(partial(load, file))
        print("\nloaded", flush=True)


def load(file: str, model: Any) -> None:
    """What vLLM does with a checkpoint's file."""
    model.load_weights(load_file(file).items())


if __name__ == "__main__":
    main(*sys.argv[1:])
