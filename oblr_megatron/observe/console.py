"""Shows a run's progress: a live display on a terminal, one plain line per step elsewhere.

    with open_display(config.log, config.num_steps, rank=parallel.rank) as display:
        timer = PhaseTimer(on_phase=display.phase)
        ...
        display.step(step, record)

Plain lines read
    starting 1 engine (log: run/logs/engine-*.log), 10 s
    reward: mean reward of all responses sampled for the step | len: mean response length, ... | ...
    step 12/150  reward 0.53  len 6.1  lr 8.1e-4  shrink 0.42  crit 310  grad 0.31  diff 2e-6  2.1 s
    eval at step 50  sums accuracy 0.81  mean@k 0.79  pass@k 0.90
    finished 150 of 150 steps in 5 min 12 s  sums accuracy 0.45 -> 0.93
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from oblr_megatron.checks.packages import installed_version
from oblr_megatron.checks.run_dir import CONFIG_FILE, ROLLOUTS
from oblr_megatron.formatting import duration, fixed, number, scientific
from oblr_megatron.metrics import describe
from oblr_megatron.runtime.run_lock import repeated

if TYPE_CHECKING:
    from oblr_megatron.config import Config, LogConfig

Values = Mapping[str, float | None]

BLOCKS = "▁▂▃▄▅▆▇█"
HISTORY = 32  # steps in a sparkline
FIRST_S, AGAIN_S = 10.0, 30.0  # seconds until a wait's first line, and between its further lines
LOOK_S = 1.0  # between two looks at the clock of a wait
EVAL_LABELS = {
    "mean_at_k": "mean@k",
    "pass_at_k": "pass@k",
    "maj_at_k": "maj@k",
    "response_length": "tokens",
    "truncated_fraction": "truncated",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """A metric that the displays show. Example: Shown("lr", "lr", "learning rate", scientific)."""

    name: str  # in metrics.jsonl
    short: str  # in plain lines
    long: str  # in the live table
    show: Callable[[float | None], str]


SHOWN = (
    Shown("reward/mean", "reward", "reward", lambda value: fixed(value, 2)),
    Shown("response_length/mean", "len", "response length, tokens", lambda value: fixed(value, 1)),
    Shown("lr", "lr", "learning rate", scientific),
    Shown("snr/shrink_ema", "shrink", "shrink, averaged", lambda value: fixed(value, 2)),
    Shown("snr/critical_batch_size", "crit", "critical batch size, prompts", number),
    Shown("grad_norm", "grad", "gradient norm", lambda value: number(value, 2)),
    Shown("perf/mfu/actor", "mfu", "model FLOPs utilization", lambda value: number(value, 2)),
    Shown("rollout/logprob_abs_diff", "diff", "trainer - rollout log-prob", lambda value: scientific(value, 1)),
)


def legend(values: Values, *, live: bool = False) -> str:
    """One line with the meaning of each metric that the display shows of `values`.

    Example: "reward: mean reward of all responses sampled for the step | lr: learning rate of the step"
    """
    return " | ".join(
        f"{metric.long if live else metric.short}: {describe(metric.name).meaning}"
        for metric in SHOWN
        if metric.name in values
    )


def open_display(config: LogConfig, num_steps: int, *, rank: int = 0, console: Console | None = None) -> Display:
    """The display that log.console selects; a silent one on ranks other than 0. `console` is rich's, for tests."""
    if rank != 0:
        return Display(num_steps)
    terminal = console or Console(force_terminal=True if config.console == "live" else None)
    if config.console == "live" or (config.console == "auto" and terminal.is_terminal):
        return LiveDisplay(num_steps, terminal)
    return PlainDisplay(num_steps)


class Display:
    """Base class; shows nothing and keeps what the summary needs. Ranks other than 0 use it as it is."""

    live = False  # whether metrics have their long names

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.last_step = 0
        self.first_evaluation: dict[str, float | None] = {}
        self.last_evaluation: dict[str, float | None] = {}
        self._phase: str | None = None
        self._explained = False  # the legend was shown
        self._start = time.monotonic()

    def phase(self, name: str | None) -> None:
        """A phase begins (its name) or ends (None)."""
        self._phase = name or self._phase

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is waited for inside the block, and for how long; a wait of a few seconds says nothing."""
        yield

    def step(self, step: int, values: Values) -> None:
        """Show a finished step, or the evaluation before the first step."""
        evaluation = self.recall(values)
        self.last_step = step
        line = "" if self._explained else legend(values, live=self.live)
        if line:
            self.message(line)
            self._explained = True
        self._show_metrics(step, values)
        if evaluation:
            self.message(evaluation_line(step, evaluation))

    def recall(self, values: Values) -> Values:
        """Keep a step's eval/ metrics for the summary and return them; also called for steps before a resume."""
        evaluation = {name: value for name, value in values.items() if name.startswith("eval/")}
        self.first_evaluation = evaluation | self.first_evaluation
        self.last_evaluation |= evaluation
        return evaluation

    def message(self, text: str) -> None:
        """Show a separate line, e.g. an alarm."""

    def summary(self) -> str:
        """One line: steps, time, and first and last accuracy of each set."""
        parts = [f"{self.last_step} of {self.num_steps} steps in {duration(time.monotonic() - self._start)}"]
        for name, after in self.last_evaluation.items():
            if name.endswith(("/accuracy", "/mean_at_k")):
                before = self.first_evaluation[name]
                parts.append(f"{' '.join(_eval_label(name))} {fixed(before, 2)} -> {fixed(after, 2)}")
        return "  ".join(parts)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.message(f"finished {self.summary()}")
        else:
            phase = f"; last phase {self._phase}" if self._phase else ""
            self.message(f"stopped by {kind.__name__} after {self.summary()}{phase}")

    def _show_metrics(self, step: int, values: Values) -> None:
        """Show the SHOWN metrics of a step; a hook for subclasses."""


class PlainDisplay(Display):
    """One line per step on standard output, flushed, for log files."""

    def message(self, text: str) -> None:
        print(text, flush=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        with waiting(what, self.message):
            yield

    def _show_metrics(self, step: int, values: Values) -> None:
        if any(metric.name in values for metric in SHOWN):
            self.message(step_line(step, self.num_steps, values))


def step_line(step: int, num_steps: int, values: Values) -> str:
    """One line with the SHOWN metrics of a step, as far as they were measured."""
    parts = [f"step {step}/{num_steps}"]
    parts += [f"{metric.short} {metric.show(values[metric.name])}" for metric in SHOWN if metric.name in values]
    if "timing_s/step" in values:
        parts.append(duration(values["timing_s/step"]))
    return "  ".join(parts)


def evaluation_line(step: int, evaluation: Values) -> str:
    """One line with the metrics of an evaluation; each set's name precedes its first metric."""
    parts, previous = [f"eval at step {step}"], None
    for name, value in evaluation.items():
        if text := _eval_text(name, value):
            set_name, label = _eval_label(name)
            parts.append(f"{label} {text}" if set_name == previous else f"{set_name} {label} {text}")
            previous = set_name
    return "  ".join(parts)


def _eval_label(name: str) -> tuple[str, str]:
    """Set and short name of an evaluation's metric. Example: "eval/gsm8k/mean_at_k" -> ("gsm8k", "mean@k")."""
    set_name, _, metric = name.removeprefix("eval/").rpartition("/")
    return set_name, EVAL_LABELS.get(metric, metric)


def _eval_text(name: str, value: float | None) -> str:
    """The value of an evaluation's metric; "" for a count that is 0."""
    if name.endswith("/unscored"):  # the only count
        return fixed(value, 0) if value else ""
    return fixed(value, 2)


class LiveDisplay(Display):
    """A progress bar with the current phase, and a table of the SHOWN metrics with sparklines."""

    live = True

    def __init__(self, num_steps: int, console: Console) -> None:
        super().__init__(num_steps)
        self._console = console
        self._history: dict[str, deque[float | None]] = {metric.name: deque(maxlen=HISTORY) for metric in SHOWN}
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=32),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("[cyan]{task.fields[phase]}"),
            console=console,
            speed_estimate_period=1800,  # steps may take minutes; the default of 30 s would give no estimate
        )
        self._task = self._progress.add_task("steps", total=num_steps, phase="")
        self._since: float | None = None  # begin of the current phase
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.phase(None)
        self._live.stop()
        super().__exit__(kind, *error)

    def phase(self, name: str | None) -> None:
        super().phase(name)
        self._since = time.monotonic() if name else None

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        if not self._live.is_started:
            with waiting(what, self.message):
                yield
            return
        before, self._since = (self._phase, self._since), time.monotonic()
        self._phase = what.partition(" (")[0]  # the line is narrow
        try:
            yield
        finally:
            self._phase, self._since = before

    def _show_metrics(self, step: int, values: Values) -> None:
        for name, history in self._history.items():
            if name in values:
                history.append(values[name])
        self._progress.update(self._task, completed=step)

    def _render(self) -> Group:
        since, phase = self._since, self._phase or ""
        seconds = 0 if since is None else int(time.monotonic() - since)
        shown = "" if since is None else f"{phase} {seconds} s" if seconds else phase
        self._progress.update(self._task, phase=shown)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=26)
        table.add_column(justify="right", min_width=8)
        table.add_column()
        table.add_column(style="cyan")
        for metric in SHOWN:
            history = list(self._history[metric.name])  # a copy, because rich renders in its own thread
            finite = [None if value is None or not math.isfinite(value) else value for value in history]
            if history:
                table.add_row(metric.long, metric.show(history[-1]), trend(finite), sparkline(finite))
        for name, value in list(self.last_evaluation.items()):
            if text := _eval_text(name, value):
                first = _eval_text(name, self.first_evaluation[name]) or "0"
                table.add_row(" ".join(_eval_label(name)), text, "", Text(f"from {first}", style="dim"))
        return Group(self._progress, table)


def sparkline(values: Sequence[float | None]) -> str:
    """Block characters scaled from the smallest to the largest value; a blank for None. Values are finite.

    >>> sparkline([0, 1, None, 2, 3.5])
    '▁▃ ▅█'
    """
    known = [value for value in values if value is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    height = (len(BLOCKS) - 1) / span if span > 0 else 0.0
    return "".join(" " if value is None else BLOCKS[round((value - low) * height)] for value in values)


def trend(values: Sequence[float | None]) -> str:
    """An arrow: up or down if the newest quarter's mean differs from the rest by over half the rest's deviation."""
    known = [value for value in values if value is not None]
    recent = known[-max(1, len(known) // 4) :]
    rest = known[: -len(recent)]
    if len(rest) < 2:
        return " "
    mean = sum(rest) / len(rest)
    spread = (sum((value - mean) ** 2 for value in rest) / len(rest)) ** 0.5
    change = sum(recent) / len(recent) - mean
    if abs(change) <= max(0.5 * spread, 1e-6 * abs(mean)):  # rounding of a constant is no trend
        return "→"
    return "↑" if change > 0 else "↓"


@contextmanager
def waiting(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say in a thread what is waited for inside the block: after FIRST_S seconds, then every AGAIN_S."""
    start, due = time.monotonic(), FIRST_S

    def tell() -> None:
        nonlocal due
        seconds = time.monotonic() - start
        if seconds >= due:
            due = seconds + AGAIN_S
            say(f"{what}, {seconds:.0f} s")

    with repeated(tell, LOOK_S):
        yield


def word(path: Path) -> str:
    """A path as one word of a shell's command line."""
    return shlex.quote(str(path))


def closing_lines(config: Config, report: Path | None) -> list[str]:
    """Where the results of a finished run are, and the next commands."""
    run_dir = config.run_dir
    model, samples = run_dir / "hf", run_dir / ROLLOUTS
    places = [f"report {report}"] if report else []
    if config.rollout.only:
        return [
            ", ".join([*places, f"samples {samples}"]),
            f"next: oblr-megatron train CONFIG.toml --replay {word(samples)}",
        ]
    if not model.is_dir():
        return places
    sets = "" if config.evaluate.data else " --data SET"
    # `vllm` needs a distribution of this name, and vLLM's CPU build has another one.
    server = "vllm serve" if installed_version("vllm") else "python -m vllm.entrypoints.openai.api_server --model"
    return [
        ", ".join([*places, f"model {model}"]),
        f"next: oblr-megatron eval --model {word(model)} --config {word(run_dir / CONFIG_FILE)}{sets}",
        f"  or: {server} {word(model)}",
    ]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error if that is a terminal; redirections inside the block do not affect it."""
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
