"""The first code of a rank, before any heavy import: `python -m oblr_megatron.runtime.rank [-m] TARGET [arguments]`.

The launcher starts every rank through this module. A rank that imports torch for seconds could otherwise outlive a
launcher that was killed meanwhile, and wait for a rendezvous that no longer exists.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from oblr_megatron.errors import EXIT_SIGNAL
from oblr_megatron.runtime.processes import SAFE_PATH, die_with_launcher, directory_last


def main() -> None:
    """Tie this process to its launcher, then run the target as `python` would."""
    die_with_launcher()
    directory_last()
    for name, value in SAFE_PATH.items():  # programs that a user's code starts are not ours
        if os.environ.get(name) == value:
            del os.environ[name]
    arguments = sys.argv[1:]
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:  # during the imports; the launcher prints the line
        sys.exit(EXIT_SIGNAL + signal.SIGINT)


if __name__ == "__main__":
    main()
