"""Trackers with their real packages, offline: what arrives, what is lost, how they end.

Values are read back through each package's own API and compared with metrics.jsonl. Not covered: their servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.config import Config, validated
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import Record, read_metrics
from oblr_megatron.observe.trackers.feed import Trackers
from oblr_megatron.observe.trackers.names import EVALUATIONS, STEP, VERL, tracked
from oblr_megatron.observe.trackers.registry import check_trackers
from tests.unit.observe.following import ALARM, COLUMNS, ROWS, configured, follow

pytestmark = pytest.mark.slow  # a process a tracker, which imports its package
ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "metrics.md"


def wandb_runs(run_dir: Path) -> list[dict[str, list[Any]]]:
    """All records of each offline run by kind, in the order in which the runs began."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    runs = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        found: dict[str, list[Any]] = {}
        for data in leveldb_log(path.read_bytes()):
            record = WandbRecord.FromString(data)
            kind = str(record.WhichOneof("record_type"))
            found.setdefault(kind, []).append(getattr(record, kind))
        runs.append(found)
    return runs


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format, which wandb's files have after 7 bytes of their own. wandb has no reader.

    A block of 32 KiB holds chunks: checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last).
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def wandb_values(run: dict[str, list[Any]]) -> list[dict[str, Any]]:
    rows = ({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.item}
            for one in run["history"])  # fmt: skip
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


def of_file(run_dir: Path, k: int = 8) -> list[dict[str, float]]:
    return [tracked(record, k) for record in read_metrics(run_dir)]


def test_wandb_offline_holds_the_run(offline: Path) -> None:
    config = configured(offline / "run", "wandb")
    assert follow(config, range(1, 4), report=True) == []
    (run,) = wandb_runs(config.run_dir)
    values = wandb_values(run)
    assert values[:3] == of_file(config.run_dir)
    assert values[3][STEP] == 2 and values[3]["evaluations/sums/nrows"] == 2
    (table,) = config.run_dir.glob("wandb/offline-run-*/files/media/table/**/*.table.json")
    assert json.loads(table.read_text()) == {"columns": list(COLUMNS), "data": [list(row) for row in ROWS]}
    assert [path.read_text() for path in config.run_dir.glob("wandb/offline-run-*/files/report.html")] == [
        "<p>report</p>"
    ]
    (started,) = run["run"][:1]
    assert (started.project, started.display_name) == ("sums", "run")
    settings = {item.key: json.loads(item.value_json) for item in started.config.update if item.key}
    assert settings["num_prompts"] == config.num_prompts and settings["algo"]["baseline"] == config.algo.baseline
    assert run["alert"][0].text == ALARM.text
    assert run["exit"][-1].exit_code == 0


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
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {
        "config.json",
        "evaluations",
        "report.html",
    }
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


def test_tensorboard_gets_finite_values_and_alarms(offline: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, said = configured(offline / "run", "tensorboard"), []
    with Trackers(config, said.append, rank=0, resume_step=None) as trackers:
        trackers.start()
        trackers.log({"step": 1, "lr": 0.5, "loss": None})
        trackers.log({"step": 2, "lr": 0.25, "loss": 2.0})
        trackers.alarm(ALARM)
    with Trackers(config, said.append, rank=0, resume_step=1) as trackers:
        trackers.start()
        trackers.log({"step": 2, "lr": 0.125, "loss": 4.0})
    assert said == []
    events = EventAccumulator(str(config.run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [(1, 0.5), (2, 0.125)]
    assert [(event.step, event.value) for event in events.Scalars("actor/pg_loss")] == [(2, 4.0)]
    assert ALARM.text.encode() in b"".join(path.read_bytes() for path in (config.run_dir / "tensorboard").iterdir())


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_requeued_job_continues_the_same_run(offline: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = configured(offline / "run", name)
    follow(config, range(1, 4))
    before = (config.run_dir / "trackers" / f"{name}.json").read_text()
    assert follow(config, range(3, 5), resume_step=2) == []
    assert (config.run_dir / "trackers" / f"{name}.json").read_text() == before
    run_id, steps = json.loads(before)["id"], [1, 2, 3, 3, 4]
    if name == "wandb":
        first, second = wandb_runs(config.run_dir)
        assert first["run"][0].run_id == second["run"][0].run_id == run_id
        assert [row[STEP] for row in wandb_values(first) + wandb_values(second)] == steps
    elif name == "mlflow":
        from mlflow import MlflowClient

        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient((config.run_dir / "mlflow").as_uri())
        assert [metric.step for metric in client.get_metric_history(run_id, "actor/lr")] == steps
        assert client.get_run(run_id).info.status == "FINISHED"
    else:
        script = f"""
import json, trackio
from trackio.sqlite_storage import SQLiteStorage as Storage
assert len(list(trackio.Api().runs("sums"))) == 1
print(json.dumps([row["training/global_step"] for row in Storage.get_logs("sums", "{run_id}")]))
"""
        read = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
        assert json.loads(read.stdout.splitlines()[-1]) == steps


def test_a_run_that_starts_over_is_a_new_run(offline: Path) -> None:
    config = configured(offline / "run", "mlflow")
    follow(config, range(1, 2))
    before = (config.run_dir / "trackers" / "mlflow.json").read_text()
    (config.run_dir / "metrics.jsonl").unlink()
    follow(config, range(1, 2))
    assert (config.run_dir / "trackers" / "mlflow.json").read_text() != before


@pytest.mark.parametrize(("names", "part"), [(["wandbb"], "wandb"), (["mlflow", "mlflow"], "once")])
def test_names_are_checked_before_the_run(names: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        check_trackers(names)
    assert caught.value.where == "config: log.trackers" and part in caught.value.fix


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(name: str, tmp_path: Path) -> None:
    """In an environment that has everything but the package."""
    for item in Path(find_spec("pydantic").origin).parents[1].iterdir():
        if item.name.partition("-")[0] not in (name, f"{name}_skinny"):
            (tmp_path / item.name).symlink_to(item)
    script = f"""
from oblr_megatron.observe.trackers.registry import check_trackers, UserError
try:
    check_trackers([{name!r}])
except UserError as error:
    print(error.fix)
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-S", "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"oblr-megatron[{name}]" in ran.stdout, ran.stderr


def test_names_are_verls_where_it_has_one() -> None:
    record: Record = {"step": 3, "lr": 1e-6, "loss": None, "snr/snr": 0.5, "eval/a/b/pass_at_k": 0.25}
    assert tracked(record, 8) == {STEP: 3, "actor/lr": 1e-6, "snr/snr": 0.5, "val-core/a/b/acc/best@8/mean": 0.25}
    table = DOCS.read_text(encoding="utf-8").partition("| metrics.jsonl | trackers |")[2].partition("\n\n")[0]
    rows = dict(line.split("`")[1::2][:2] for line in table.splitlines() if line.startswith("| `"))
    evaluations = {f"eval/<set>/{name}": made.format(set="<set>", k="<k>") for name, made in EVALUATIONS.items()}
    assert {**VERL, **evaluations}.items() <= rows.items()
