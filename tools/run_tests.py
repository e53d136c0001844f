"""The whole suite, in two halves side by side and the rest alone: `make test`.

    python tools/run_tests.py [what pytest takes for each part, e.g. -k norms]

A half that starts engines mostly waits for imports; the other computes. Tests marked `alone` look at the whole machine
(what lies in shared memory, which processes live), or want answers within a second of all cores; they come last, by
themselves. What failed is named once more at the end, because a log is often kept by its last lines only. The status is
0 when every part's is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's status when a selection leaves none
FAILURES = ("FAILED ", "ERROR ")  # how lines of pytest's short summary begin
COLUMNS = "200"  # the short summary cuts its reasons at the width of the terminal, 80 where there is none
HALVES = {
    "unit, distributed": ["tests", "--ignore=tests/e2e", "-m", "not alone"],
    "e2e": ["tests/e2e", "-m", "not alone"],
}
REST = {"alone": ["tests", "-m", "alone"]}


def run_parts(parts: dict[str, list[str]], arguments: Sequence[str], failures: list[str]) -> dict[str, int]:
    """Run pytest on each part at once; each line is printed under the part's name.

    Returns the statuses; the lines that name a failed test are appended to ``failures``.
    """
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", *selection, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"COLUMNS": COLUMNS},
        )
        for name, selection in parts.items()
    }
    readers = [threading.Thread(target=_echo, args=(*item, failures)) for item in started.items()]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return {name: process.wait() for name, process in started.items()}


def _echo(name: str, process: subprocess.Popen[str], failures: list[str]) -> None:
    assert process.stdout is not None, "its output is piped"
    for line in process.stdout:
        print(f"{name:>17} | {line.rstrip()}", flush=True)
        if line.startswith(FAILURES):
            failures.append(line.rstrip())


def main(arguments: Sequence[str]) -> int:
    """The first status that is no success, else 0."""
    begun = time.monotonic()
    failures: list[str] = []
    statuses = run_parts(HALVES, arguments, failures) | run_parts(REST, arguments, failures)
    failed = [f"{name} ended with status {status}" for name, status in statuses.items() if status not in (0, NO_TESTS)]
    for line in failures:
        print(line)
    print(f"{'; '.join(failed) or 'all tests passed'}, {(time.monotonic() - begun) / 60:.1f} min")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
