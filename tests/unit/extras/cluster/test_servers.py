"""Arguments and devices of a server's task, and the wait for servers; tests/e2e/test_slurm.py starts a real one."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import signal
import socket
import sys
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from oblr_megatron.extras.cluster import servers
from tests.distributed.launch import PRELOAD
from tests.ports import free_port
from tests.unit.configs import config_with
from tests.unit.engine.test_serve_command import serve_options
from tests.unit.waiting import until


def test_each_task_has_its_port_and_its_gpus() -> None:
    config = config_with(
        model={"dtype": "bfloat16", "moe_routing_replay": True},
        data={"max_prompt_tokens": 100},
        rollout={"max_response_tokens": 400, "max_num_seqs": 7},
    )
    environment = {"SLURMD_NODENAME": "gpu-07", "SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "8"}
    given = serve_options(*servers.serve_arguments(config, environment, 12002, 4))
    assert (given.host, given.port, given.tensor_parallel_size) == ("gpu-07", 12003, 4)
    assert given.moe_routing_replay and given.lora is None
    assert (given.dtype, given.max_model_len, given.max_num_seqs) == ("bfloat16", 500, 7)
    assert given.api_key_env == "OBLR_API_KEY"
    assert servers.devices_of(environment, 4) == "4,5,6,7"
    assert servers.devices_of(environment | {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, 2) == "1,0"
    assert servers.devices_of({"SLURM_LOCALID": "1"}, 4) is None


@pytest.mark.parametrize(("pushed", "lora"), [("adapter", "16:q_proj,o_proj"), ("merged", "None")])
def test_a_run_that_pushes_adapters_has_servers_that_take_them(pushed: str, lora: str) -> None:
    model = {"dtype": "bfloat16", "lora": {"rank": 16, "targets": ["q_proj", "o_proj"]}}
    environment = {"SLURMD_NODENAME": "gpu-07", "SLURM_LOCALID": "0"}
    config = config_with(model=model, rollout={"lora": pushed})
    assert str(serve_options(*servers.serve_arguments(config, environment, 12002, 1)).lora) == lora


@pytest.fixture(autouse=True)
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters set a proxy for the network outside, which cannot reach their nodes."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b'{"silent": 0.0}')

    def log_message(self, *_: object) -> None:
        pass


SERVER = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
events = open(sys.argv[1], "a")
print(os.getpid(), file=events, flush=True)
if sys.argv[2] == "fails":
    sys.exit(1)
if sys.argv[2] == "starts":
    signal.pause()
if sys.argv[2] == "refuses" and sum(line.strip().isdecimal() for line in open(sys.argv[1])) == 2:
    sys.exit(2)
silences = iter([0, 5, 20])
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        silent = next(silences) if sys.argv[2] == "hangs" else 0
        print("asked" if silent < 20 else "hung", file=events, flush=True)
        self.wfile.write(b'{"silent": %d}' % silent)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Answers).serve_forever()
"""


def test_a_lost_server_is_started_again_until_a_signal(tmp_path: Path) -> None:
    events, port = tmp_path / "events", free_port()
    keeper = keep(events, "serves", port=port)
    until(lambda: read(events)[1:2] == ["asked"])
    os.kill(int(read(events)[0]), signal.SIGKILL)
    until(lambda: len(starts(events)) == 2 and read(events)[-1] == "asked")
    keeper.terminate()
    assert status_of(keeper) == 7 and len(starts(events)) == 2


def test_a_server_that_was_ready_is_started_again_after_a_refusal(tmp_path: Path) -> None:
    """Its options were right, so the cause may pass: a file server fails over, the port is still taken."""
    events, port = tmp_path / "events", free_port()
    keeper = keep(events, "refuses", port=port)
    until(lambda: read(events)[1:2] == ["asked"])
    os.kill(int(read(events)[0]), signal.SIGKILL)
    until(lambda: len(starts(events)) == 3 and read(events)[-1] == "asked")
    keeper.terminate()
    assert status_of(keeper) == 7


def test_a_server_whose_engine_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    events = tmp_path / "events"
    keeper = keep(events, "hangs")
    until(lambda: len(starts(events)) == 2)
    keeper.terminate()
    status_of(keeper)
    assert read(events)[1:4] == ["asked", "asked", "hung"], "a busy engine is left alone"


def test_a_start_has_a_deadline(tmp_path: Path) -> None:
    events = tmp_path / "events"
    assert status_of(keep(events, "starts", start_s=1)) == 128 + signal.SIGKILL
    assert len(starts(events)) <= 1, "a slow one is killed before it writes"


def test_a_server_that_never_was_ready_is_not_started_again(tmp_path: Path) -> None:
    events = tmp_path / "events"
    assert status_of(keep(events, "fails")) == 1 and len(read(events)) == 1


def keep(events: Path, how: str, *, port: int | None = None, start_s: float = 60) -> BaseProcess:
    """A process that keeps a server, forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    arguments = (dict(os.environ), str(events), how, port or free_port(), start_s)
    keeper = context.Process(target=_keep, args=arguments, daemon=True)
    keeper.start()
    return keeper


def _keep(environment: dict[str, str], events: str, how: str, port: int, start_s: float) -> None:
    os.environ.update(environment)
    servers.PAUSE_S = servers.POLL_S = 0.1
    command = [sys.executable, "-c", SERVER, events, how, str(port)]
    sys.exit(servers.kept(command, f"http://127.0.0.1:{port}", start_s=start_s, hang_s=10))


def status_of(keeper: BaseProcess) -> int | None:
    keeper.join(60)
    return keeper.exitcode


def starts(events: Path) -> list[str]:
    """Process ids of the servers, in their order."""
    return [word for word in read(events) if word.isdecimal()]


def read(events: Path) -> list[str]:
    return events.read_text().split() if events.exists() else []


def test_servers_are_waited_for_until_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert servers.main(["wait", url, "--deadline", "30"]) == 0
        assert servers.main(["wait", url, "http://127.0.0.1:9", "--deadline", "0.1"]) == 1
        server.shutdown()
    said = capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0\r\n"), daemon=True).start()
        assert servers.silence(f"http://127.0.0.1:{other.getsockname()[1]}") is None, "another service has the port"
    assert "1 of 2 servers" in said and "http://127.0.0.1:9" in said and url not in said
