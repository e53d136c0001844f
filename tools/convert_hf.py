"""Convert between Hugging Face directories and Megatron checkpoints, on a cluster's login or CPU node.

    python tools/convert_hf.py to-megatron Qwen3-8B qwen3_8b --check
    python tools/convert_hf.py to-hf run/checkpoints hf

Same as `oblr-megatron convert`, but needs no GPU, no vLLM and no installed package. See docs/convert.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package may not be installed

from oblr_megatron.checkpoint.convert_command import add_arguments
from oblr_megatron.runtime.command_line import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    return guarded(lambda: options.function(options))


if __name__ == "__main__":
    sys.exit(main())
