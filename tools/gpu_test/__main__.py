"""The command line of the table: see the package."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from oblr_megatron.errors import EXIT_OK, EXIT_RUN, EXIT_USER, UserError
from oblr_megatron.runtime.command_line import Parser
from tools.gpu_test import results, runner
from tools.gpu_test.line import Line
from tools.gpu_test.lines import LINES, PROBE
from tools.gpu_test.results import BAD, REHEARSED, Outcome

STYLES = {"ok": "green", "not met": "red", "failed": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lines; returns 0, 1 if one failed or did not meet its expectation, or 2 for bad input."""
    console = Console()
    try:
        options = parse(arguments)
        if options.list:
            show_lines(console)
            return EXIT_OK
        earlier = prepare(options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    chosen = [LINES[name] for name in options.lines or LINES]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's limit
    try:
        outcomes = run_lines(chosen, earlier, options.out, rehearse=options.rehearse, console=console)
    finally:
        signal.signal(signal.SIGTERM, before)
    if not outcomes:
        console.print("interrupted before the first line")
        return EXIT_RUN
    show(outcomes, console)
    console.print(f"wrote {options.out / 'gpu.json'} and {options.out / 'gpu.md'}", highlight=False)
    done = len(outcomes) == len(chosen)
    return EXIT_OK if done and not any(one.verdict in BAD for one in outcomes) else EXIT_RUN


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: an option is wrong, or a line does not exist.
    """
    parser = Parser(
        prog="python -m tools.gpu_test", description="Measure on this machine's GPUs, and compare with expectations."
    )
    parser.add_argument("--lines", nargs="+", metavar="LINE", help="only these (default: all)")
    parser.add_argument(
        "--out", type=Path, default=Path("run/gpu"), metavar="DIR", help="add the results to those here"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes; nothing is judged")
    parser.add_argument("--list", action="store_true", help="print the lines and end")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.lines or () if name not in LINES]
    if unknown:
        raise UserError(f"there is no line {unknown[0]!r}", where="--lines", fix=f"use {', '.join(LINES)}")
    if options.rehearse and options.out == Path("run/gpu"):
        options.out = Path("run/gpu_rehearsal")  # the results of a GPU stay as they are
    return options


def prepare(directory: Path) -> dict[str, Outcome]:
    """Make the directory of the results, and read those of earlier calls.

    Raises:
        UserError: it cannot be written, or its file is not ours.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".writable").touch()
        (directory / ".writable").unlink()
    except OSError as error:
        what = f"cannot write there: {error.strerror}"
        raise UserError(what, where=f"--out {directory}", fix="choose another directory") from error
    return results.load(directory / "gpu.json")


def run_lines(
    chosen: Sequence[Line], earlier: dict[str, Outcome], out: Path, *, rehearse: bool, console: Console
) -> list[Outcome]:
    """Run the lines in turn, and write the results after each.

    Ctrl-C or SIGTERM ends the line that runs, with its figures so far. The rest is left out.
    """
    what = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: list[Outcome] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("examining this machine", total=len(chosen))
        probe = runner.run(PROBE, out / "logs" / "probe.log", rehearse=rehearse, beat=progress.refresh)
        if probe.failure == runner.INTERRUPTED:
            return found
        for line in chosen:
            progress.update(task, description=f"{line.name} {line.title}, at most {line.minutes:g} min")
            outcome = run_line(line, probe.figures, out, rehearse=rehearse, progress=progress)
            found.append(outcome)
            earlier[line.name] = outcome
            results.write(out, earlier, LINES)
            progress.advance(task)
            text = f"{line.name:>3} {line.title}: {results.verdict_of(outcome)} ({outcome.seconds:.0f} s)"
            progress.console.print(text, highlight=False, markup=False)
            if outcome.why == runner.INTERRUPTED:
                break
    return found


def run_line(line: Line, missing: dict[str, float | str], out: Path, *, rehearse: bool, progress: Progress) -> Outcome:
    """The outcome of one line."""
    date, machine = datetime.now(UTC).date().isoformat(), str(missing.get("machine", "not examined"))
    lacks = [] if rehearse else line.lacks(missing)
    if lacks:
        return Outcome.of(line, "lacks", "; ".join(lacks), date=date, machine=machine)
    log = out / "logs" / f"line_{line.name}.log"
    done = runner.run(line, log, rehearse=rehearse, beat=progress.refresh)
    verdict, why = (REHEARSED, "") if rehearse else line.judge(done.figures)
    if done.failure:
        verdict, why = "failed", done.failure
    expected = list(map(str, line.bounds))
    return Outcome(line.name, line.title, expected, verdict, why, done.figures, round(done.seconds, 1), date, machine)


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a short table of this call's lines."""
    table = Table("line", "what", "seen", "verdict", title="GPU test")
    for one in outcomes:
        style = STYLES.get(one.verdict, "")
        table.add_row(one.name, one.title, results.seen(one, LINES), results.verdict_of(one), style=style)
    console.print(table, markup=False)


def show_lines(console: Console) -> None:
    """Print the whole table of lines."""
    table = Table("line", "what", "needs", "expected", "minutes")
    for line in LINES.values():
        bounds = "\n".join(map(str, line.bounds))
        table.add_row(line.name, line.title, ", ".join(line.needs), bounds, f"{line.minutes:g}")
    console.print(table, markup=False)


if __name__ == "__main__":
    sys.exit(main())
