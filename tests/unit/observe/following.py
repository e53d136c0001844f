"""A run that logs a few steps to its trackers, without engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from oblr_megatron.config import Config, validated
from oblr_megatron.metrics import MetricsWriter, read_metrics
from oblr_megatron.observe.alarms import Alarm
from oblr_megatron.observe.trackers.feed import Trackers
from oblr_megatron.observe.trackers.names import tracked

ROOT = Path(__file__).parents[3]
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


def of_file(run_dir: Path, k: int = 8) -> list[dict[str, float]]:
    """The records of metrics.jsonl by their tracker names."""
    return [tracked(record, k) for record in read_metrics(run_dir)]


def requeued(config: Config) -> tuple[str, list[int]]:
    """Follow steps 1 to 3, and 3 to 4 of a job that continues after step 2: the run's id, and the steps sent."""
    (name,) = config.log.trackers
    follow(config, range(1, 4))
    time.sleep(1)  # wandb names the directory of a start by whole seconds
    before = (config.run_dir / "trackers" / f"{name}.json").read_text()
    assert follow(config, range(3, 5), resume_step=2) == []
    assert (config.run_dir / "trackers" / f"{name}.json").read_text() == before
    return json.loads(before)["id"], [1, 2, 3, 3, 4]


def fix_without(name: str, folder: Path) -> str:
    """What `check_trackers` advises in an environment that has everything but the tracker's package."""
    pydantic = find_spec("pydantic")
    assert pydantic is not None and pydantic.origin is not None
    for item in Path(pydantic.origin).parents[1].iterdir():
        if item.name.partition("-")[0] not in (name, f"{name}_skinny"):
            (folder / item.name).symlink_to(item)
    script = f"""
from oblr_megatron.observe.trackers.registry import check_trackers, UserError
try:
    check_trackers([{name!r}])
except UserError as error:
    print(error.fix)
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-S", "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


ADDRESSES = {
    "wandb": {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:1", "WANDB_API_KEY": 40 * "a"},
    "mlflow": {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"},
    "trackio": {"TRACKIO_SERVER_URL": "http://127.0.0.1:1", "TRACKIO_WRITE_TOKEN": "a"},
}
"""Environments in which a tracker's server refuses."""
