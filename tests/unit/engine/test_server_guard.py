"""Access to an API server, and the options that it is started with.

Not covered: a real server (tests/e2e/test_servers.py).
"""

import argparse
import asyncio
import json
import socket
from importlib.metadata import entry_points

import pytest

from oblr_megatron.cli import main
from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.serve_command import (
    PLUGIN,
    PLUGIN_GROUPS,
    add_arguments,
    check_address,
    check_exposure,
    check_sizes,
    command,
    server_environment,
    spec_of,
)
from oblr_megatron.engine.server_guard import KEY_VARIABLE, PATHS, Guard, is_loopback, refuse
from oblr_megatron.errors import UserError
from oblr_megatron.runtime.command_line import Parser
from tests.tiny import SIZES

KEY = "0123456789abcdef"


def scope(path: str, kind: str = "http", **headers: str) -> dict:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": kind, "path": path, "headers": pairs}


@pytest.mark.parametrize("path", sorted(PATHS - {"/health"}))
def test_every_path_but_health_asks_for_the_key(path):
    assert refuse(scope(path, authorization=f"Bearer {KEY}"), KEY) is None
    for given in ("", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"bearer  {KEY}", "Bearer "):
        assert refuse(scope(path, authorization=given), KEY) == (401, "the API key is missing or wrong")
    assert refuse(scope(path), KEY) == (401, "the API key is missing or wrong")
    assert refuse(scope("/health"), KEY) is None


OTHERS = "/collective_rpc /update_weights /oblr/infox /oblr /oblr/push/start/ //oblr/info / /sleep"


@pytest.mark.parametrize("path", ["", *OTHERS.split()])
def test_other_paths_are_refused_with_the_key_too(path):
    assert refuse(scope(path, authorization=f"Bearer {KEY}"), KEY) == (403, f"{path} is not served here")
    assert refuse(scope(path, host="localhost:8000"), "")[0] == 403
    assert refuse(scope(path), KEY)[0] == 401


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({"host": "127.0.0.1:8000"}, True),
        ({"host": "localhost"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "evil.example:8000"}, False),  # a name that somebody made resolve to 127.0.0.1
        ({}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, False),
        ({"host": "localhost", "Origin": "null"}, False),
    ],
)
def test_without_a_key_a_browsers_requests_are_refused(headers, let_in):
    assert (refuse(scope(http.INFO, **headers), "") is None) == let_in


def test_websockets_are_closed_and_the_lifespan_passes(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    passed, sent = [], []

    async def app(scope_, receive, send):
        passed.append(scope_["type"])

    async def send(message):
        sent.append(message)

    guard = Guard(app)
    for kind in ("lifespan", "websocket"):
        asyncio.run(guard(scope(http.INFO, kind, authorization=f"Bearer {KEY}"), None, send))
    assert passed == ["lifespan"]
    assert sent == [{"type": "websocket.close", "code": 1008}]
    sent.clear()
    asyncio.run(guard(scope(http.INFO), None, send))
    assert sent[0]["status"] == 401 and json.loads(sent[1]["body"])["error"] == "the API key is missing or wrong"


def test_loopback():
    hosts = ["127.0.0.1", "127.9.9.9", "::1", "localhost", "10.0.0.5", "localhost.evil.example", "0.0.0.0", "host", ""]
    assert [host for host in hosts if is_loopback(host)] == hosts[:4]


def test_a_server_that_others_can_reach_needs_a_key():
    check_exposure("127.0.0.1", "", "NAME")
    check_exposure("10.0.0.5", KEY, "NAME")
    with pytest.raises(UserError) as error:
        check_exposure("10.0.0.5", "", "NAME")
    assert error.value.where == "--host" and "NAME" in error.value.fix
    for key in (KEY, ""):
        for host in ("0.0.0.0", "::", "", "0", "0x0", "000.0.0.0", "::ffff:0.0.0.0"):
            with pytest.raises(UserError) as error:
                check_exposure(host, key, "NAME")
            assert error.value.what.startswith(repr(host))
    for key in ("short", "x" * 15, "with a space in it ....", "ümläut" * 4, "line\nbreak-0123456789"):
        with pytest.raises(UserError) as error:
            check_exposure("127.0.0.1", key, "NAME")
        assert error.value.where == "--api-key-env" and "16" in error.value.what


def test_a_taken_port_is_found():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"127\.0\.0\.1:\d+.*--host, --port"):
            check_address("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match=r"192\.0\.2\.1:8000"):
        check_address("192.0.2.1", 8000)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_server_has_no_development_mode_and_accepts_no_pickles(device):
    spec = spec_of(serve_options(), device)
    inherited = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_API_KEY": "x",
        "OBLR_API_KEY": KEY,
        "PATH": "/bin",
    }
    environment = server_environment(inherited, spec, KEY, own_key_variable="OBLR_API_KEY")
    assert not {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_API_KEY"} & set(environment)
    assert environment["PATH"] == "/bin" and environment["VLLM_PLUGINS"] == PLUGIN
    assert [name for name, value in environment.items() if value == KEY] == [KEY_VARIABLE]
    assert KEY_VARIABLE not in server_environment({KEY_VARIABLE: "old"}, spec, "")
    words = command(spec, "127.0.0.1", 8000)
    assert KEY not in words, "every user of the machine can read command lines"
    assert words[words.index("--middleware") + 1] == "oblr_megatron.engine.server_guard.Guard"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    backend = json.loads(words[words.index("--weight-transfer-config") + 1])["backend"]
    assert backend == {"cpu": "oblr_server_shm", "cuda": "oblr_nccl"}[device]
    assert ("--enforce-eager" in words) == (device == "cpu")


def test_the_installation_names_the_plugins():
    for group in PLUGIN_GROUPS:
        assert PLUGIN in entry_points(group=group).names


def test_the_command_refuses_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OBLR_API_KEY", raising=False)
    assert main(["serve", "--model", str(tmp_path), "--host", "10.0.0.5"]) == 2
    assert "error: 10.0.0.5 " in capsys.readouterr().err
    assert main(["serve", "--model", str(tmp_path / "none")]) == 2
    assert "error:" in capsys.readouterr().err


def test_shapes_tell_models_apart():
    shapes = {"a": (2, 3), "b": (4,)}
    assert http.shapes_digest(shapes) == http.shapes_digest(dict(reversed(shapes.items())))
    assert len({http.shapes_digest(one) for one in (shapes, {"a": (3, 2), "b": (4,)}, {"a": (2, 3)})}) == 3


def serve_options(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(["--model", "m", *arguments])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--port", value) for value in ("99999", "0", "-1", "http", "8000.0", "", "1" * 5000)],
        *[("--max-model-len", value) for value in ("0", "-5", "many")],
        *[("--gpu-memory-utilization", value) for value in ("0", "1.5", "nan", "inf", "half")],
        *[("--kv-cache-gib", value) for value in ("0", "-1", "nan", "inf", "x")],
        ("--max-num-seqs", "0"),
        ("--num-threads", "0"),
        ("--tensor-parallel-size", "-2"),
        ("--seed", "-1"),
        ("--seed", str(2**32)),
        *[("--speculation-below", value) for value in ("-1", "few", "1.5")],
    ],
)
def test_numbers_out_of_range_are_refused_by_the_parser(option: str, value: str) -> None:
    with pytest.raises(UserError) as error:
        serve_options(f"{option}={value}")
    assert option in error.value.what and value[:20] in error.value.what and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "device", "where", "named"),
    [
        (["--max-model-len=200"], "cpu", "--max-model-len", "128"),
        (["--max-model-len=64", "--kv-cache-gib=1e-6"], "cpu", "--kv-cache-gib", "64 tokens"),
        (["--max-model-len=64", "--tensor-parallel-size=4"], "cuda", "--tensor-parallel-size", "has 3"),
        (
            ["--max-model-len=64", "--tensor-parallel-size=3"],
            "cuda",
            "--tensor-parallel-size",
            "4 is not a multiple of --tensor",
        ),
        (["--max-model-len=64", "--tensor-parallel-size=3"], "cuda", "--tensor-parallel-size", "heads 2 and --tensor"),
        (["--max-model-len=64"], "cpu", "m", "head_dim 16"),
    ],
)
def test_sizes_that_the_model_or_the_machine_lacks(arguments, device, where, named):
    sizes = SIZES | {"head_dim": 16 if where == "m" else 32}
    if "heads 2" in named:
        sizes |= {"num_attention_heads": 12, "num_key_value_heads": 2}
    spec = spec_of(serve_options(*arguments), device)
    with pytest.raises(UserError) as error:
        check_sizes(spec, sizes, 3 if device == "cuda" else 0)
    assert error.value.where.endswith(where) and named in error.value.what
    check_sizes(spec_of(serve_options("--max-model-len=64"), device), SIZES | {"head_dim": 32}, 0)
