"""Libraries that chat on the console: what they print is kept, and shown only if they fail."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back standard output and standard error of the block, and logs below errors; an exception lets it out."""
    said = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with redirect_stdout(said), redirect_stderr(said):
            yield
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise
    finally:
        logging.disable(level)
