"""mlflow and trackio with their real packages, offline: what arrives, what is lost, how they end.

Values are read back through each package's own API and compared with metrics.jsonl. Not covered: their servers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oblr_megatron.config import Config, validated
from oblr_megatron.metrics import Record
from oblr_megatron.observe.trackers.feed import Trackers
from oblr_megatron.observe.trackers.names import STEP
from tests.unit.observe.conftest import offline
from tests.unit.observe.following import ALARM, COLUMNS, ROWS, configured, fix_without, follow, of_file, requeued
from tests.unit.observe.test_tracker_failures import fills_the_disk, refuses

__all__ = ["offline"]
pytestmark = pytest.mark.slow  # a process a tracker, which imports its package


def test_mlflow_files_hold_the_run(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    config = configured(offline / "run", "mlflow")
    assert follow(config, range(1, 4), report=True) == []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((config.run_dir / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["algo.baseline"] == config.algo.baseline
    assert run.data.tags["alarm.truncation"] == f"step 2: {ALARM.text}"
    for name in of_file(config.run_dir)[0]:
        wanted = [(record[STEP], record[name]) for record in of_file(config.run_dir)]
        found = client.get_metric_history(run.info.run_id, name.replace("@", "_at_"))
        assert [(metric.step, metric.value) for metric in found] == wanted
    paths = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert paths == {"config.json", "evaluations", "report.html"}
    table = Path(client.download_artifacts(run.info.run_id, "evaluations/sums/step_000002.json"))
    assert json.loads(table.read_text()) == {"columns": list(COLUMNS), "data": [list(row) for row in ROWS]}


def test_mlflow_takes_any_name(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets and data sources are named freely, and a source may be a path or an address. Nothing of it is lost."""
    from mlflow import MlflowClient

    sets = ("gsm8k@1", "a+b", "math (hard)", "../up", "/data/x", "https://x.org/y", "a/./b")
    table = configured(offline / "run", "mlflow").model_dump(mode="json")
    table["evaluate"]["data"] = {name: f"{place}.jsonl" for place, name in enumerate(sets)}
    config, said = validated(Config, table, "test"), []
    record: Record = {"step": 1, **{f"pool/{name}/mean": place for place, name in enumerate(sets)}}
    for resume_step in (None, 0):  # params are written once
        with Trackers(config, said.append, rank=0, resume_step=resume_step) as trackers:
            trackers.start()
            trackers.log(record)
            trackers.table(1, "../up", COLUMNS, ROWS)
    assert said == []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((config.run_dir / "mlflow").as_uri())
    run = client.get_run(json.loads((config.run_dir / "trackers" / "mlflow.json").read_text())["id"])
    assert run.data.params["evaluate.data.math _hard_.path"] == "2.jsonl"
    assert sum(name.startswith("evaluate.data.") and name.endswith(".path") for name in run.data.params) == len(sets)
    pools = {name: value for name, value in run.data.metrics.items() if name.startswith("pool/")}
    assert sorted(pools.values()) == list(range(len(sets)))
    assert pools["pool/https:/_/x.org/y/mean"] == sets.index("https://x.org/y")


def test_a_local_trackio_holds_the_run(offline: Path) -> None:
    config = configured(offline / "run", "trackio")
    assert follow(config, range(1, 4), report=True) == []
    name = json.loads((config.run_dir / "trackers" / "trackio.json").read_text())["id"]
    script = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage as Storage
(run,) = trackio.Api().runs("sums")
print(json.dumps([run.name, run.config, run.alerts(), Storage.get_logs("sums", run.name)]))
"""
    found, settings, alerts, logs = json.loads(
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout.splitlines()[-1]
    )
    assert found == name and name.startswith("run-")
    assert settings["algo.baseline"] == config.algo.baseline
    assert [alert["text"] for alert in alerts] == [ALARM.text]
    wanted = of_file(config.run_dir)
    assert [{key: row[key] for key in row if key in wanted[0]} for row in logs[:3]] == wanted
    (table,) = (row["evaluations/sums"] for row in logs if "evaluations/sums" in row)
    assert [tuple(row[column] for column in COLUMNS) for row in table["_value"]] == ROWS
    assert [path.read_text() for path in (offline / "trackio").rglob("report.html")] == ["<p>report</p>"]


def test_a_run_that_starts_over_is_a_new_run(offline: Path) -> None:
    config = configured(offline / "run", "mlflow")
    follow(config, range(1, 2))
    before = (config.run_dir / "trackers" / "mlflow.json").read_text()
    (config.run_dir / "metrics.jsonl").unlink()
    follow(config, range(1, 2))
    assert (config.run_dir / "trackers" / "mlflow.json").read_text() != before


def test_a_requeued_job_continues_the_same_mlflow_run(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    config = configured(offline / "run", "mlflow")
    run_id, steps = requeued(config)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((config.run_dir / "mlflow").as_uri())
    assert [metric.step for metric in client.get_metric_history(run_id, "actor/lr")] == steps
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_requeued_job_continues_the_same_trackio_run(offline: Path) -> None:
    run_id, steps = requeued(configured(offline / "run", "trackio"))
    script = f"""
import json, trackio
from trackio.sqlite_storage import SQLiteStorage as Storage
assert len(list(trackio.Api().runs("sums"))) == 1
print(json.dumps([row["training/global_step"] for row in Storage.get_logs("sums", "{run_id}")]))
"""
    read = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert json.loads(read.stdout.splitlines()[-1]) == steps


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    assert "pip install -e '.[mlflow]'" in fix_without("mlflow", tmp_path)


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_an_address_that_refuses_costs_the_run_its_deadline_at_most(
    offline: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    refuses(name, offline, monkeypatch)


@pytest.mark.parametrize(("name", "size"), [("trackio", 2_000), ("trackio", 30_000), ("mlflow", 2_000)])
def test_a_full_disk_ends_no_run_and_is_said(offline: Path, name: str, size: int) -> None:
    """Not even the config fits, or some records do. mlflow has a file for each metric, and 30,000 bytes hold each."""
    fills_the_disk(name, size, offline)
