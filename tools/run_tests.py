"""Run one tier of the tests: `make check`, `make test` and `make test-all` call this.

    python tools/run_tests.py {check,test,all} [further arguments of pytest, e.g. -k norms]

Tests marked `alone` run first, without company: they look at the whole machine (shared memory, living processes) or
need an answer within a second. Then three workers of pytest-xdist share the files: more than the two cores, because
tests often wait. A failed test is named at once, and again at the end, because the last lines of a log are often all
that is kept. The slowest files are named as well: CI has a limit. mypy checks the types at the same time, mostly while
the first tests wait. The exit status is 0 when at least one test ran, every test passed and the types are right.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
QUIET = ["-q", "-o", "console_output_style=classic"]  # this module shows the progress
NIGHTLY_MODULE = "pytestmark = [pytest.mark.nightly"  # all its tests are nightly
LINE_S = 30.0  # between two lines of progress where there is no terminal


@dataclass(frozen=True)
class Tier:
    """`minutes` are measured (CONTRIBUTING.md); `paths` with long tests come first, so that no worker ends late."""

    what: str
    minutes: str
    paths: Sequence[str]
    left_out: str = ""

    def parts(self) -> list[list[str]]:
        """The arguments of each call of pytest."""
        others = f" and not ({self.left_out})" if self.left_out else ""
        together = [*self.paths, "-m", f"not alone{others}", *WORKERS]
        if "alone" in self.left_out:
            return [together]
        files = (file for path in self.paths for file in sorted((ROOT / path).rglob("test_*.py")))
        texts = ((str(file), file.read_text(encoding="utf-8")) for file in files)
        marked = [
            file for file, text in texts if "mark.alone" in text and not (self.left_out and NIGHTLY_MODULE in text)
        ]
        return [[*marked, "-m", f"alone{others}"], together]


ALL = ("tests/e2e", "tests/distributed", "tests/sim_cuda", "tests/gpu", "tests/unit")
TIERS = {
    "check": Tier("fast unit tests", "3 to 6", ["tests/unit"], "slow or nightly or alone"),
    "test": Tier("unit tests, parallel layouts on 1 to 4 ranks, whole runs with vLLM", "15 to 30", ALL, "nightly"),
    "all": Tier("`make test`, soaks, kills, benchmarks, preset dry runs, big conversions", "90", ALL),
}


class Report:
    """A pytest plugin: counts tests for the progress bar, keeps a line for each failure, adds up seconds by file."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self.failures: list[str] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._progress, self._console = progress, console
        self._total = self.done = 0
        self._task: TaskID = progress.add_task("collecting", total=None)
        self._line_due = time.monotonic() + LINE_S

    def start(self) -> None:
        """Begin another call of pytest; its tests add to the total."""
        self._before = self._total

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(len(session.items))

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._expect(len(ids))

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letter for a test that passed: the bar moves instead."""
        return ("passed" if report.when == "call" else "", "", "PASSED") if report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self.failures.append(f"FAILED {report.nodeid} ({report.when}): {_last_line(report)}")
            self._console.print(self.failures[-1], markup=False)
        if report.when == "teardown":
            self.done += 1
            self._show()

    def _expect(self, tests: int) -> None:
        self._total = self._before + tests
        self._show()

    def _show(self) -> None:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        self._progress.update(self._task, completed=self.done, total=self._total, description=f"tests{failed}")
        if not self._console.is_terminal and time.monotonic() > self._line_due:
            self._line_due = time.monotonic() + LINE_S
            self._console.print(f"{self.done} of {self._total} tests{failed}")


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).strip().splitlines()[0][:200]


def run(tier: Tier, arguments: Sequence[str]) -> int:
    """1 when a test or the types failed or pytest could not run, else 0."""
    begun, console = time.monotonic(), Console(file=os.fdopen(os.dup(1), "w"))  # pytest captures descriptor 1
    mypy = [sys.executable, "-m", "mypy"]
    types = subprocess.Popen(["nice", *mypy], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    statuses = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        report = Report(progress, console)
        for part in tier.parts():
            report.start()
            statuses.append(pytest.main([*QUIET, *part, *arguments], plugins=[report]))
            if statuses[-1] == pytest.ExitCode.INTERRUPTED:
                break
    files = nlargest(30, report.seconds.items(), key=itemgetter(1))
    slowest = (f"{file.removeprefix('tests/')} {seconds:.0f} s" for file, seconds in files)
    print("slowest files:", ", ".join(slowest))
    for line in report.failures:
        print(line)
    print(types.communicate()[0], end="")
    good = report.done and all(one in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) for one in statuses)
    result = "not all tests passed" if not good else "wrong types" if types.returncode else "all tests passed"
    print(f"{result}, {(time.monotonic() - begun) / 60:.1f} min")
    return 0 if good and not types.returncode else 1


def main(given: Sequence[str]) -> int:
    """Announce the tier, and run it from the repository's root."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tier", choices=TIERS)
    options, arguments = parser.parse_known_args(given)
    tier = TIERS[options.tier]
    print(f"{tier.what}: about {tier.minutes} minutes on 2 cores", flush=True)
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of a hundred commands compiles the package again
    return run(tier, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
