"""What should not go unnoticed in a run: each alarm is one line with its figure and a remedy, said once.

    watch = Watch(floor=0.1)
    for record in records:                 # as they are logged, or as metrics.jsonl has them
        for alarm in watch.take(record):   # those that go off for the first time
            ...

A run watches itself (`LiveAlarms`, in `sampling.py`), and the report watches it again; both by the CHECKS. A check sees
the first and the last EDGE values of each figure, and some counts: a step costs the same however long the run is.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.formatting import number

if TYPE_CHECKING:
    from oblr_megatron.config.algo import AlgoConfig
    from oblr_megatron.metrics import Record

ALARMS_FILE = "alarms.jsonl"
EDGE = 20  # values at either end of a figure's course that are compared
RESTING = 30  # steps at the floor, and a quarter of the run, before the rate has collapsed
SLOWER = 1.2  # times the median rank's own time: a rank that is so for EDGE steps is a slow one
BEYOND = 5.0  # standard errors by which means must differ: every step asks again

# A step of equal lengths or equal rewards leaves these without a value, and nothing is wrong.
MAY_BE_UNDEFINED = frozenset({"gradnorm/length_corr", "gradnorm/estimate_corr", "baseline/variance_ratio_vs_rloo"})
COUNTED = ("gradnorm/nonfinite", "reward/failures")


@dataclass(frozen=True, slots=True)
class Alarm:
    """Example: Alarm("truncation", 212, "Truncated responses rose from 2% to 31%; raise ...")"""

    name: str  # of the check
    step: int  # at which it went off first
    text: str


@dataclass(slots=True)
class Course:
    """What is kept of one figure."""

    early: list[float] = field(default_factory=list)  # the first EDGE values
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=EDGE))  # the last ones
    count: int = 0

    def add(self, value: float) -> None:
        if len(self.early) < EDGE:
            self.early.append(value)
        self.recent.append(value)
        self.count += 1

    @property
    def ends(self) -> tuple[float, float] | None:
        """Medians of the first and of the last values; None while they are partly the same."""
        if self.count < 2 * EDGE:
            return None
        return statistics.median(self.early), statistics.median(self.recent)

    @property
    def risen(self) -> float:
        """How far the last values' mean is above the first ones', in standard errors; 0 while they are the same."""
        if self.count < 2 * EDGE:
            return 0.0
        change = statistics.fmean(self.recent) - statistics.fmean(self.early)
        variance = (statistics.variance(self.recent) + statistics.variance(self.early)) / EDGE
        return change / max(variance**0.5, 1e-9)


@dataclass(slots=True)
class Window:
    """A run so far, as the checks see it."""

    floor: float | None  # of the shrink factor, where the snr schedule sets the rate by it
    step: int = 0
    courses: dict[str, Course] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # the newest value of each figure
    nulls: Counter[str] = field(default_factory=Counter)  # values that were not finite
    totals: Counter[str] = field(default_factory=Counter)  # of the COUNTED figures
    resting: int = 0  # steps in a row that the shrink factor has been at its floor
    lagging: int = 0  # steps in a row that the same rank has been SLOWER than the median one
    laggard: float = -1.0  # that rank

    def take(self, record: Record) -> None:
        """One more record of metrics.jsonl."""
        self.step = int(record["step"] or 0)
        for name, value in record.items():
            if value is None:
                self.nulls[name] += name not in MAY_BE_UNDEFINED
                continue
            self.last[name] = value
            if name in WATCHED:
                self.courses.setdefault(name, Course()).add(value)
            if name in COUNTED:
                self.totals[name] += int(value)
        shrink = record.get("snr/shrink_ema")
        if self.floor is not None and shrink is not None:
            self.resting = self.resting + 1 if shrink <= self.floor * 1.001 else 0
        rank, ratio = record.get("perf/slowest_rank"), record.get("perf/slowest_rank_ratio")
        if rank is not None and ratio is not None:
            self.lagging = 0 if ratio <= SLOWER else self.lagging + 1 if rank == self.laggard else 1
            self.laggard = rank

    def course(self, name: str) -> Course:
        return self.courses.get(name, Course())


def _nonfinite(window: Window) -> str:
    names = [f"{name} x{count:,}" for name, count in window.nulls.most_common() if count]
    return f"Not finite: {', '.join(names)}; find them as null in metrics.jsonl." if names else ""


def _mismatch(window: Window) -> str:
    course = window.course("rollout/logprob_abs_diff")
    if course.count < 5:
        return ""
    early, recent = statistics.median(course.early), statistics.median(list(course.recent)[-5:])
    if recent < 0.1:
        early, recent = course.ends or (early, 0.0)  # growth is slower, and told from noise by more steps
        if recent < max(1e-3, 5 * early):
            return ""
    return (
        f"Trainer and vLLM differ by {number(recent, 2)} nats a token, {number(early, 2)} at the start; "
        "check dtypes and the weight push."
    )


def _gradnorm(window: Window) -> str:
    count = window.totals["gradnorm/nonfinite"]
    text = f"{_counted(count, 'response gradient')} found without a finite norm; lower the rate or raise the precision."
    return text if count else ""


def _failures(window: Window) -> str:
    count = window.totals["reward/failures"]
    text = f"{_counted(count, 'response')} not judged, and scored 0; raise reward.timeout_s or look at the verifier."
    return text if count else ""


def _reward(window: Window) -> str:
    course = window.course("reward/mean")
    if course.ends is None or course.ends[1] >= course.ends[0] - 0.02 or course.risen > -BEYOND:
        return ""
    return f"The reward fell from {number(course.ends[0], 2)} to {number(course.ends[1], 2)}; lower optimizer.lr."


def _rate(window: Window) -> str:
    if window.resting < max(RESTING, window.step / 4):
        return ""
    rate = f", lr {number(window.last['lr'], 2)}" if "lr" in window.last else ""
    return (
        f"The learning rate has collapsed: the shrink factor has been at its floor {number(window.floor, 2)} for "
        f"{window.resting:,} steps{rate}; raise num_prompts, or look for rewards that do not vary."
    )


def _spread(window: Window) -> str:
    """A mean of rewards, however weighted, spreads no more than they do, unless single responses rule their groups."""
    spread, rewards = (list(window.course(name).recent) for name in ("baseline/spread", "reward/std"))
    if len(spread) < EDGE or len(rewards) < EDGE:
        return ""
    found, usual = statistics.median(spread), statistics.median(rewards)
    if found <= max(1.5 * usual, 1e-9):
        return ""
    return (
        f"The baseline spreads by {number(found, 2)} over the prompts, the rewards by {number(usual, 2)}: single "
        "responses with outsized norms rule their groups; look at gradnorm/sq_max, or set algo.baseline to rloo_prior."
    )


def _self_dependence(window: Window) -> str:
    found = window.last.get("baseline/self_dependence", 0.0)
    if found <= 1e-6:
        return ""
    return (
        f"A response's baseline moves by {number(found, 2)} with each unit of its own reward: the gradient is scaled, "
        "or biased; rloo and optimal_prior leave the response itself out."
    )


def _entropy(window: Window) -> str:
    ends = window.course("entropy").ends
    if ends is None or ends[1] > 0.1 * ends[0]:
        return ""
    if ends[1] > 0.03 * ends[0] and window.course("reward/mean").risen > BEYOND:
        return ""  # it grows sure of what is right
    return (
        f"Entropy fell from {number(ends[0], 2)} to {number(ends[1], 2)} nats: the policy hardly explores any more; "
        "lower optimizer.lr, or set algo.kl_coefficient."
    )


def _truncation(window: Window) -> str:
    ends = window.course("response_length/truncated_fraction").ends
    if ends is None or ends[1] < 0.2 or ends[1] < ends[0] + 0.1:
        return ""
    return f"Truncated responses rose from {ends[0]:.0%} to {ends[1]:.0%}; raise rollout.max_response_tokens."


def _mixed(window: Window) -> str:
    ends = window.course("groups/mixed_fraction").ends
    if ends is None or ends[1] >= 0.05:
        return ""
    return f"Only {ends[1]:.0%} of the prompts still have unequal rewards; the data are solved, or too hard."


def _slow_rank(window: Window) -> str:
    if window.lagging < EDGE:
        return ""
    ratio = window.last["perf/slowest_rank_ratio"]
    return (
        f"Rank {window.laggard:g} has taken {ratio:.1f} times as long as the median rank over its own work, for "
        f"{window.lagging} steps: the others wait for it; look at its device and node, or at how the layout deals work "
        "(logs/ranks.jsonl)."
    )


def _counted(count: int, noun: str) -> str:
    """2, "response" -> "2 responses were"."""
    return f"{count:,} {noun} was" if count == 1 else f"{count:,} {noun}s were"


CHECKS: dict[str, Callable[[Window], str]] = {
    "nonfinite": _nonfinite,
    "mismatch": _mismatch,
    "gradnorm": _gradnorm,
    "failures": _failures,
    "reward": _reward,
    "rate": _rate,
    "spread": _spread,
    "self_dependence": _self_dependence,
    "entropy": _entropy,
    "truncation": _truncation,
    "mixed": _mixed,
    "slow_rank": _slow_rank,
}
"""What is looked for, in order of weight; each gives its line, or "" while nothing is wrong."""

WATCHED = frozenset(
    {
        "rollout/logprob_abs_diff",
        "reward/mean",
        "reward/std",
        "baseline/spread",
        "entropy",
        "response_length/truncated_fraction",
        "groups/mixed_fraction",
    }
)
"""The figures whose course is kept."""


class Watch:
    """Goes through a run record by record.

    Args:
        floor: see `floor_of`.
    """

    def __init__(self, floor: float | None) -> None:
        self._window = Window(floor)
        self._first: dict[str, Alarm] = {}  # as each went off

    def take(self, record: Record) -> list[Alarm]:
        """The alarms that this record sets off for the first time."""
        self._window.take(record)
        found = []
        for name, check in CHECKS.items():
            if name not in self._first and (text := check(self._window)):
                self._first[name] = Alarm(name, self._window.step, text)
                found.append(self._first[name])
        return found

    def all(self) -> list[Alarm]:
        """Every alarm that has gone off, in order of weight, with the figures of now where it still holds."""
        first = [self._first[name] for name in CHECKS if name in self._first]
        return [Alarm(alarm.name, alarm.step, CHECKS[alarm.name](self._window) or alarm.text) for alarm in first]


def floor_of(algo: AlgoConfig) -> float | None:
    """The floor that a collapsed rate rests on; None where the rate does not follow the shrink factor."""
    return algo.snr.floor if algo.schedule == "snr" else None


class LiveAlarms:
    """Says each alarm of a run once, and keeps it in RUN_DIR/alarms.jsonl: {"name": ..., "step": ..., "text": ...}.

    Args:
        run_dir: of the run; the file is made by the first alarm.
        floor: see `floor_of`.
        say: shows a line.
        past: the records of the steps that a resumed run has behind it, whose alarms are not said again, nor those in
            the file; without any, the run begins anew, and so does the file.
    """

    def __init__(
        self, run_dir: Path, floor: float | None, say: Callable[[str], None], past: Sequence[Record] = ()
    ) -> None:
        self._path, self._say, self._watch = run_dir / ALARMS_FILE, say, Watch(floor)
        if not past:
            self._path.unlink(missing_ok=True)
        self._said = {alarm.name for record in past for alarm in self._watch.take(record)} | set(_names(self._path))

    def take(self, record: Record) -> None:
        """A step was logged."""
        for alarm in self._watch.take(record):
            if alarm.name not in self._said:
                self._said.add(alarm.name)
                self._say(f"alarm at step {alarm.step}: {alarm.text}")
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(alarm)) + "\n")


def _names(path: Path) -> Iterable[str]:
    """Of the alarms in the file; a line that was cut when a run was killed is passed over."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield str(json.loads(line)["name"])
        except (ValueError, LookupError, TypeError):
            continue
