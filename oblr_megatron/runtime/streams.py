"""Standard output and error that outlast their reader: a closed pipe or terminal ends no run, nor does a full disk."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

from oblr_megatron.errors import NO_SPACE

GONE = (errno.EPIPE, errno.EIO)  # a pipe, a terminal
STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by their numbers


class LastingFile(io.FileIO):
    """A descriptor that becomes /dev/null when its reader goes away, also for what other code writes to it.

    What does not fit on a full disk is dropped, because the metrics, which are kept, say the same.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in NO_SPACE:
                return memoryview(data).nbytes
            if error.errno not in GONE:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def outlast_readers() -> None:
    """Make this process's own streams lasting, and escape characters that their encoding lacks.

    Streams that a caller in Python has replaced stay, because they are his.
    """
    _open_closed()
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        with suppress(OSError):  # it flushes, which some streams of a caller in Python cannot
            stream.reconfigure(errors="backslashreplace")
        if stream is not getattr(sys, f"__{name}__"):
            continue
        with suppress(OSError):  # the reader has gone already
            stream.flush()
        raw = LastingFile(stream.fileno(), "w", closefd=False)
        file = raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw)  # PYTHONUNBUFFERED
        options: Any = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        lasting = io.TextIOWrapper(file, stream.encoding, "backslashreplace", **options)
        setattr(sys, name, lasting)
        setattr(sys, f"__{name}__", lasting)


def _open_closed() -> None:
    """Open /dev/null where standard descriptors are closed (`>&-`); the next file would get their number."""
    while (null := os.open(os.devnull, os.O_RDWR)) < len(STANDARD):
        os.set_inheritable(null, True)
    os.close(null)
    for number, (name, mode) in enumerate(STANDARD):
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  open as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
