"""Shows a run's progress: one line per step.

    with open_display(config.num_steps, rank=parallel.rank) as display:
        timer = PhaseTimer(on_phase=display.phase)
        ...
        display.step(step, record)

The lines read
    starting 1 engine (log: run/logs/engine-*.log), 10 s
    reward: mean reward of all responses sampled for the step | len: mean response length, ... | ...
    step 12/150  reward 0.53  len 6.1  lr 8.1e-4  shrink 0.42  crit 310  grad 0.31  diff 2e-6  2.1 s
    eval at step 50  sums accuracy 0.81  mean@k 0.79  pass@k 0.90
    finished 150 of 150 steps in 5 min 12 s  sums accuracy 0.45 -> 0.93
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from oblr_megatron.checks.packages import installed_version
from oblr_megatron.checks.run_dir import CONFIG_FILE, ROLLOUTS
from oblr_megatron.formatting import duration, fixed, number, scientific
from oblr_megatron.metrics import describe
from oblr_megatron.observe.status import read_status
from oblr_megatron.runtime.run_lock import repeated

if TYPE_CHECKING:
    from oblr_megatron.config import Config

Values = Mapping[str, float | None]

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
    """A metric that a line shows. Example: Shown("lr", "lr", scientific)."""

    name: str  # in metrics.jsonl
    short: str  # in a line
    show: Callable[[float | None], str]


SHOWN = (
    Shown("reward/mean", "reward", lambda value: fixed(value, 2)),
    Shown("response_length/mean", "len", lambda value: fixed(value, 1)),
    Shown("lr", "lr", scientific),
    Shown("snr/shrink_ema", "shrink", lambda value: fixed(value, 2)),
    Shown("snr/critical_batch_size", "crit", number),
    Shown("grad_norm", "grad", lambda value: number(value, 2)),
    Shown("perf/mfu/actor", "mfu", lambda value: number(value, 2)),
    Shown("rollout/logprob_abs_diff", "diff", lambda value: scientific(value, 1)),
)


def legend(values: Values) -> str:
    """One line with the meaning of each metric that the display shows of `values`.

    Example: "reward: mean reward of all responses sampled for the step | lr: learning rate of the step"
    """
    return " | ".join(f"{metric.short}: {describe(metric.name).meaning}" for metric in SHOWN if metric.name in values)


def open_display(num_steps: int, *, rank: int = 0) -> Display:
    """The run's display: lines on standard output, flushed, for log files; a silent one on ranks other than 0."""
    return Display(num_steps, (lambda _: None) if rank else partial(print, flush=True))


class Display:
    """Says one line per step, and keeps what the summary needs."""

    def __init__(self, num_steps: int, say: Callable[[str], None]) -> None:
        self.num_steps = num_steps
        self._say = say
        self.first_step = self.last_step = 0  # those done before this attempt, and in all
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
        with waiting(what, self._say):
            yield

    def step(self, step: int, values: Values) -> None:
        """Show a finished step, or the evaluation before the first step."""
        evaluation = self.recall(values)
        self.last_step = step
        line = "" if self._explained else legend(values)
        if line:
            self.message(line)
            self._explained = True
        if any(metric.name in values for metric in SHOWN):
            self.message(step_line(step, self.num_steps, values))
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
        self._say(text)

    def summary(self) -> str:
        """One line: steps, time, and first and last accuracy of each set."""
        own = f", {self.last_step - self.first_step} of them" if self.first_step else ""
        taken = duration(time.monotonic() - self._start)
        parts = [f"{self.last_step} of {self.num_steps} steps{own} in {taken}"]
        for name, after in self.last_evaluation.items():
            if name.endswith(("/accuracy", "/mean_at_k")):
                before = self.first_evaluation[name]
                parts.append(f"{' '.join(_eval_label(name))} {fixed(before, 2)} -> {fixed(after, 2)}")
        return "  ".join(parts)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.message(f"{'finished' if self.last_step >= self.num_steps else 'ended after'} {self.summary()}")
        else:
            phase = f"; last phase {self._phase}" if self._phase else ""
            self.message(f"stopped by {kind.__name__} after {self.summary()}{phase}")


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
        lag = f" rollout.max_staleness={config.num_steps - 1}" if config.num_steps > 1 else ""  # nothing was trained
        return [
            ", ".join([*places, f"samples {samples}"]),
            f"next: oblr-megatron train CONFIG.toml run_dir=NEW --replay {word(samples)}{lag}",
        ]
    if not model.is_dir() or read_status(run_dir).state != "finished":  # an export of an earlier end may lie there
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
    """A progress bar on standard error if that is a terminal that can draw it.

    Redirections inside the block do not affect it.
    """
    console = Console(file=sys.stderr)
    draws = console.is_terminal and os.environ.get("TERM", "") not in ("", "dumb")
    with Progress(console=console, transient=True, disable=not draws, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
