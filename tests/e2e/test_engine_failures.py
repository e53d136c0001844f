"""An error inside vLLM's worker: the engine's process ends, the engine is replaced, and the samples do not show it.

Real engines, next to the trainer and behind real servers, with a worker that raises what CUDA raises, or hangs.

Not covered: CUDA, an engine of several workers of which one dies (test_wide_engine.py), sleep and wake on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from oblr_megatron.errors import EngineLostError, RunError
from oblr_megatron.rollout import servers
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.rollout.servers import ServerEngines
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.failing_worker import HANG, VARIABLE, WORKER, arm
from tests.e2e.tiny_rollout import ONE_RANK, Weights, change, engine_processes, largest_error, make_config, sample
from tests.tiny import make_hf_dir

PARITY = 1e-4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("failures") / "model", head_dim=32)


@pytest.fixture
def model(path: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(path)


@pytest.fixture(scope="module")
def colocated(path: Path) -> Iterator[tuple[Any, Path]]:
    """Engines that may be restarted once in a row, and the file that arms them."""
    file = path.parent / "colocated"
    config = make_config(path, path.parent / "run", max_restarts=1)
    config.rollout.vllm.update(WORKER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(file))
        engines = ColocatedEngines(config, ONE_RANK)
        yield engines, file
        engines.close()
    assert not engine_processes()


def test_an_error_in_a_decoding_step_is_a_loss(colocated: tuple[Any, Path], model: Any) -> None:
    engines, file = colocated
    engines.push(Weights(model), 1)
    expected, victim = sample(engines), engines._engine.pid
    arm(file, "execute_model")
    assert sample(engines) == expected
    assert_replaced(engines, victim)
    assert "illegal memory access" in (engines._config.run_dir / "logs" / "engine-0.log").read_text()


@pytest.mark.nightly
def test_an_error_in_a_push_is_a_loss(colocated: tuple[Any, Path], model: Any) -> None:
    engines, file = colocated
    change(model, seed=2)
    victim = engines._engine.pid
    arm(file, "update_weights", "AssertionError")
    engines.push(Weights(model), 2)
    assert_replaced(engines, victim)
    assert largest_error(model, sample(engines)) < PARITY


def test_input_that_vllm_refuses_loses_no_engine(colocated: tuple[Any, Path], model: Any) -> None:
    engines, file = colocated
    sample(engines, count=1)
    same = engines._engine.pid
    arm(file, "update_weights", "ValueError")
    with pytest.raises(RunError, match="illegal memory") as refused:
        engines.push(Weights(model), 3)
    assert not isinstance(refused.value, EngineLostError)
    with pytest.raises(RunError, match="describes no bucket") as refused:
        engines._engine.call("update_push", {"holding": None, "update_info": {"names": []}}, what="a test", seconds=60)
    assert not isinstance(refused.value, EngineLostError)
    engines.push(Weights(model), 3)
    assert engines._engine.pid == same and engines.metrics() == {"rollout/restarts": 0}


def test_an_error_in_the_sleep_is_a_loss(colocated: tuple[Any, Path]) -> None:
    engines, file = colocated
    handle = engines._engine
    arm(file, "sleep")
    with pytest.raises(EngineLostError, match=r"(?s)engine 0 failed while rank 0 waited for the sleep: .*the end of"):
        handle.sleep(1)
    assert handle.lost and not psutil.pid_exists(handle.pid)


def assert_replaced(engines: Any, victim: int) -> None:
    assert engines.metrics() == {"rollout/restarts": 1}
    assert not psutil.pid_exists(victim) and [one.pid for one in engine_processes()] == [engines._engine.pid]


class FailingServer(ApiServer):
    @property
    def file(self) -> Path:
        return self.log.with_suffix("")

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.e2e.failing_worker", str(self.model), str(self.port)]
        environment = os.environ | {"OBLR_API_KEY": self.key, "OMP_NUM_THREADS": "1", VARIABLE: str(self.file)}
        with self.log.open("ab") as output:
            self.process = self._popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, pass_fds=())


@pytest.fixture(scope="module")
def two_servers(path: Path) -> Iterator[list[FailingServer]]:
    made = [FailingServer(path, path.parent / f"server-{number}.log") for number in range(2)]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def two(two_servers: list[FailingServer]) -> list[FailingServer]:
    """Both servers are up; one that the last test ended is started again."""
    for server in two_servers:
        if server.process.poll() is not None:
            server.start()
    for server in two_servers:
        server.wait_ready()
    return two_servers


@pytest.fixture
def engines_of(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    opened: list[ServerEngines] = []

    def make(two: list[FailingServer], **limits: Any) -> ServerEngines:
        urls = [server.url for server in two]
        config = make_config(path, tmp_path / "run", servers=urls, max_restarts=0, vllm=WORKER, **limits)
        opened.append(ServerEngines(config, ONE_RANK))
        return opened[-1]

    yield make
    for engines in opened:
        engines.close()


@pytest.mark.parametrize("method", ["execute_model", "update_weights"])
def test_a_server_with_an_error_inside_ends_and_the_other_goes_on(
    two: list[FailingServer], engines_of: Callable[..., Any], model: Any, method: str
) -> None:
    """No restart is allowed, so the run would end with any other outcome than the loss of one server."""
    engines = engines_of(two)
    engines.push(Weights(model), 1)
    expected = [one.response_ids for one in sample(engines)]
    arm(two[0].file, method)
    if method == "execute_model":
        assert [one.response_ids for one in sample(engines)] == expected
        assert two[0].process.wait(60) == 1, "it does not come back with a broken engine"
    change(model, seed=3)
    engines.push(Weights(model), 2)
    assert two[0].process.wait(60) == 1
    assert not psutil.pid_exists(two[0].process.pid) and "illegal memory access" in two[0].log.read_text()
    assert largest_error(model, sample(engines)) < PARITY


@pytest.mark.nightly
def test_the_prompts_of_a_server_whose_engine_hangs_are_sampled_by_the_other(
    two: list[FailingServer],
    engines_of: Callable[..., Any],
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its HTTP server answers."""
    monkeypatch.setattr(servers, "SILENCE_SECONDS", 6.0)
    engines = engines_of(two, generate_timeout_s=40)
    engines.push(Weights(model), 1)
    expected = [one.response_ids for one in sample(engines)]
    arm(two[0].file, "execute_model", HANG)
    begin = time.monotonic()
    assert [one.response_ids for one in sample(engines)] == expected
    assert time.monotonic() - begin < 40
    assert two[0].call("/health")[0] == 200
    assert "has not answered for" in (engines._servers.servers[0].lost or "")
