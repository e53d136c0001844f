"""The figures of a run: their names, the writer of metrics.jsonl and tensorboard, and the reader.

`METRICS` is the one list of names; docs/metrics.md and the report are checked against it, and the writer refuses a name
that is not in it. metrics.jsonl holds one strict-JSON object a step, in rising order of `step`, the number of optimizer
steps done; an evaluation before training is the record of step 0.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from oblr_megatron.checks.packages import package_versions
from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from types import TracebackType

    from oblr_megatron.config import LogConfig

Record = dict[str, float | None]
"""One step: name -> value; None stands for a value that was not finite."""

METRICS_FILE = "metrics.jsonl"
RANKS_FILE = "logs/ranks.jsonl"  # of observe/performance/ranks.py
ENVIRONMENT_FILE = "environment.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Metric:
    """One name of metrics.jsonl. Example: Metric("entropy", "nats", "mean entropy of ...")."""

    name: str  # "<set>" stands for the name of an evaluation set, "<term>" of a reward, ...
    unit: str  # "" for pure numbers
    meaning: str  # one line


METRICS: tuple[Metric, ...] = (
    Metric("step", "", "optimizer steps done, counted from 1; 0 is the evaluation before training"),
    Metric("reward/mean", "", "mean reward of all responses sampled for the step"),
    Metric("reward/std", "", "standard deviation of the rewards over all responses sampled for the step"),
    Metric(
        "reward/failures",
        "responses",
        "responses whose judging failed or ran late; they score 0",
    ),
    Metric("reward/timeouts", "responses", "those among them whose judging ran past its deadline, reward.timeout_s"),
    Metric("rewards/<term>/mean", "", "mean value of one reward of a weighted sum, before its weight"),
    Metric("rewards/<term>/std", "", "standard deviation of these values"),
    Metric("response_length/mean", "tokens", "mean response length, the end-of-sequence token included"),
    Metric("response_length/truncated_fraction", "", "share of responses cut at rollout.max_response_tokens"),
    Metric(
        "groups/mixed_fraction", "", "share of all sampled prompts whose responses did not all earn the same reward"
    ),
    Metric("groups/dropped", "groups", "groups of equal rewards that dynamic sampling left out of the step"),
    Metric("groups/unused", "groups", "mixed groups that dynamic sampling drew beyond the step's need"),
    Metric("entropy", "nats", "entropy of the sampling distribution, mean over tokens with an advantage"),
    Metric("kl/mean", "nats", "divergence from the reference model, mean over those tokens; with algo.kl_coefficient"),
    Metric("moe/aux_loss", "", "a mixture's balancing loss over those tokens, mean of its layers, before its weight"),
    Metric("moe/z_loss", "", "mean square over those tokens of the routers' log-sum-exp, before its weight"),
    Metric("moe/max_load", "", "largest share of those tokens on one expert of a layer, times the number of experts"),
    Metric(
        "rollout/logprob_abs_diff",
        "nats",
        "mean |trainer's log-prob - vLLM's| over tokens with an advantage",
    ),
    Metric("rollout/truncated_ratio_fraction", "", "share of those tokens' ratios cut at rollout.importance_cap"),
    Metric(
        "rollout/dynamic_batches", "", "batches that dynamic sampling drew for the step; 1 when nothing was missing"
    ),
    Metric(
        "rollout/staleness_max", "updates", "updates by which the step's oldest sample is behind the trainer's weights"
    ),
    Metric("rollout/restarts", "", "engines started anew, or servers taken back, since the step before"),
    Metric("gradnorm/sq_mean", "", "mean squared norm of a response's own gradient, w, where it was measured"),
    Metric("gradnorm/sq_max", "", "largest squared norm of a response's own gradient"),
    Metric("gradnorm/length_corr", "", "correlation of w with response length over the step's responses"),
    Metric(
        "gradnorm/estimate_corr", "", "correlation of estimated with exact w on a few prompts (gradnorm.check_every)"
    ),
    Metric(
        "gradnorm/nonfinite",
        "responses",
        "responses whose norm was not finite; they are left out of the gradient",
    ),
    Metric(
        "baseline/variance_ratio_vs_rloo",
        "",
        "E|A score|^2 under the run's baseline over that under rloo",
    ),
    Metric(
        "baseline/<name>/variance_ratio", "", "what that ratio would have been under another baseline, in its scale"
    ),
    Metric("baseline/spread", "", "standard deviation over prompts of the run's baseline, averaged over each group"),
    Metric("baseline/self_dependence", "", "change of one response's baseline for each unit of its own reward"),
    Metric("snr/signal_sq", "", "this step's estimate of the squared norm of the true gradient (may be negative)"),
    Metric("snr/noise_trace", "", "this step's estimate of the trace of one prompt's gradient covariance"),
    Metric("snr/shrink_raw", "", "this step's signal / squared gradient norm, neither averaged nor clamped"),
    Metric("snr/shrink_ema", "", "averaged and clamped shrink factor that governs the snr schedule"),
    Metric("snr/snr", "", "averaged signal over averaged noise, of one prompt's gradient; absent without a signal"),
    Metric("snr/critical_batch_size", "prompts", "averaged noise over averaged signal; absent without a signal"),
    Metric("loss", "", "policy-gradient loss; its value says little, its gradient is what counts"),
    Metric("lr", "", "learning rate of the step"),
    Metric("grad_norm", "", "norm of the gradient over all parameters, before clipping"),
    Metric("timing_s/rollout", "s", "sampling the responses"),
    Metric("timing_s/reward", "s", "judging the responses"),
    Metric("timing_s/gradnorm", "s", "norms of the responses' own gradients"),
    Metric("timing_s/gradient", "s", "policy-gradient forward and backward passes"),
    Metric("timing_s/optimizer", "s", "clipping and the optimizer's update"),
    Metric("timing_s/push", "s", "sending the new weights to vLLM"),
    Metric("timing_s/evaluate", "s", "evaluation, in steps that have one"),
    Metric("timing_s/checkpoint", "s", "waiting for the checkpoint of the step before: its copy, or a save under way"),
    Metric("timing_s/step", "s", "the whole step by the clock, evaluation included"),
    Metric("perf/tokens_per_s", "tokens/s", "response tokens of the step over its time without evaluation"),
    Metric("perf/samples_per_s", "samples/s", "responses of the step over its time without evaluation"),
    Metric("perf/throughput", "tokens/s", "prompt and response tokens a second and rank, without evaluation (verl's)"),
    Metric("perf/mfu/actor", "", "model FLOPs of the samples trained on, over time and peak of the training phases"),
    Metric("perf/mfu/with_norms", "", "the same with a pass of their own for the norms counted as needed"),
    Metric("perf/ranks/<phase>/max_s", "s", "longest time that a rank took by itself in a phase, over all ranks"),
    Metric("perf/ranks/<phase>/min_s", "s", "shortest such time"),
    Metric("perf/ranks/<phase>/slowest", "", "the rank with the longest, counted from 0"),
    Metric("perf/slowest_rank", "", "the rank that took longest over its own part of the training"),
    Metric("perf/slowest_rank_ratio", "", "its time over the median rank's"),
    Metric("perf/peak_memory_bytes", "bytes", "largest memory of a trainer process so far, over all ranks"),
    Metric("perf/peak_memory_rank", "", "the rank that took it"),
    Metric("weights/version", "", "version of the weights that vLLM holds after the step"),
    Metric("data/epoch", "", "passes over the training rows that were completed"),
    Metric(
        "data/skipped", "rows", "training rows left out: unreadable, incomplete, too long, or overlapping a benchmark"
    ),
    Metric("eval/<set>/accuracy", "", "share of the set's prompts answered right by the greedy response"),
    Metric("eval/<set>/mean_at_k", "", "mean verdict on k sampled responses a prompt"),
    Metric("eval/<set>/pass_at_k", "", "share of prompts that at least one of k sampled responses answers right"),
    Metric(
        "eval/<set>/maj_at_k", "", "share of prompts whose most frequent answer among k is right; a tie counts in part"
    ),
    Metric("eval/<set>/response_length", "tokens", "mean length of the evaluation's responses, greedy and sampled"),
    Metric("eval/<set>/truncated_fraction", "", "share of the evaluation's responses that were cut at the limit"),
)

_NAMED = {"eval": "<set>", "rewards": "<term>", "baseline": "<name>", "perf/ranks": "<phase>"}
_POSITION = {metric.name: position for position, metric in enumerate(METRICS)}


def describe(name: str) -> Metric:
    """The table's entry for a name as it stands in a record, e.g. "eval/gsm8k/accuracy".

    Raises:
        KeyError: the name is not in the table.
    """
    return METRICS[_POSITION[_table_name(name)]]


def _table_name(name: str) -> str:
    """ "eval/gsm8k/accuracy" -> "eval/<set>/accuracy"; the name in the middle may hold slashes."""
    for prefix, middle in _NAMED.items():
        if name.startswith(f"{prefix}/") and "/" in name.removeprefix(f"{prefix}/"):
            return f"{prefix}/{middle}/{name.rpartition('/')[2]}"
    return name


class MetricsWriter:
    """Writes every step to RUN_DIR/metrics.jsonl and RUN_DIR/tensorboard; on other ranks than 0 it writes nothing.

        with MetricsWriter(config.run_dir, config.log, rank=parallel.rank, world_size=parallel.world_size) as metrics:
            metrics.write(step, {"reward/mean": 0.53, ...})

    Args:
        run_dir: made if absent.
        config: whether tensorboard is written.
        resume_step: last step of the checkpoint that is resumed; records after it are dropped, the file is appended to.

    Raises:
        UserError: metrics.jsonl is there already and resume_step is None.
    """

    def __init__(
        self, run_dir: Path, config: LogConfig, *, rank: int = 0, world_size: int = 1, resume_step: int | None = None
    ) -> None:
        self.num_nonfinite = 0  # values written as null so far
        self._last_step = -1 if resume_step is None else resume_step
        self._sinks: list[_Sink] = []
        if rank != 0:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks.append(_JsonLines(run_dir, resume_step))
        if config.tensorboard:
            self._sinks.append(_Tensorboard(run_dir / "tensorboard", resume_step))
        if resume_step is None or not (run_dir / ENVIRONMENT_FILE).exists():
            _write_environment(run_dir, world_size)

    def write(self, step: int, values: Mapping[str, float]) -> Record:
        """Log one step, and return it as logged; all its figures, those of an evaluation included, come in one call.

        Raises:
            KeyError: a name is not in METRICS.
        """
        assert step > self._last_step, f"step {step} was logged after step {self._last_step}"
        self._last_step = step
        record: Record = {"step": step}
        for name in sorted(values.keys() - {"step"}, key=lambda name: (_POSITION[_table_name(name)], name)):
            record[name] = _finite_or_none(values[name])
        self.num_nonfinite += sum(value is None for value in record.values())
        for sink in self._sinks:
            sink.write(step, record)
        return record

    def close(self) -> None:
        """Close the files; the writer may be closed twice."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _finite_or_none(value: float) -> float | None:
    """A plain int or float, also from a numpy or torch scalar; None if it is not finite."""
    if isinstance(value, int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


class _Sink(Protocol):
    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


class _JsonLines:
    """metrics.jsonl, flushed every step so that a killed run loses nothing and a running one can be read."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        path = run_dir / METRICS_FILE
        if path.exists() and resume_step is None:
            raise UserError("the run directory holds metrics already", where=str(path), fix="name a new run_dir")
        if path.exists():
            kept = [record for record in read_metrics(run_dir) if (record["step"] or 0) <= (resume_step or 0)]
            write_whole(path, "".join(_line(record) for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, record: Record) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Tensorboard:
    """One scalar a name; values that are not finite are left out."""

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=None if resume_step is None else resume_step + 1)

    def write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; nothing else is left behind."""
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_metrics(run_dir: Path) -> list[Record]:
    """All steps of a run, finished or not.

    A last line that was cut while being written is dropped with a warning.

    Raises:
        UserError: there is no metrics.jsonl, or a line of it is not a record.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no metrics here", where=str(path), fix="give the run_dir of a run that has begun") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the metrics: {error}", where=str(path), fix="give a readable file") from error
    *lines, rest = text.split("\n")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return records + _parse_unfinished(rest, path)


def _parse(line: str, where: str) -> Record:
    """One line; NaN and Infinity, which Python would take, are not JSON."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UserError(
            f"not a line of JSON: {error}", where=where, fix="remove the line or restore the file"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise UserError('not an object with an integer "step"', where=where, fix="remove the line or restore the file")
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_unfinished(rest: str, path: Path) -> list[Record]:
    """What follows the last newline: nothing, or a line whose writer was stopped."""
    if not rest:
        return []
    try:
        return [_parse(rest, str(path))]
    except UserError:
        logger.warning("%s: the last line was cut while being written and is left out", path)
        return []


def _write_environment(run_dir: Path, world_size: int) -> None:
    """What the report's header says beside the config: start, ranks, device, versions."""
    environment = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": world_size,
        "device": _device_name(),
        "versions": {"python": platform.python_version()} | package_versions(),
    }
    write_whole(run_dir / ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")


def _device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
