"""Keeps vLLM servers running as tasks of a SLURM step, and waits until all are ready (slurm/lib.sh).

    srun --ntasks-per-node=8 python -m oblr_megatron.extras.cluster.servers start CONFIG.toml --port 12002
    python -m oblr_megatron.extras.cluster.servers wait http://gpu-07:12002 http://gpu-07:12003 --deadline 1800

The run's config defines model and engine settings. Task k of a node uses port + k and the GPUs from
k * tensor_parallel_size on. The API key is in OBLR_API_KEY. A server that was ready and ends by itself, or hangs, is
started again; the trainer finds it at its next push.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.checks.vllm_options import serve_words
from oblr_megatron.config import Config, load_config
from oblr_megatron.engine.http_messages import Health
from oblr_megatron.errors import EXIT_OK, EXIT_SIGNAL, EXIT_USER, RunError
from oblr_megatron.rollout.placement import adapter_shape, engine_dtype
from oblr_megatron.rollout.server_client import silences
from oblr_megatron.runtime.command_line import guarded, parse
from oblr_megatron.runtime.processes import python_module

POLL_S, ANSWER_S = 1.0, 5.0
START_S = 1800.0  # of a server, as in slurm/lib.sh: the script waits so long for the first start
PAUSE_S = 5.0  # before a server is started again: a killed one may still hold memory of its GPUs
MOST_FAILURES = 3  # starts in a row
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a cluster's proxy does not reach its nodes


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status."""

    def run() -> int:
        options = parse(_parser(), arguments)
        return int(options.function(options))

    return guarded(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oblr_megatron.extras.cluster.servers")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    start = commands.add_parser("start", help="run the server of this SLURM task, and start it again if it is lost")
    start.add_argument("config", type=Path)
    start.add_argument("overrides", nargs="*", metavar="section.key=value")
    start.add_argument("--port", type=int, required=True, help="port of the first server of a node")
    start.add_argument("--tensor-parallel-size", type=int, default=1)
    start.set_defaults(function=_start)
    wait = commands.add_parser("wait", help="wait until all servers answer")
    wait.add_argument("urls", nargs="+")
    wait.add_argument("--deadline", type=float, required=True, help="seconds")
    wait.set_defaults(function=_wait)
    return parser


def _start(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    words = serve_arguments(config, os.environ, options.port, options.tensor_parallel_size)
    devices = devices_of(os.environ, options.tensor_parallel_size)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    host, port = address_of(os.environ, options.port)
    command = [*python_module("oblr_megatron.cli"), "serve", *words, "--die-with-parent"]
    _, hang_s = silences(config.rollout)
    start_s = max(config.rollout.start_timeout_s, float(os.environ.get("OBLR_SERVERS_S", START_S)))
    return kept(command, f"http://{host}:{port}", start_s=start_s, hang_s=hang_s)


def kept(command: Sequence[str], url: str, *, start_s: float, hang_s: float) -> int:
    """Run a server, and start it again whenever it ends after it was ready; returns its last exit status.

    A signal to this process, status 0, a mistake of the user (status 2 before it was ever ready), a failed first start,
    and MOST_FAILURES failed starts in a row end it for good.

    Args:
        command: starts the server.
        url: where it answers.
        start_s: a server that is not ready after this many seconds is killed.
        hang_s: kill a server if its engine gives no answer for this many seconds.
    """
    server: subprocess.Popen[bytes] | None = None
    stopped, right, failures = False, False, MOST_FAILURES - 1  # the first start has one try

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        if server is not None:
            server.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while True:
        server = subprocess.Popen(command)
        was_ready, heard = False, time.monotonic()
        while server.poll() is None:
            if stopped:  # perhaps between the start and its result
                server.terminate()
            silent, now = silence(url), time.monotonic()
            if silent is not None:
                was_ready, heard = True, now - silent
            if now - heard > (limit := hang_s if was_ready else start_s):
                what = "has not answered" if was_ready else "is not ready"
                print(f"the server {what} after {limit:g} s: it is killed", flush=True)
                server.kill()
            time.sleep(POLL_S)
        status = server.returncode
        failures = 0 if was_ready else failures + 1
        right |= was_ready  # its options; a later status 2 has a cause that may pass
        refused = status == EXIT_OK or (status == EXIT_USER and not right)
        if failures < MOST_FAILURES and not stopped and not refused:
            how = f"status {status}" if status >= 0 else signal.Signals(-status).name
            print(f"the server ended ({how}); it is started again in {PAUSE_S:g} s", flush=True)
            time.sleep(PAUSE_S)
            if not stopped:
                continue
        return status if status >= 0 else EXIT_SIGNAL - status


def serve_arguments(config: Config, environment: Mapping[str, str], port: int, tensor_parallel_size: int) -> list[str]:
    """Arguments of `oblr-megatron serve` for this task.

    `rollout.gpu_memory_utilization` is for engines on the trainer's GPUs: a server keeps the default of `serve`.
    """
    rollout = config.rollout
    host, own_port = address_of(environment, port)
    values = {
        "model": config.model.path,
        "host": host,
        "port": own_port,
        "dtype": str(engine_dtype(config)).removeprefix("torch."),
        "head-dtype": config.model.head_dtype,
        "quantization": rollout.quantization,
        "speculation": rollout.speculation,
        "max-model-len": max_model_len(config),
        "max-num-seqs": rollout.max_num_seqs,
        "kv-cache-gib": rollout.kv_cache_gib,
        "tensor-parallel-size": tensor_parallel_size,
        "num-threads": rollout.num_threads,
        "speculation-below": rollout.speculation_below,
        "lora": adapter_shape(config),
    }
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    routes = ["--moe-routing-replay"] if config.model.moe_routing_replay else []
    return [*words, *routes, *serve_words(rollout.vllm)]


def address_of(environment: Mapping[str, str], port: int) -> tuple[str, int]:
    """Host and port of this task's server."""
    return environment["SLURMD_NODENAME"], port + int(environment["SLURM_LOCALID"])


def devices_of(environment: Mapping[str, str], tensor_parallel_size: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of this task's server; None if SLURM assigned no GPUs.

    >>> devices_of({"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "8"}, 2)
    '2,3'
    """
    first = int(environment["SLURM_LOCALID"]) * tensor_parallel_size
    if "CUDA_VISIBLE_DEVICES" in environment:
        visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
    elif "SLURM_GPUS_ON_NODE" in environment:
        visible = [str(number) for number in range(int(environment["SLURM_GPUS_ON_NODE"]))]
    else:
        return None
    return ",".join(visible[first : first + tensor_parallel_size])


def _wait(options: argparse.Namespace) -> int:
    begin, waiting = time.monotonic(), list(options.urls)
    while waiting := [url for url in waiting if silence(url) is None]:
        if time.monotonic() - begin > options.deadline:
            count = f"{len(waiting)} of {len(options.urls)} servers"
            raise RunError(f"{count} are not ready after {options.deadline:g} s: {', '.join(waiting)}")
        time.sleep(POLL_S)
    print(f"{len(options.urls)} servers are ready after {time.monotonic() - begin:.0f} s")
    return EXIT_OK


def silence(url: str) -> float | None:
    """Seconds for which a server's engine has not answered it; None if the server itself does not."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=ANSWER_S) as answer:
            return Health.model_validate_json(answer.read()).silent
    except (OSError, http.client.HTTPException, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
