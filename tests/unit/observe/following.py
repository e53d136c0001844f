"""A run that logs a few steps to its trackers, without engines."""

from __future__ import annotations

from pathlib import Path

from oblr_megatron.config import Config, validated
from oblr_megatron.metrics import MetricsWriter
from oblr_megatron.observe.alarms import Alarm
from oblr_megatron.observe.trackers.feed import Trackers

LINE = {"reward/mean": 0.5, "loss": 0.25, "lr": 1e-3, "perf/throughput": 812.5, "eval/sums/mean_at_k": 0.75}
ALARM = Alarm("truncation", 2, "Truncated responses rose from 2% to 31%; raise rollout.max_response_tokens.")
COLUMNS, ROWS = ("id", "response", "verdict"), [("a", "4", 1.0), ("b", "\\boxed{5} ü", 0.0)]


def configured(run_dir: Path, *names: str, **log: object) -> Config:
    table = {
        "run_dir": str(run_dir),
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "evaluate": {"samples_per_prompt": 8},
        "log": {"trackers": list(names), "project": "sums", **log},
    }
    return validated(Config, table, "test")


def follow(config: Config, steps: range, *, resume_step: int | None = None, report: bool = False) -> list[str]:
    """Log steps as a run does, with an alarm, a table and a report if asked; the lines that the run says."""
    said: list[str] = []
    with (
        MetricsWriter(config.run_dir, resume_step=resume_step) as metrics,
        Trackers(config, said.append, rank=0, resume_step=resume_step) as trackers,
    ):
        trackers.start()
        for step in steps:
            trackers.log(metrics.write(step, {name: value * step for name, value in LINE.items()}))
        if report:
            trackers.alarm(ALARM)
            trackers.table(2, "sums", COLUMNS, ROWS)
            path = config.run_dir / "report.html"
            path.write_text("<p>report</p>")
            trackers.file(path)
    return said
