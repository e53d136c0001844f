"""Libraries that chat on the console: what they print is kept, and shown only if they fail."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from oblr_megatron.errors import RunError, UserError


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back standard output and standard error of the block, and logs below errors.

    An exception lets it out, other than those that say in one line what is wrong.
    """
    said = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with redirect_stdout(said), redirect_stderr(said):
            yield
    except (UserError, RunError):
        raise
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise
    finally:
        logging.disable(level)
