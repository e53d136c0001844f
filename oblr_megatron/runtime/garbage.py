"""Imports without garbage collection: Python would look through a growing heap again and again, and free nothing.

The modules of vLLM and the trainer make very many objects, which nearly all stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, cycles of objects are not freed; afterwards collection is as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
