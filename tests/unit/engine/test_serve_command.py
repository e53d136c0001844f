"""The options of `serve`. Not covered: a real server (tests/e2e/test_servers.py)."""

import argparse
import os
import socket
from typing import get_args

import pytest

from oblr_megatron.checks.machine import MAX_RANK
from oblr_megatron.cli import main
from oblr_megatron.engine.arguments import vllm_arguments
from oblr_megatron.engine.plugin import BACKENDS
from oblr_megatron.engine.serve_command import add_arguments, check_address, check_exposure, check_sizes, serve, spec_of
from oblr_megatron.errors import UserError
from oblr_megatron.runtime.command_line import Parser
from tests.tiny import SIZES, make_hf_dir

KEY = "0123456789abcdef"


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


def test_a_name_of_this_machine_alone_is_refused(monkeypatch):
    """Debian's /etc/hosts has 127.0.1.1 for the machine's own name: other machines could never connect."""
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    check_address("localhost", 0)
    with pytest.raises(UserError, match=r"gpu-07 is 127\.0\.1\.1 here.*/etc/hosts"):
        check_address("gpu-07", 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_come_by_a_transport_that_reaches_a_server(device):
    spec = spec_of(serve_options(), device)
    assert BACKENDS[spec.device, spec.server] == {"cpu": "oblr_server_shm", "cuda": "oblr_nccl"}[device]
    assert vllm_arguments(spec, "b")["logprobs_mode"] == "processed_logprobs"
    assert vllm_arguments(spec, "b").get("enforce_eager", False) == (device == "cpu")


def test_the_key_is_not_left_for_the_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    with pytest.raises(UserError):
        serve(serve_options(f"--model={tmp_path / 'none'}"))
    assert "OBLR_API_KEY" not in os.environ


def test_an_adapter_of_a_rank_that_no_slot_has_is_refused(tmp_path, monkeypatch):
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks)[-1] == MAX_RANK
    monkeypatch.delenv("OBLR_API_KEY", raising=False)
    with pytest.raises(UserError, match=rf"ranks up to 512, not {MAX_RANK + 1} \[--lora\]"):
        serve(serve_options(f"--model={make_hf_dir(tmp_path, head_dim=32)}", f"--lora={MAX_RANK + 1}:q_proj"))


def test_the_command_refuses_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OBLR_API_KEY", raising=False)
    assert main(["serve", "--model", str(tmp_path), "--host", "10.0.0.5"]) == 2
    assert "error: 10.0.0.5 " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "key", "named"),
    [
        (["--api-key-env", "OTHER_KEY"], None, "OTHER_KEY is not set"),
        ([], "", "OBLR_API_KEY is empty"),  # export OBLR_API_KEY="$(openssl ...)" where openssl is missing
        (["--vllm", "foo"], None, "'foo' is not NAME=VALUE [--vllm]"),
    ],
)
def test_a_key_or_an_option_of_vllm_that_was_meant_to_be_there(options, key, named, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("OBLR_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OBLR_API_KEY", key)
    model = make_hf_dir(tmp_path / "model", head_dim=32)
    capsys.readouterr()
    assert main(["serve", "--model", str(model), *options]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


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
