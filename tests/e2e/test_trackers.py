"""A whole run with all four trackers, offline, and its continuation; engines, evaluation and trackers are real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oblr_megatron.metrics import read_metrics
from oblr_megatron.observe.trackers.names import tracked
from tests.e2e.forked import forked

NAMES = ("wandb", "mlflow", "trackio", "tensorboard")


@pytest.mark.nightly  # tests/unit/observe and tests/unit/extras read each tracker's files back
def test_a_run_and_its_continuation_are_one_run_of_each_tracker(
    overrides: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, variables = tmp_path / "run", {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}

    def train(steps: int, *flags: str) -> str:
        keys = overrides(
            run_dir,
            num_steps=steps,
            evaluate__every_steps=1,
            evaluate__num_prompts=4,
            log__trackers=json.dumps(NAMES),
            algo__schedule="constant",
            checkpoint__every_steps=1,
        )
        result = forked(1, [*keys, *flags], **variables)
        assert result.returncode == 0, result.stderr[-3000:]
        assert "lost" not in result.stdout
        return result.stdout

    train(1)
    ids = {path.stem: path.read_text() for path in (run_dir / "trackers").iterdir()}
    assert sorted(ids) == ["mlflow", "trackio", "wandb"]
    train(2, "--resume")
    assert {path.stem: path.read_text() for path in (run_dir / "trackers").iterdir()} == ids
    wanted = [tracked(record, 1) for record in read_metrics(run_dir)]
    assert len(wanted) == 3 and "critic/score/mean" in wanted[2]

    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client, run_id = MlflowClient((run_dir / "mlflow").as_uri()), json.loads(ids["mlflow"])["id"]
    for name in ("critic/score/mean", "actor/grad_norm", "eval/heldout/accuracy"):
        found = {metric.step: metric.value for metric in client.get_metric_history(run_id, name)}
        assert found == {record["training/global_step"]: record[name] for record in wanted if name in record}
    tables = client.list_artifacts(run_id, "evaluations/heldout")
    assert [Path(item.path).stem for item in tables] == ["step_000000", "step_000001", "step_000002"]
    assert client.get_run(run_id).data.params["num_prompts"] == "8"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("actor/grad_norm")] == [1, 2]
    parts = list((run_dir / "wandb").glob("offline-run-*"))
    assert len(parts) == 2 and all(part.name.endswith(json.loads(ids["wandb"])["id"]) for part in parts)
    reports = [path.read_text() for path in (run_dir / "wandb").glob("offline-run-*/files/report.html")]
    assert (run_dir / "report.html").read_text() in reports
