"""An engine process dies, hangs or does not start while no restart is allowed; or its trainer dies.

The error comes within seconds and says who waited for what; no process is left behind. Also: three engines started with
the same spec sample the same.

Not covered: restarts (test_recovery.py), several ranks (test_rollout_ranks.py), engines of several processes (GPUs).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from oblr_megatron.errors import DeadlineError, RunError
from oblr_megatron.runtime.stopping import SIGNALS
from tests.e2e.conftest import ROOT, environment
from tests.e2e.forked_processes import popen
from tests.e2e.tiny_rollout import Weights, engine_processes, sample, start
from tests.tiny import make_hf_dir

PROMPTLY = 30.0  # seconds; a deadline would come after 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_hf_dir(tmp_path_factory.mktemp("failures") / "model", head_dim=32)


@pytest.fixture(scope="module")
def three(model):
    """Three engines of one model with their first samples; each of the failure tests ends one of them."""
    limits = {"generate_timeout_s": 60, "max_restarts": 0}
    engines = [start(model, model.parent / name, **limits) for name in ("hang", "generate", "push")]
    yield [(one, sample(one)) for one in engines]  # each starts while another is waited for
    for one in engines:
        one.close()
        one.close()
    assert not engine_processes()


def test_fresh_engines_sample_the_same_to_the_last_bit(three):
    (_, first), (_, second), (_, third) = three
    assert first == second == third


def test_an_engine_ignores_signals_to_stop_the_run(three):
    """SLURM sends it to every process of the job; an engine ignores it, idle or in the middle of a step."""
    (engines, _), (other, _), _ = three
    pid = engines._engine.pid
    os.killpg(pid, signal.SIGTERM)
    timers = [threading.Timer(0.3, os.killpg, (pid, number)) for number in SIGNALS]
    for timer in timers:
        timer.start()
    draws = []
    while not draws or not all(timer.finished.is_set() for timer in timers):  # the signals come in the middle of one
        draws.append(sample(engines, count=60, group_size=16))
    assert draws == [sample(other, count=60, group_size=16) for _ in draws]
    assert engines._engine.pid == pid and psutil.pid_exists(pid)


def test_processes_started_by_an_engine_ignore_them_too():
    """vLLM's workers set their own handlers. So does this child, which prints if one is called."""
    child = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('ended')); print('up', flush=True); input()"
    program = (
        "import subprocess, sys\nfrom oblr_megatron.engine.worker import outlive\n"
        "from oblr_megatron.runtime.stopping import SIGNALS\noutlive(SIGNALS)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\nprint('whole')"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
    ) as one:
        assert one.stdout is not None and one.stdout.readline() == b"up\n"
        for number in SIGNALS:
            os.killpg(one.pid, number)
        time.sleep(0.2)
        assert one.communicate(b"\n", timeout=10)[0] == b"whole\n"


def test_an_engine_that_hangs_is_given_up_at_the_deadline(three):
    engines, _ = three[0]
    handle = engines._engine
    handle.deadlines = replace(handle.deadlines, generate=1.5)
    os.kill(handle.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank 0 .*1.5 s .*12 x 4 samples of engine 0"):
        sample(engines)
    assert time.monotonic() - begin < 1.5 + PROMPTLY
    assert_gone(engines, handle.pid, "was killed: rank 0")


def test_an_engine_killed_while_it_generates(three):
    engines, _ = three[1]
    pid = engines._engine.pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(RunError, match=rf"engine 0 \(process {pid}\) .*SIGKILL.* rank 0") as error:
        sample(engines, count=400, group_size=64)  # half a minute of sampling
    assert time.monotonic() - begin < 0.5 + PROMPTLY
    assert "generate/logs/engine-0.log" in str(error.value) and "INFO" in str(error.value), "it quotes the log"
    assert_gone(engines, pid, "SIGKILL")


def test_an_engine_killed_during_a_push(three, model):
    """The source is still iterated to its end, because other ranks would be in the middle of gathers."""
    engines, _ = three[2]
    pid = engines._engine.pid
    yielded = []

    class Killing(Weights):
        def __iter__(self):
            for index, (name, tensor) in enumerate(super().__iter__()):
                if index == 3:
                    os.kill(pid, signal.SIGKILL)
                yielded.append(name)
                yield name, tensor

    source = Killing(Qwen3ForCausalLM.from_pretrained(model))
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"engine 0 .*SIGKILL while rank 0 waited for push 1;"):
        engines.push(source, 1)
    assert time.monotonic() - begin < PROMPTLY
    assert yielded == list(source.tensors)
    with pytest.raises(RunError, match="push 1 did not reach every engine"):
        sample(engines)
    assert_gone(engines, pid, "SIGKILL")


def assert_gone(engines, pid, reason):
    """The process is reaped, and the next call fails at once with the reason."""
    assert not psutil.pid_exists(pid)
    engines._unusable = None
    begin = time.monotonic()
    with pytest.raises(RunError, match=reason):
        sample(engines)
    assert time.monotonic() - begin < PROMPTLY


@pytest.mark.nightly
def test_a_model_vllm_cannot_run_fails_the_start_with_its_reason(tmp_path):
    engines = start(make_hf_dir(tmp_path / "model", head_dim=16), tmp_path / "run")
    with pytest.raises(RunError, match=r"(?s)engine 0 failed while rank 0 waited for the start: .*head_dim=16"):
        sample(engines)
    assert not engine_processes()


def test_a_slow_start_is_given_up_at_the_deadline(model, tmp_path):
    engines = start(model, tmp_path, start_timeout_s=0.5, max_restarts=0)
    os.kill(engines._engine.pid, signal.SIGSTOP)  # or it might be ready first, if this process stalls
    with pytest.raises(DeadlineError, match=r"rank 0 .*0.5 s .*the start of engine 0"):
        sample(engines)
    assert not engine_processes()


def test_an_engine_killed_while_it_starts(model, tmp_path):
    engines = start(model, tmp_path, max_restarts=0)
    os.kill(engines._engine.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"SIGKILL .*rank 0 waited for the start;"):
        sample(engines)
    assert time.monotonic() - begin < PROMPTLY


def test_closing_while_it_starts_leaves_nothing(model, tmp_path):
    engines = start(model, tmp_path)
    engines.close()
    assert not engine_processes()
    with pytest.raises(RunError, match=r"engine 0 .*closed"):
        sample(engines)


TRAINER = """
import sys, time
from pathlib import Path
from tests.e2e.tiny_rollout import start
engines = start(Path(sys.argv[1]), Path(sys.argv[2]))
print(engines._engine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["at once", pytest.param("while vllm starts", marks=pytest.mark.nightly)])
def test_an_engine_does_not_outlive_its_trainer(model, tmp_path, when):
    command = [sys.executable, "-c", TRAINER, str(model), str(tmp_path)]
    with popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as trainer:
        engine = psutil.Process(int(trainer.stdout.readline()))
        log = tmp_path / "logs" / "engine-0.log"
        while when != "at once" and not log.stat().st_size:
            time.sleep(0.05)
        trainer.kill()
    _, alive = psutil.wait_procs([engine], timeout=20)
    assert not alive
