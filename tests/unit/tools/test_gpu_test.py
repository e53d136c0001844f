"""The table of `make gpu-test`: verdicts, processes that crash or hang, results, command line, registry.

`test_rehearsal` runs the code of every line on a CPU, with tiny shapes. Not covered: what only a GPU can do.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.errors import UserError
from oblr_megatron.runtime.processes import alive, identity
from tools.gpu_test import __main__ as command
from tools.gpu_test import results, runner
from tools.gpu_test.line import Bound, Line
from tools.gpu_test.lines import LINES, PROBE
from tools.gpu_test.report import ROOT, Report, read
from tools.gpu_test.results import Outcome

HERE = "tests.unit.tools.gpu_lines"
ONLY_ON_A_GPU = re.compile("^largest|8192 tokens")  # figures of tests/gpu, and of a length that a CPU takes minutes for


def line(function: str, **fields: Any) -> Line:
    return Line(**{"name": "1", "title": "a line", "measure": f"{HERE}:{function}", "minutes": 5} | fields)


def outcome(verdict: str = "ok", name: str = "1", **figures: float | str) -> Outcome:
    return Outcome(name, "a line", ["value <= 1"], verdict, "", figures, 1.0, "2026-11-23", "one GPU")


def test_a_line_that_ends_leaves_its_figures(tmp_path: Path) -> None:
    done = runner.run(line("fine", arguments={"value": 3.0}, rehearsal={"value": 7.0}), tmp_path / "logs" / "log")
    assert done.failure == "" and done.figures == {"value": 4.0, "text": "some"}
    assert runner.run(line("fine", rehearsal={"value": 7.0}), tmp_path / "log", rehearse=True).figures["value"] == 8.0


@pytest.mark.parametrize(("function", "what"), [("raises", "LookupError: nothing"), ("crashes", "SIGABRT")])
def test_a_line_that_fails_keeps_its_figures(tmp_path: Path, function: str, what: str) -> None:
    done = runner.run(line(function), tmp_path / "log")
    assert what in done.failure and done.figures == {"value": 1.0}


def test_a_line_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is passed as soon as the line has reported; its child is in another session."""
    monkeypatch.setattr(runner, "GRACE_S", 0.0)
    seen: list[str] = []

    def wait(child: Any, deadline: float, beat: Any) -> bool:
        while not (found := read(Path(child.args[4]))):
            assert child.poll() is None
        seen.extend((identity(child.pid), identity(int(found["child"]))))
        return False

    monkeypatch.setattr(runner, "_wait", wait)
    done = runner.run(line("hangs", minutes=2), tmp_path / "log")
    assert "limit of 2 minutes" in done.failure and set(done.figures) == {"child"}
    assert len(seen) == 2 and not any(map(alive, seen))


def test_the_deadline_is_one(tmp_path: Path) -> None:
    done = runner.run(line("hangs", minutes=0.001), tmp_path / "log")
    assert "limit of 0.001 minutes" in done.failure


def test_a_bound_covers_every_figure_that_it_names() -> None:
    bound = Bound("step / plain, *", 0.5, 1.1)
    figures = {"step / plain, a": 1.0, "step / plain, b": 1.2, "step / plain, c": "unknown", "other": 9.0}
    assert bound.found(figures) == {"step / plain, a": 1.0, "step / plain, b": 1.2}
    assert bound.broken(figures) == ["step / plain, b = 1.2"]
    assert bound.broken({"step / plain, a": 0.4}) == ["step / plain, a = 0.4"]
    assert str(bound) == "step / plain, * >= 0.5 and <= 1.1"


def test_verdicts() -> None:
    judged = line("fine", bounds=(Bound("value", high=1), Bound("maybe", high=1, optional=True)))
    assert judged.judge({"value": 1.0}) == ("ok", "")
    assert judged.judge({"value": 2.0}) == ("not met", "value = 2")
    assert judged.judge({"value": 1.0, "maybe": 2.0}) == ("not met", "maybe = 2")
    assert judged.judge({"other": 1.0})[0] == judged.judge({"value": "nan"})[0] == "failed"
    needy = line("fine", needs=("CUDA", "vLLM"))
    assert needy.lacks({"CUDA": "", "vLLM": "vLLM 0.32"}) == ["vLLM 0.32"]
    assert needy.lacks({"CUDA": ""}) == ["vLLM (the machine could not be examined)"]


def test_figures_survive_a_cut_line_and_are_finite(tmp_path: Path) -> None:
    path = tmp_path / "report"
    report = Report(path)
    report.put("a", 1)
    report.put("b", math.nan)
    with path.open("a") as file:
        file.write('["c", 1.')
    assert read(path) == {"a": 1.0, "b": "nan"}


def test_results_are_added_to_those_of_earlier_calls(tmp_path: Path) -> None:
    lines = {name: line("fine", name=name, bounds=(Bound("val*", high=1),)) for name in ("1", "2", "2b")}
    results.write(tmp_path, {"2b": outcome(name="2b", value=0.5), "1": outcome(value=1.0, valid=0.25)}, lines)
    found = results.load(tmp_path / "gpu.json")
    assert list(found) == ["1", "2b"], "the order of the table"
    results.write(tmp_path, found | {"2": outcome("lacks", name="2")}, lines)
    found = results.load(tmp_path / "gpu.json")
    assert list(found) == ["1", "2", "2b"] and found["1"] == outcome(value=1.0, valid=0.25)
    rows = [row for row in (tmp_path / "gpu.md").read_text().splitlines() if row.startswith("|")]
    assert rows[2] == "| 1 | a line | value <= 1 | 0.25 to 1 | ok |"
    assert len(rows) == 2 + 3 + 2 + 3 and len({row.count("|") for row in rows[:5]}) == 1
    assert "| 2b | value | 0.5 |" in rows and json.loads((tmp_path / "gpu.json").read_text())["version"] == 1


def test_a_cell_of_the_table_stays_one_cell() -> None:
    text = results.markdown([outcome("failed", note="a | b\nc")], {})
    assert "| 1 | note | a \\| b c |" in text.splitlines()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Line]:
    """A table of three lines that imports no torch."""
    bounds = (Bound("value", high=2),)
    lines = {
        "1": line("fine", needs=("CUDA",), bounds=bounds),
        "2": line("fine", name="2", bounds=bounds, arguments={"value": 5.0}),
        "3": line("crashes", name="3", bounds=bounds),
    }
    monkeypatch.setattr(command, "LINES", lines)
    monkeypatch.setattr(command, "PROBE", line("probe", name="probe"))
    return lines


def test_the_command_ends_with_1_unless_all_is_well(
    tmp_path: Path, small: dict[str, Line], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--lines", "1", "--out", str(tmp_path)]) == 0
    assert command.main(["--lines", "2", "--out", str(tmp_path)]) == 1
    assert command.main(["--lines", "3", "--out", str(tmp_path)]) == 1
    found = results.load(tmp_path / "gpu.json")
    assert {name: one.verdict for name, one in found.items()} == {"1": "ok", "2": "not met", "3": "failed"}
    assert found["3"].figures == {"value": 1.0} and found["1"].machine == "a machine"
    assert "value = 6" in capsys.readouterr().out


def test_a_line_that_lacks_something_is_not_run(
    tmp_path: Path, small: dict[str, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PROBE", line("probe", name="probe", arguments={"missing": "CUDA 13"}))
    assert command.main(["--lines", "1", "--out", str(tmp_path)]) == 0
    found = results.load(tmp_path / "gpu.json")["1"]
    assert (found.verdict, found.why, found.figures) == ("lacks", "CUDA 13", {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_figures_and_leaves_out_the_rest(tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes while line 2 hangs, after its first figure; it goes to the command, as from a batch system."""
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", HERE, str(out)], cwd=ROOT)
    try:
        log, deadline = out / "logs" / "line_2.log", time.monotonic() + 60
        while not log.exists() or "reported" not in log.read_text(encoding="utf-8"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        child = identity(int(log.read_text(encoding="utf-8").split()[-1]))
        process.send_signal(number)
        assert process.wait(60) == 1
    finally:
        process.kill()
    found = results.load(out / "gpu.json")
    assert {name: (one.verdict, one.why) for name, one in found.items()} == {
        "1": ("ok", ""),
        "2": ("failed", runner.INTERRUPTED),
    }
    assert found["2"].figures and not alive(child)


def test_bad_input_ends_with_2(tmp_path: Path, small: dict[str, Line], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    for text in ("{", "[]", '{"version": 2, "lines": {}}', '{"version": 1, "lines": {"1": {"name": "1"}}}'):
        (tmp_path / "damaged" / "gpu.json").write_text(text)
        assert command.main(["--out", str(tmp_path / "damaged")]) == 2
    assert command.main(["--out", str(tmp_path / "file")]) == 2
    assert command.main(["--lines", "9"]) == 2
    assert command.main(["--lines"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and all("Fix: " in text for text in said.err.strip().splitlines())
    with pytest.raises(UserError) as error:
        command.parse(["--lines", "1", "9"])
    assert error.value.where == "--lines"


def test_a_rehearsal_does_not_touch_the_results_of_a_gpu() -> None:
    assert command.parse(["--rehearse"]).out != command.parse([]).out == Path("run/gpu")


@pytest.mark.parametrize("name", [*LINES, PROBE.name])
def test_every_line_can_be_called(name: str) -> None:
    """Its function exists and takes its arguments; its needs are known; nothing is expected that cannot be judged."""
    from tools.gpu_test.needs import NEEDS

    one = {PROBE.name: PROBE, **LINES}[name]
    module, function = one.measure.split(":")
    signature = inspect.signature(getattr(import_module(f"tools.gpu_test.{module}"), function))
    for arguments in (one.arguments, {**one.arguments, **one.rehearsal}):
        signature.bind(None, **arguments)
        json.dumps(arguments)
    assert set(one.needs) <= set(NEEDS) and (one.bounds or one is PROBE)
    assert all(bound.low is not None or bound.high is not None for bound in one.bounds)


def test_processes_by_gpu() -> None:
    from tools.gpu_test.runs import count_processes

    assert count_processes("GPU-a, 11\nGPU-a, 12\nGPU-b, 13\nno devices\n") == {"GPU-a": 2, "GPU-b": 1}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(LINES))
def test_rehearsal(tmp_path: Path, name: str) -> None:
    """The code of the line runs on a CPU, and reports the figures that its expectations name."""
    one = LINES[name]
    done = runner.run(one, tmp_path / "log", rehearse=True)
    assert done.failure == "", (tmp_path / "log").read_text()[-3000:]
    absent = [bound.pattern for bound in one.bounds if not bound.optional and not bound.found(done.figures)]
    assert [pattern for pattern in absent if not ONLY_ON_A_GPU.search(pattern)] == []
