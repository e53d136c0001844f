"""User reward functions that start processes. Each writes its process ids to the file that the prompt names."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

HELPER = subprocess.Popen(["sleep", "600"])  # in the fork server, and in a process that imports this module
TOLD = 'echo $$ >> "$0"; exec sleep 600'


def start(how: str, told: Path) -> None:
    """Start a process that sleeps for ten minutes, and return at once."""
    if how == "program":
        subprocess.Popen(["sh", "-c", TOLD, str(told)])
    elif how == "fork":
        if os.fork() == 0:
            sleep_on(told)
    elif how == "double fork":
        if os.fork() == 0:
            if os.fork() == 0:
                sleep_on(told)
            os._exit(0)
    elif how == "daemon":
        twice = 'sh -c "$1" "$0" & sh -c "$1" "$0" & exit 0'
        subprocess.Popen(["sh", "-c", twice, str(told), TOLD], start_new_session=True).wait()
    elif how == "family":
        script = f"import os, subprocess, sys; os.setsid(); subprocess.run(['sh', '-c', {TOLD!r}, sys.argv[1]])"
        subprocess.Popen([sys.executable, "-c", script, str(told)])
    while not told.exists() or len(told.read_text().split()) < (2 if how == "daemon" else 1):
        time.sleep(0.01)


def sleep_on(told: Path) -> None:
    os.setsid()
    with told.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


def starts(response: str, answer: str, prompt: str) -> float:
    """Start something in the way that the response names; then do what the answer says."""
    start(response, Path(prompt))
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os._exit(1)
    if answer == "raise":
        raise ValueError("after the start")
    return 1.0


def forks(response: str, answer: str, prompt: str) -> float:
    """The child comes back from the call too, with another value."""
    if os.fork() == 0:
        return -1.0
    time.sleep(0.2)
    return float(response)


async def starts_async(response: str, answer: str, prompt: str) -> float:
    await asyncio.to_thread(start, response, Path(prompt))
    await asyncio.sleep(600 if answer == "hang" else 0)
    return 1.0


def echoes(response: str, answer: str, prompt: str) -> float:
    """Use programs, pipes and processes as one should."""
    said = subprocess.run(["cat"], input=response, capture_output=True, text=True, timeout=20, check=True).stdout
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(float, (said,))


def process_ids(response: str, answer: str, prompt: str) -> float:
    """Tell the process id of the worker."""
    Path(prompt).write_text(str(os.getpid()))
    return float(HELPER.pid)
