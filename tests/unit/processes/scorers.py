"""User reward functions that take one response, correct and faulty; the tests run them in worker processes."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np

NOT_A_FUNCTION = 3


def length_share(response: str, answer: str, prompt: str) -> float:
    """Uses all three arguments."""
    return len(response) / (len(answer) + len(prompt))


def as_numpy(response: str, answer: str, prompt: str) -> np.float32:
    return np.float32(0.5)


def ended_child(response: str, answer: str, prompt: str) -> float:
    """Start a program, terminate it, and return its exit status."""
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    return float(child.wait(5))


def mixed(response: str, answer: str, prompt: str) -> object:
    """Fail in the way named by the response."""
    if response == "raise":
        raise ValueError("no such answer")
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(1)
    if response == "crash":
        ctypes.string_at(0)
    if response == "sleep":
        time.sleep(60)
    if response == "spin":
        return float(10**9 ** len(str(10**9**2)) % 7)  # holds the interpreter lock without end
    if response == "memory":
        return float(len(bytearray(40 * 2**30)))
    if response == "print":
        print("noise on standard output")
        os.write(2, b"noise on standard error\n")
    return {
        "text": "five",
        "nan": float("nan"),
        "infinite": float("inf"),
        "huge": -sys.float_info.max,
        "none": None,
    }.get(response, 1)


def mixed_too(response: str, answer: str, prompt: str) -> object:
    """Like `mixed`, but "raise" gives 1 and "sleep" raises."""
    return 1 if response == "raise" else mixed("raise" if response == "sleep" else response, answer, prompt)


def process_id(response: str, answer: str, prompt: str) -> float:
    return float(os.getpid())


def half_reply(response: str, answer: str, prompt: str) -> None:
    """Send the length of a reply, as a worker does that is stopped in the middle of it."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.write(int(name), struct.pack("!i", 100))
    time.sleep(60)


def wait(seconds: str) -> float:
    time.sleep(float(seconds))
    return float(seconds)


def by_position(one: str, gold: str) -> float:
    return 0.0
