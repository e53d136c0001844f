"""The Python API trains, evaluates and fails as the command line does; the notebook under examples/ runs.

Not covered: an interrupt by Jupyter's own button.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

import oblr_megatron as oblr
from oblr_megatron.runtime.processes import alive, identity
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.conftest import LIMIT_S, ROOT, environment, records, wait_for_lines
from tests.e2e.forked_processes import popen

CONFIG = ROOT / "examples" / "tiny_cpu" / "config.toml"
NOTEBOOK = ROOT / "examples" / "notebook" / "train.ipynb"


@pytest.fixture
def config(
    overrides: Callable[..., list[str]], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> oblr.Config:
    """A run of three steps on saved samples, so that it starts no engine. The API's commands are forked."""
    monkeypatch.chdir(ROOT)  # the reward function is found there
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return oblr.load_config(CONFIG, [*overrides(tmp_path / "run", num_steps=3, rollout__replay=saved / "rollouts")])


def test_a_run_is_the_command_lines(config: oblr.Config, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = oblr.train(config)
    names = ("step", "reward/mean", "gradnorm/sq_mean", "actor/lr")
    before = [{name: record[name] for name in names if name in record} for record in records(saved)]
    assert [{name: record[name] for name in names if name in record} for record in run.records] == before
    assert run.report.is_file() and run.model is not None and (run.model / "model.safetensors").is_file()
    assert "step 3/3" in capfd.readouterr().out
    with pytest.raises(oblr.UserError, match="Fix: "):  # the directory holds a run now
        oblr.train(config)
    assert len(oblr.train(config, resume=True).records) == 3  # a finished run is not trained again


def test_messages_are_those_of_the_command(
    config: oblr.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # so that the API starts a new interpreter, as for a user
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "none"})})
    with pytest.raises(oblr.UserError) as caught:
        oblr.train(wrong)
    command = [sys.executable, "-m", "oblr_megatron.cli", "train", str(CONFIG), f"model.path={tmp_path / 'none'}"]
    said = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert said.returncode == 2 and said.stderr == f"error: {caught.value}\n"
    assert not config.run_dir.exists()


def test_evaluation_of_a_set(tiny: Path, config: oblr.Config, capfd: pytest.CaptureFixture[str]) -> None:
    found = oblr.evaluate(tiny / "model", config, data={"sums": tiny / "heldout.jsonl"}, k=2, overrides=["seed=3"])
    assert list(found) == ["sums"] and found["sums"]["k"] == 2
    accuracy = found["sums"]["accuracy"]
    assert 0 <= accuracy["low"] <= accuracy["value"] <= accuracy["high"] <= 1
    assert f"sums: accuracy {accuracy['value']:.1%}" in capfd.readouterr().out


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ApiServer]:
    """Samples for the runs of scripts, so that they need not start an engine each."""
    with ApiServer(tiny / "model", tiny / "server-of-scripts.log", max_model_len=32) as one:
        yield one


def start_long(keys: list[str], run_dir: Path) -> subprocess.Popen[str]:
    """A script that trains for 400 steps through the API, two steps later."""
    script = f"import oblr_megatron as oblr; oblr.train(oblr.load_config({str(CONFIG)!r}, {keys!r}))"
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    variables = environment() | {"OBLR_API_KEY": KEY}
    caller = popen(command, cwd=ROOT, env=variables, text=True, stdout=pipe, stderr=pipe)
    wait_for_lines(2, run_dir / "metrics.jsonl", caller)
    return caller


def test_an_interrupt_saves_a_checkpoint(
    overrides: Callable[..., list[str]], server: ApiServer, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"num_steps": 400, "num_prompts": 4, "rollout__servers": [server.url]}
    caller = start_long(overrides(run_dir, **options, checkpoint__every_steps=400), run_dir)
    caller.send_signal(signal.SIGINT)
    _, errors = caller.communicate(timeout=LIMIT_S)
    assert caller.returncode != 0 and errors.rstrip().endswith("KeyboardInterrupt")
    done = records(run_dir)[-1]["step"]
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == [f"step_{done:08d}"]


def test_a_killed_caller_takes_its_run_with_it(
    overrides: Callable[..., list[str]], server: ApiServer, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"num_steps": 400, "num_prompts": 4, "rollout__servers": [server.url]}
    caller = start_long(overrides(run_dir, **options, checkpoint__every_steps=0), run_dir)
    (child,) = (child.pid for child in psutil.Process(caller.pid).children() if "die_with" in str(child.cmdline()))
    of = identity(child)
    caller.kill()
    caller.communicate(timeout=LIMIT_S)
    end = time.monotonic() + LIMIT_S
    while alive(of):
        assert time.monotonic() < end, "the run goes on without its caller"
        time.sleep(0.1)
    assert records(run_dir)[-1]["step"] < 400


@pytest.mark.nightly
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, with its files in another folder."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells[1].source = notebook.cells[1].source.replace('OUT = "run/notebook"', f"OUT = {str(tmp_path)!r}")
    assert str(tmp_path) in notebook.cells[1].source
    client = NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()  # raises on an exception in a cell
    last = notebook.cells[-1].outputs[-1]["text"]
    accuracy = float(last.partition("mean@4 {'value': ")[2].partition(",")[0])
    assert accuracy > 0.6, last  # 0.47 before the training
    assert os.path.getsize(tmp_path / "run" / "report.html") > 10_000
