"""Detects problems in a run's metrics: each alarm is one line with a number and a remedy, reported once.

    watch = AlarmWatch(Planned(num_prompts=64, noise_prompts=64, group_size=8))
    for record in records:                  # as logged, or from metrics.jsonl
        for alarm in watch.check(record):   # alarms raised for the first time
            ...

The running trainer (`LiveAlarms`, used by sampling.py) and the report apply the same CHECKS. A check sees the first and
last EDGE values of each metric and a few counters, so the cost of a step does not grow with the run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.algo.noise_split import compared_with_best
from oblr_megatron.formatting import number
from oblr_megatron.metrics import KeptLines, intact_lines, write_whole
from oblr_megatron.observe.alarm_window import COLLAPSED, CRITICAL, EDGE, EPISODES, SPLIT, Planned, Window

if TYPE_CHECKING:
    from oblr_megatron.metrics import Record

ALARMS_FILE = "alarms.jsonl"
RESTING = 30  # steps at a low rate (and a quarter of the run) after which the rate counts as collapsed
SETTLED = 60  # values of an average before advice is taken from it
NOISIER = 2.0  # times the noise of the best group size at equal samples
SMALL, LARGE = 1 / 50, 10.0  # num_prompts as a multiple of the critical batch size
NOISELESS = 0.8  # averaged shrink factor above which norm tempering turns the gradient by more than it saves in noise
LIGHT = 0.5  # mean importance weight; 1 without mismatch
LOST = 0.02  # share of tokens
BEYOND = 5.0  # standard errors between two means; large, because the test is repeated every step
AT_ONCE = 4.0  # the same, below the first step, which no update has changed


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm. Example: Alarm("truncation", 212, "Truncated responses rose from 2% to 31%; raise ...")"""

    name: str  # key of CHECKS
    step: int  # at which it was first raised
    text: str
    cause: str = ""  # error of the reward, which metrics.jsonl does not have


def _nonfinite(window: Window) -> str:
    names = [f"{name} x{count:,}" for name, count in window.nulls.most_common() if count]
    return f"Not finite: {', '.join(names)}; look for null in metrics.jsonl." if names else ""


def _mismatch(window: Window) -> str:
    course = window.courses["rollout/logprob_abs_diff"]
    if course.count < 5:
        return ""
    early, recent = statistics.median(course.early), statistics.median(list(course.recent)[-5:])
    age = [0.0, *window.courses["rollout/staleness_max"].recent][-1]
    if age:  # the policy itself has moved since
        text = f"The policy is {number(recent, 2)} nats per token from the weights that sampled, {age:,.0f} updates ago"
        return f"{text}; lower optimizer.lr, or generate new samples." if recent >= 0.1 else ""
    if recent < 0.1:
        early, recent = course.ends or (early, 0.0)  # slow growth needs more steps to stand out from noise
        if recent < max(1e-3, 5 * early):
            return ""
    return (
        f"Trainer and vLLM differ by {number(recent, 2)} nats per token ({number(early, 2)} at the start); "
        "set weights.verify=true, then model.dtype=float32."
    )


def _recent(window: Window, name: str) -> float:
    """Median of a metric's last five values; NaN before there are five."""
    course = window.courses[name]
    return statistics.median(list(course.recent)[-5:]) if course.count >= 5 else math.nan


def _weights(window: Window) -> str:
    mean = _recent(window, "rollout/weight_mean")
    if not mean <= LIGHT:
        return ""
    return (
        f"The importance weights are {number(mean, 2)} on average, so the gradient is that much shorter; "
        'set rollout.importance_sampling to "token", or widen the band of rollout.rejection.'
    )


def _unrecorded(window: Window) -> str:
    share = _recent(window, "rollout/unrecorded_fraction")
    if not share >= LOST:
        return ""
    return (
        f"algo.center leaves out {share:.1%} of the tokens, because the engine did not record them; raise "
        "algo.center_tokens, or set rollout.top_k to it."
    )


def _gradnorm(window: Window) -> str:
    count = window.totals["gradnorm/nonfinite"]
    return f"Responses without a finite norm or loss: {count:,}; lower optimizer.lr or use float32." if count else ""


def _failures(window: Window) -> str:
    count = window.totals["reward/failures"] - window.totals["reward/timeouts"]
    cause = f": {window.cause}" if window.cause else " in the run's log"
    text = f"Responses for which the reward failed and that count as 0: {count:,}; fix the error{cause}"
    return text.rstrip(".") + "." if count > 0 else ""


def _timeouts(window: Window) -> str:
    count = window.totals["reward/timeouts"]
    late = window.totals[EPISODES[1]]
    keys = "reward.timeout_s" + (", or rollout.environment.deadline_s for late episodes" if late else "")
    text = f"Responses that were not scored in time and count as 0: {count:,}; raise {keys}."
    return text if count else ""


def _episodes(window: Window) -> str:
    failed, late = (window.totals[name] for name in EPISODES)
    text = f"Episodes that failed: {failed:,}, that were late: {late:,}; see "
    return f"{text}logs/environment-*.log." if failed or late else ""


def _reward(window: Window) -> str:
    """The reward fell slowly, or in the first steps. Adam's first steps are noisy, and as long as later ones."""
    course = window.courses["reward/mean"]
    if course.ends is not None and course.ends[1] < course.ends[0] - 0.02 and course.risen <= -BEYOND:
        return f"Mean reward fell from {number(course.ends[0], 2)} to {number(course.ends[1], 2)}; lower optimizer.lr."
    prompts, spread = window.planned.num_prompts, window.courses["reward/std"].early
    if course.count <= EDGE or not prompts or not spread:
        return ""
    first, now = course.early[0], statistics.fmean(course.recent)
    error = math.hypot(statistics.median(spread) / prompts**0.5, statistics.stdev(course.recent) / EDGE**0.5)
    if now >= first - max(0.02, AT_ONCE * error):
        return ""
    since, remedy = window.changed_at, "lower optimizer.lr"
    step = f"step {since + 1}" if since else "the first step"
    text = f"Mean reward was {number(first, 2)} in {step} and is {number(now, 2)}"
    return f"{text}; {remedy if since else f'raise optimizer.lr_warmup_steps, or {remedy}'}."


def _rate(window: Window) -> str:
    if window.resting < max(RESTING, window.step / 4):
        return ""
    share = window.courses["lr"].recent[-1] / window.planned.lr
    return (
        f"The learning rate has collapsed: it has been below {COLLAPSED:.0%} of optimizer.lr for {window.resting:,} "
        f"steps and is now at {share:.0%}; raise num_prompts, or check that rewards vary within groups."
    )


def _group_size(window: Window) -> str:
    size, courses = window.planned.group_size, [window.courses[name] for name in SPLIT]
    if not size or any(course.count < SETTLED for course in courses):
        return ""
    between, within, best = (statistics.median(course.recent) for course in courses)
    if between <= 0 or within <= 0:
        return ""
    target, times = compared_with_best(between, within, size, best)
    if times < NOISIER:
        return ""
    folds = window.planned.num_folds
    prompts = folds * max(1, round(window.planned.num_prompts * size / target / folds))
    return (
        f"At equal samples the gradient's noise is {times:.1f} times that of group_size {target}; set group_size to "
        f"{target} and num_prompts to {prompts:,}."
    )


def _batch_size(window: Window) -> str:
    prompts, course = window.planned.noise_prompts, window.courses[CRITICAL]
    if not prompts or course.count < SETTLED:
        return ""
    critical = statistics.median(course.recent)
    if critical == math.inf:
        return f"The averaged gradients of {prompts:,} prompts show noise and no signal; raise num_prompts."
    worth = f"A step of {prompts:,} prompts is worth {prompts / (prompts + critical):.1%} of a noiseless one"
    if prompts < SMALL * critical:
        return f"{worth}; raise num_prompts, twice as many make it worth nearly twice as much."
    if prompts > LARGE * critical:
        of_half = (prompts + critical) / (prompts + 2 * critical)
        return f"{worth}; lower num_prompts, half as many keep {of_half:.0%} of that."
    return ""


def _tempering(window: Window) -> str:
    course = window.courses["snr/shrink_ema"]
    if not window.courses["temper/energy"].count or course.count < SETTLED:
        return ""
    shrink = statistics.median(course.recent)
    text = f"The gradient is {shrink:.0%} signal, so tempering biases it for little less noise; lower algo.norm_power."
    return text if shrink > NOISELESS else ""


def _clipped(window: Window) -> str:
    factors = list(window.courses["optimizer/clip_factor"].recent)
    clipped = sum(factor < 1 for factor in factors)
    if len(factors) < EDGE or 2 * clipped <= EDGE:
        return ""
    median = number(statistics.median(factors), 2)
    return (
        f"Gradients were clipped in {clipped} of the last {EDGE} steps, the median to {median} of its norm: a step's "
        "length no longer follows the gradient; raise optimizer.clip_grad."
    )


def _spread(window: Window) -> str:
    """A weighted mean of rewards varies no more than the rewards, unless single responses dominate their groups.

    A mean of earlier steps may vary more: on a solved task all rewards are equal, and those of earlier steps were not.
    `reward/std` is that of all groups. Dynamic sampling keeps Q of N, of which it may be sqrt(N / Q) times as large.
    """
    if window.planned.of_earlier_steps:
        return ""
    spread, rewards = (list(window.courses[name].recent) for name in ("baseline/spread", "reward/std"))
    if len(spread) < EDGE or len(rewards) < EDGE:
        return ""
    baseline_std, reward_std = statistics.median(spread), statistics.median(rewards)
    if dropped := statistics.median([*window.courses["groups/dropped"].recent] or [0.0]):
        reward_std *= (1 + dropped / window.planned.num_prompts) ** 0.5 if window.planned.num_prompts else math.inf
    if baseline_std <= max(1.5 * reward_std, 1e-9):
        return ""
    return (
        f"The baseline's standard deviation over prompts is {number(baseline_std, 2)}, the rewards' is "
        f"{number(reward_std, 2)}: single responses with very large norms dominate their groups; check "
        "gradnorm/sq_max, or set algo.baseline to pooled."
    )


def _self_dependence(window: Window) -> str:
    slope = [0.0, *window.courses["baseline/self_dependence"].recent][-1]
    if slope <= 1e-6:
        return ""
    return (
        f"A response's baseline moves by {number(slope, 2)} per unit of its own reward, so the gradient is scaled or "
        "biased; set algo.baseline to rloo or pooled."
    )


def _entropy(window: Window) -> str:
    ends = window.courses["entropy"].ends
    if ends is None or ends[0] <= 0 or ends[1] > 0.1 * ends[0]:
        return ""
    if ends[1] > 0.03 * ends[0] and window.courses["reward/mean"].risen > BEYOND:
        return ""  # the policy becomes certain because it improves
    return (
        f"Entropy fell from {number(ends[0], 2)} to {number(ends[1], 2)} nats, so the policy hardly explores; "
        "lower optimizer.lr or set algo.kl_coefficient."
    )


def _truncation(window: Window) -> str:
    ends = window.courses["response_length/truncated_fraction"].ends
    if ends is None or ends[1] < 0.2 or ends[1] < min(0.5, ends[0] + 0.1):
        return ""
    return (
        f"Truncated responses went from {ends[0]:.0%} to {ends[1]:.0%}, and the reward sees answers that were cut; "
        "raise rollout.max_response_tokens, or rollout.environment.max_turns if episodes reach it."
    )


def _mixed(window: Window) -> str:
    ends = window.courses["groups/mixed_fraction"].ends
    if ends is None or ends[1] >= 0.05 or window.planned.group_size == 1:  # one response has no other to differ from
        return ""
    return f"Only {ends[1]:.0%} of prompts have unequal rewards; use harder data if most are solved, easier if few are."


def _slow_rank(window: Window) -> str:
    if window.lagging < EDGE:
        return ""
    ratio = window.courses["perf/slowest_rank_ratio"].recent[-1]
    return (
        f"Rank {window.laggard:g} has taken {ratio:.1f} times the median rank's time for its own work over "
        f"{window.lagging} steps, and the others wait for it; check its device and node, or the layout "
        "(logs/ranks.jsonl)."
    )


CHECKS: dict[str, Callable[[Window], str]] = {
    "nonfinite": _nonfinite,
    "mismatch": _mismatch,
    "weights": _weights,
    "unrecorded": _unrecorded,
    "gradnorm": _gradnorm,
    "failures": _failures,
    "timeouts": _timeouts,
    "episodes": _episodes,
    "reward": _reward,
    "rate": _rate,
    "group_size": _group_size,
    "batch_size": _batch_size,
    "tempering": _tempering,
    "clipped": _clipped,
    "spread": _spread,
    "self_dependence": _self_dependence,
    "entropy": _entropy,
    "truncation": _truncation,
    "mixed": _mixed,
    "slow_rank": _slow_rank,
}
"""All checks, most severe first; each returns the alarm's text, or "" if nothing is wrong."""
BY_SETTINGS = ("reward", "rate", "group_size", "batch_size", "tempering", "spread", "entropy", "mixed")
"""Checks that read Planned or FORGOTTEN. Records before a resume may have had other settings, so they raise no such
alarm later."""
OF_USERS_CODE = ("failures", "timeouts", "episodes")
"""Alarms about functions and services, which may be repaired before a resume; no setting shows that."""


class AlarmWatch:
    """Applies the checks to a run, record by record."""

    def __init__(self, planned: Planned) -> None:
        self._window = Window(planned)
        self._first: dict[str, Alarm] = {}  # by check, as first raised

    def check(self, record: Record, cause: str = "") -> list[Alarm]:
        """The alarms that this record raises for the first time; `cause` is an error of the step's reward."""
        self._window.cause = self._window.cause or cause
        self._window.add(record)
        new = []
        for name, check in CHECKS.items():
            if name not in self._first and (text := check(self._window)):
                of_reward = self._window.cause if name == "failures" else ""
                self._first[name] = Alarm(name, self._window.step, text, of_reward)
                new.append(self._first[name])
        return new

    def resume(self, settings: Planned, said: Iterable[Alarm]) -> None:
        """Continue after the records so far, perhaps with other settings. Alarms in `said` are not raised again."""
        if settings != self._window.planned:
            self._window.change(settings)
        kept = {name: alarm for name, alarm in self._first.items() if name not in BY_SETTINGS}
        self._first = kept | {alarm.name: alarm for alarm in said}

    def all(self) -> list[Alarm]:
        """Every alarm raised so far, most severe first; current numbers where the check still fires."""
        first = [self._first[name] for name in CHECKS if name in self._first]
        return [replace(alarm, text=CHECKS[alarm.name](self._window) or alarm.text) for alarm in first]


def alarms_of(run_dir: Path, settings: Planned, records: Sequence[Record]) -> list[Alarm]:
    """The alarms of a run for its report, most severe first; those of BY_SETTINGS as the run itself raised them."""
    watch = AlarmWatch(settings)
    written = _until(_written(run_dir / ALARMS_FILE), records)  # after a resume steps are done again
    cause = next((alarm.cause for alarm in written if alarm.cause), "")
    for record in records:
        watch.check(record, cause)
    alarms = {alarm.name: alarm for alarm in watch.all() if alarm.name not in BY_SETTINGS}
    alarms |= {alarm.name: alarm for alarm in written if alarm.name in BY_SETTINGS}
    return [alarms[name] for name in CHECKS if name in alarms]


def _written(path: Path) -> list[Alarm]:
    names = {field.name for field in fields(Alarm)}  # a line of another version is skipped
    return [Alarm(**alarm) for _, alarm in intact_lines(path) if alarm.keys() == names]


def _until(alarms: Iterable[Alarm], records: Sequence[Record]) -> list[Alarm]:
    """The alarms of steps up to the last record's."""
    last = _last_step(records)
    return [alarm for alarm in alarms if alarm.step <= last]


def _last_step(records: Sequence[Record]) -> float:
    return max((record["step"] or 0 for record in records), default=0)


class LiveAlarms:
    """Reports each alarm of a run once and appends it to RUN_DIR/alarms.jsonl.

    A line of the file is {"name": ..., "step": ..., "text": ..., "cause": ...}. `start` comes before the first step.

    Args:
        run_dir: of the run; the first alarm creates the file.
        settings: of the run.
        say: shows a line.
        past: records of the steps before a resume. Their alarms, and those in the file, are not reported again.
            Without past records the run is new, and an existing file is not its own.
        past_settings: settings of the last of these steps, if they differ from the current ones.
        changed: whether any setting of the run changed since. Then alarms of later steps in the file count for nothing:
            the steps are done again, and may raise them again. Later alarms of OF_USERS_CODE never count.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: Planned,
        say: Callable[[str], None],
        past: Sequence[Record] = (),
        past_settings: Planned | None = None,
        *,
        changed: bool = False,
    ) -> None:
        self._path, self._say, self._watch = run_dir / ALARMS_FILE, say, AlarmWatch(past_settings or settings)
        self._lines, last = KeptLines(self._path), _last_step(past)
        self._kept = [
            alarm
            for alarm in (_written(self._path) if past else ())
            if alarm.step <= last or not (changed or alarm.name in OF_USERS_CODE)
        ]
        for record in past:
            self._watch.check(record)
        self._watch.resume(settings, self._kept)

    def start(self) -> None:
        """Take out of the file what the run may say again. Until now a refused resume has changed nothing."""
        if self._kept:
            write_whole(self._path, (json.dumps(asdict(alarm)) + "\n" for alarm in self._kept))
        else:
            self._path.unlink(missing_ok=True)

    def check(self, record: Record, cause: str = "") -> list[Alarm]:
        """Check the record of a logged step; `cause` is an error of its reward. The new alarms."""
        new = self._watch.check(record, cause)
        for alarm in new:
            self._say(f"alarm at step {alarm.step}: {alarm.text}")
            self._lines.write(json.dumps(asdict(alarm)) + "\n")
        return new
