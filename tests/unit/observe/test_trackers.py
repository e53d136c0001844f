"""Trackers with their real packages, offline: what arrives, what is lost, how they end.

Values are read back through each package's own API and compared with metrics.jsonl. Not covered: their servers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import Record
from oblr_megatron.observe.trackers.feed import Trackers
from oblr_megatron.observe.trackers.names import EVALUATIONS, STEP, VERL, tracked
from oblr_megatron.observe.trackers.registry import check_trackers
from tests.unit.observe.following import ALARM, COLUMNS, ROWS, configured, fix_without, follow, of_file, requeued

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


def test_tensorboard_gets_finite_values_and_alarms(offline: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, said = configured(offline / "run", "tensorboard"), []
    with Trackers(config, said.append, rank=0, resume_step=None) as trackers:
        trackers.start()
        trackers.log({"step": 1, "lr": 0.5, "loss": None})
        trackers.log({"step": 2, "lr": 0.25, "loss": 2.0})
        trackers.alarm(ALARM)
    time.sleep(1)  # files are read in the order of their names, which hold whole seconds
    with Trackers(config, said.append, rank=0, resume_step=1) as trackers:
        trackers.start()
        trackers.log({"step": 2, "lr": 0.125, "loss": 4.0})
    assert said == []
    events = EventAccumulator(str(config.run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [(1, 0.5), (2, 0.125)]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(2, 4.0)]
    assert ALARM.text.encode() in b"".join(path.read_bytes() for path in (config.run_dir / "tensorboard").iterdir())


def test_a_requeued_job_continues_the_same_run(offline: Path) -> None:
    config = configured(offline / "run", "wandb")
    run_id, steps = requeued(config)
    first, second = wandb_runs(config.run_dir)
    assert first["run"][0].run_id == second["run"][0].run_id == run_id
    assert [row[STEP] for row in wandb_values(first) + wandb_values(second)] == steps


@pytest.mark.parametrize(("names", "part"), [(["wandbb"], "wandb"), (["wandb", "wandb"], "once")])
def test_names_are_checked_before_the_run(names: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        check_trackers(names)
    assert caught.value.where == "config: log.trackers" and part in caught.value.fix


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    assert "pip install -e '.[wandb]'" in fix_without("wandb", tmp_path)


def test_names_are_verls_where_it_has_one() -> None:
    record: Record = {"step": 3, "lr": 1e-6, "loss": None, "snr/snr": 0.5, "eval/a/b/mean_at_k": 0.25}
    assert tracked(record, 8) == {STEP: 3, "actor/lr": 1e-6, "snr/snr": 0.5, "val-core/a/b/acc/mean@8": 0.25}
    assert tracked({"eval/a/pass_at_k": 0.5}, 8) == {"eval/a/pass_at_k": 0.5}, "verl's best@k is another quantity"
    table = DOCS.read_text(encoding="utf-8").partition("| metrics.jsonl | trackers |")[2].partition("\n\n")[0]
    rows = dict(line.split("`")[1::2][:2] for line in table.splitlines() if line.startswith("| `"))
    evaluations = {f"eval/<set>/{name}": made.format(set="<set>", k="<k>") for name, made in EVALUATIONS.items()}
    assert {**VERL, **evaluations}.items() <= rows.items()
