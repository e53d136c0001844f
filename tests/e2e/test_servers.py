"""Rollouts from two real API servers: log-probs, versions, refusals, access, and servers that are killed and return.

Not covered: NCCL and tensor parallelism (GPUs only), servers on other machines, speed.
"""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from oblr_megatron.config import load_config
from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.protocol import PromptRequest, SamplingRequest
from oblr_megatron.errors import DamagedError, RunError, UserError
from oblr_megatron.preflight.inputs import preflight
from oblr_megatron.rollout.server_checks import check_servers
from oblr_megatron.rollout.servers import ServerEngines
from oblr_megatron.weights import shm
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.forked import CONFIG, forked_cli
from tests.e2e.tiny_rollout import ONE_RANK, Weights, change, largest_error, make_config, make_prompts, sample
from tests.tiny import make_hf_dir

PARITY = 1e-4
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_hf_dir(tmp_path_factory.mktemp("servers") / "model", head_dim=32)


@pytest.fixture(scope="module")
def two(model_dir):
    logs = [model_dir.parent / f"server-{number}.log" for number in range(2)]
    servers = [ApiServer(model_dir, log, forked=log is logs[1]) for log in logs]  # the first as a user starts it
    try:
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.close()


@pytest.fixture(scope="module", autouse=True)
def half_sent(two):
    """A request without the end of its headers, sent before the first test."""
    with socket.create_connection(("127.0.0.1", two[0].port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        yield connection


@pytest.fixture
def model(model_dir):
    return Qwen3ForCausalLM.from_pretrained(model_dir)


@pytest.fixture
def config_of(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("OBLR_API_KEY", KEY)

    def make(servers, weights=None, **rollout):
        urls = [server if isinstance(server, str) else server.url for server in servers]
        config = make_config(model_dir, tmp_path / "run", servers=urls, **rollout)
        return (
            config
            if weights is None
            else config.model_copy(update={"weights": config.weights.model_copy(update=weights)})
        )

    return make


@pytest.fixture
def engines_of(config_of):
    opened = []

    def make(servers, **rollout):
        opened.append(ServerEngines(config_of(servers, **rollout), ONE_RANK))
        return opened[-1]

    yield make
    for engines in opened:
        engines.close()
        engines.close()


def test_pushed_weights_are_served_by_both(two, engines_of, model):
    engines = engines_of(two)
    engines.push(Weights(model), version=0)
    before = sample(engines)
    assert largest_error(model, before) < PARITY
    for version in (1, 2):
        change(model, seed=version)
        assert largest_error(model, before) > 100 * PARITY, "the change is large enough to be seen"
        stats = engines.push(Weights(model), version)
        shares = [server.generated() for server in two]
        after = sample(engines, count=32)
        assert stats.bytes == sum(4 * parameter.numel() for parameter in model.parameters())
        assert engines.version == version and {one.version for one in after} == {version}
        assert largest_error(model, after) < PARITY
        shares = [server.generated() - share for server, share in zip(two, shares, strict=True)]
        assert sum(shares) == sum(len(one.response_ids) for one in after)
        assert min(shares) > 0.25 * sum(shares), "both have sampled"
        assert [one.group for one in after] == [n // 4 for n in range(128)]
        assert [one.prompt_ids for one in after[::4]] == [prompt.token_ids for prompt in make_prompts(32)]
        before = after
    assert engines.metrics() == {"rollout/restarts": 0}


def test_the_split_over_servers_does_not_change_the_draws(two, engines_of, model):
    together, alone = engines_of(two), engines_of(two[:1])
    together.push(Weights(model), 0)
    expected = sample(together)
    alone.push(Weights(model), 0)
    assert [one.response_ids for one in sample(alone)] == [one.response_ids for one in expected]
    greedy = sample(alone, group_size=2, temperature=0.0)
    assert greedy[0::2] == greedy[1::2] and largest_error(model, greedy) < PARITY
    assert largest_error(model, sample(alone, temperature=0.7), temperature=0.7) < PARITY
    with pytest.raises(RunError, match=r"version 0 of run \w+"):
        sample(engines_of(two[:1], max_restarts=0))
    change(model, seed=1)
    alone.push(Weights(model), 0)
    assert [one.response_ids for one in sample(together)] == [one.response_ids for one in expected], (
        "the server that another run took over is not asked"
    )


def test_a_damaged_bucket_is_refused(two, engines_of, model, monkeypatch):
    engines = engines_of(two[:1])
    engines.push(Weights(model), 0)
    expected = sample(engines)
    honest = shm.SharedBuffer.checksum

    def damaged(buffer, start, used):
        checksum = honest(buffer, start, used)
        buffer.bytes[start + used // 2] ^= 1  # one bit, after the trainer has taken the checksum
        taken.append(start)
        return checksum

    taken = []
    monkeypatch.setattr(shm.SharedBuffer, "checksum", damaged)
    with pytest.raises(DamagedError, match=r"checksum.*[0-9a-f]{16}.*[0-9a-f]{16}"):
        engines.push(Weights(model), 1)
    assert taken == [0, 0], "the push was sent a second time"
    monkeypatch.undo()
    assert_refuses_until_a_full_push(engines, model, expected)


def test_weights_are_read_back_and_compared(two, engines_of, model, monkeypatch):
    """`weights.verify` finds what a push cannot notice, here a source that changes between its two passes."""
    engines = engines_of(two, weights={"verify": True})
    engines.push(Weights(model), 0)
    expected = sample(engines)

    class Changing(Weights):
        passes = 0

        def __iter__(self):
            self.passes += 1
            for name, tensor in super().__iter__():
                yield name, tensor + (self.passes == 1 and name == NORM)

    with pytest.raises(RunError, match=f"server http.*{NORM}.*weights.verify"):
        engines.push(Changing(model), 1)
    with pytest.raises(RunError, match="push 1 did not reach the servers"):
        sample(engines)
    assert all("push 1" in json.loads(server.call(http.PATHS["info"])[1])["unusable"] for server in two)
    engines.push(Weights(model), 2)
    assert [one.response_ids for one in sample(engines)] == [one.response_ids for one in expected]


def assert_refuses_until_a_full_push(engines, model, expected):
    """The trainer's side refuses, the server refuses, and a complete push makes both usable again."""
    with pytest.raises(RunError, match="push 1 did not reach the servers"):
        sample(engines)
    (server,) = engines._servers.servers
    assert "push 1" in json.loads(ask(server, http.PATHS["info"]))["unusable"]
    request = SamplingRequest(group_size=1, temperature=1.0, max_tokens=2, seed=0)
    asked = (PromptRequest(0, (5,), request, position=0),)
    with pytest.raises(RunError, match=r"refused .*push 1 failed"):
        engines._servers.loop.run(server.sample(asked, engines._holding(engines.version), 20))
    engines.push(Weights(model), 2)
    samples = sample(engines)
    assert_same(samples, expected, version=2)


def ask(server, path):
    import urllib.request

    request = urllib.request.Request(server.url + path, headers=server._headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read()


def test_memory_that_is_not_the_trainers_is_not_opened(two, engines_of, model):
    """A server opens only the memory of a push, in a process on this machine that it may access."""
    path = Path("/etc/hostname")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.readlink("/proc/self/ns/pid")
    with path.open() as other:
        good = {"pid": os.getpid(), "fd": other.fileno(), "inode": 1, "boot_id": boot, "pid_namespace": space}
        for change_, message in (
            ({}, f"/proc/{os.getpid()}/fd/"),
            ({"pid": 2**22 + 1}, "/proc/4194305/fd/"),
            ({"boot_id": "another"}, "another machine"),
        ):
            status, text = two[0].call(http.PATHS["open_push"], json.dumps({"init_info": good | change_}).encode())
            assert status == http.REFUSED and message in text
    engines = engines_of(two[:1])
    engines.push(Weights(model), 0)
    assert largest_error(model, sample(engines)) < PARITY


def test_nothing_is_answered_without_the_key(two):
    server = two[0]
    assert server.call("/health", key="")[0] == 200
    for path in (*http.PATHS.values(), "/v1/completions", "/collective_rpc", "/", "/docs"):
        for key in ("", "wrong", KEY + "x"):
            assert server.call(path, b"{}", key=key)[0] == 401, path
    for path in (
        "/collective_rpc",
        "/update_weights",
        "/v1/chat/completions",
        "/v1/completions",
        "/metrics",
        "/sleep",
        "/docs",
        "/health/",
        "/server_info",
    ):
        status, text = server.call(path, b"{}")
        assert status == 404 and "rollout.servers" in text and "vllm serve" in text, path
    assert server.call(http.PATHS["sample"], b"\x80\x04K\x01.")[0] == http.INVALID, "a pickle is not JSON"


def test_headers_and_bodies_have_limits(two, half_sent):
    with suppress(ConnectionResetError):
        assert half_sent.recv(1) == b"", "closed without an answer"
    head = f"POST {http.PATHS['sample']} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Length: {10**11}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", two[0].port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_bad_servers_are_found_before_the_run(two, config_of, engines_of, model, model_dir, tmp_path, monkeypatch):
    check_servers(config_of(two))
    other = make_hf_dir(tmp_path / "other", num_hidden_layers=1, head_dim=32)
    trained = make_hf_dir(tmp_path / "trained", head_dim=32, seed=1)
    sibling = make_hf_dir(tmp_path / "sibling", head_dim=32)
    (sibling / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    cases = [
        (config_of(["http://127.0.0.1:9"]), "http://127.0.0.1:9 "),
        (config_of(["ftp://host"]), "'ftp://host' "),
        (config_of([two[0], two[0]]), "twice"),
        (config_of([two[0], two[0].url.replace("127.0.0.1", "localhost")]), "are one server"),
        (config_of([two[0]], dtype="bfloat16"), "float32.*bfloat16"),
        (config_of([two[0]], max_response_tokens=50), "64 .*74"),
        (make_config(other, tmp_path / "run", servers=[two[0].url]), f"tensors differ .*{other}"),
        (make_config(sibling, tmp_path / "run", servers=[two[0].url]), r"stop_tokens \[1\], but .* \[1, 5\]"),
        (make_config(trained, tmp_path / "run", servers=[two[0].url], only=True), f"weights differ .*{trained}"),
    ]
    for config, message in cases:
        with pytest.raises(UserError, match=message) as error:
            check_servers(config)
        assert error.value.where == "config: rollout.servers"
    engines_of([two[0]]).push(Weights(model), 1)
    with pytest.raises(UserError, match="weights that a trainer pushed") as error:
        check_servers(config_of([two[0]], only=True))
    assert error.value.fix == "start it again"
    monkeypatch.setenv("OBLR_API_KEY", "wrong")
    with pytest.raises(UserError, match=r"status 401.*API key"):
        check_servers(make_config(model_dir, tmp_path, servers=[two[0].url]))


def test_an_unreachable_server_ends_the_command_with_status_2(tmp_path, tiny, overrides):
    arguments = [*overrides(tmp_path / "run"), 'rollout.servers=["http://127.0.0.1:9"]']
    result = forked_cli(["train", CONFIG, *arguments])
    assert result.returncode == 2
    assert "error: http://127.0.0.1:9 " in result.stderr
    assert "[config: rollout.servers]. Fix: " in result.stderr and "oblr-megatron serve" in result.stderr
    other_rank = preflight(load_config(CONFIG, arguments), 1, owns_run_dir=False)
    assert other_rank.stream is not None, "only rank 0 asks the servers"


@pytest.mark.nightly
def test_killed_servers_lose_and_double_nothing(two, engines_of, model, monkeypatch):
    """One is killed while it samples, and the other takes over. Then that one is killed, and gets the weights again."""
    monkeypatch.setattr("oblr_megatron.rollout.servers.LOST_SECONDS", 60.0)  # the machine may be busy
    engines = engines_of(two, start_timeout_s=500)
    change(model, seed=7)
    engines.push(Weights(model), 1)
    many = {"count": 100, "group_size": 16, "max_tokens": 40}
    expected = sample(engines, **many)
    begin = time.monotonic()
    sample(engines, **many)
    half = (time.monotonic() - begin) / 2

    killed = threading.Timer(half, two[0].end, (signal.SIGKILL,))
    killed.start()
    assert_same(sample(engines, **many), expected, version=1)
    killed.join()
    assert engines.metrics() == {"rollout/restarts": 0}, "no weights had to be pushed"

    def kill_and_start_again():
        two[1].end(signal.SIGKILL)
        two[1].start()

    killed = threading.Timer(half, kill_and_start_again)
    killed.start()
    assert_same(sample(engines, **many), expected, version=1)
    killed.join()
    assert engines.metrics() == {"rollout/restarts": 1}

    two[0].start()
    two[0].wait_ready()
    change(model, seed=8)
    engines.push(Weights(model), 2)
    assert engines.metrics() == {"rollout/restarts": 1}, "the first one joins again at a push"
    assert largest_error(model, sample(engines, count=32)) < PARITY
    assert min(server.generated() for server in two) > 0


def assert_same(samples, expected, version):
    """The same draws, each once. Batches of another shape round the last bits of log-probs differently."""
    assert [(one.group, one.response_ids) for one in samples] == [(one.group, one.response_ids) for one in expected]
    assert {one.version for one in samples} == {version}
    found, wanted = ([p for one in part for p in one.logprobs] for part in (samples, expected))
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=PARITY)


def test_the_prompts_of_a_server_that_hangs_are_sampled_by_another_before_the_deadline(two, engines_of, model):
    engines = engines_of(two, max_restarts=0, generate_timeout_s=12)
    engines.push(Weights(model), 0)
    expected = sample(engines)
    for process in two[0].family():
        process.suspend()
    try:
        assert_same(sample(engines), expected, version=0)
    finally:
        for process in two[0].family():
            process.resume()


def test_a_server_that_does_not_let_the_run_in_is_not_waited_for(two, engines_of, model, monkeypatch):
    engines = engines_of(two)
    monkeypatch.setenv("OBLR_API_KEY", "another-key-0123456789")
    with pytest.raises(RunError, match=r"server http.* 401.*API key"):
        engines_of(two).push(Weights(model), 0)
    engines.push(Weights(model), 0)


def test_no_server_within_the_deadline(engines_of, model):
    engines = engines_of(["http://127.0.0.1:9"], start_timeout_s=1)
    with pytest.raises(RunError, match=r"rank 0 waited 1 s .*server http"):
        engines.push(Weights(model), 0)


def test_sigterm_ends_a_server_and_all_it_started(two):
    assert len(two[0].family()) > 1, "the engine is a process of its own"
    assert two[0].end(signal.SIGTERM) in (0, -signal.SIGTERM)
    assert not [name for name in os.listdir("/dev/shm") if "oblr" in name]
