"""Measurements that end in every way, for the tests of the runner. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tools.gpu_test.report import Report

HERE = "tests.unit.tools.gpu_lines"

NOTHING_IS_ENDLESS_S = 600


def fine(report: Report, value: float = 1.0) -> None:
    report.put("value", value)
    report.put("value", value + 1)
    report.put("text", "some")


def raises(report: Report) -> None:
    report.put("value", 1.0)
    raise LookupError("nothing\nhere")


def crashes(report: Report) -> None:
    report.put("value", 1.0)
    os.abort()


def hangs(report: Report) -> None:
    """With a process in a session of its own, as torchrun's ranks are."""
    sleep = f"import time; time.sleep({NOTHING_IS_ENDLESS_S})"
    child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    report.put("child", str(child.pid))
    print("reported", child.pid, flush=True)
    time.sleep(NOTHING_IS_ENDLESS_S)


def probe(report: Report, missing: str = "") -> None:
    report.put("machine", "a machine")
    report.put("CUDA", missing)


def main(out: str) -> int:
    """The command with a line that ends, one that hangs, and a third."""
    from tools.gpu_test import __main__ as command
    from tools.gpu_test import runner
    from tools.gpu_test.line import Line

    names = ("fine", "hangs", "fine")
    lines = {str(n): Line(name=str(n), title="a line", measure=f"{HERE}:{name}") for n, name in enumerate(names, 1)}
    command.LINES, command.PROBE = lines, Line(name="probe", title="a line", measure=f"{HERE}:probe")
    runner.GRACE_S = 1.0
    return command.main(["--out", out])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
