"""`oblr-megatron serve`: checks the options, and starts an engine behind an HTTP server for `rollout.servers`.

    OBLR_API_KEY=... oblr-megatron serve --model models/q --host 10.0.0.5 --port 8000

Every client can replace the weights. So the server listens on loopback, or on one interface with a key. Imports of
other packages are inside the functions, because every command loads this module for its options.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args

from oblr_megatron.checks.layout import heads_problem, num_experts
from oblr_megatron.checks.machine import build_problem, check_head_size, check_rank, check_slot, refuse
from oblr_megatron.checks.vllm_options import (
    cache_bytes,
    check_processor,
    check_routes,
    check_speculation,
    check_vllm_options,
)
from oblr_megatron.engine.protocol import API_KEY, KEY_CHARACTERS, EngineSpec, is_key
from oblr_megatron.errors import UserError
from oblr_megatron.families import head_dim
from oblr_megatron.runtime.command_line import LARGEST, amount, count, port_number, whole
from oblr_megatron.types import HeadDtype, Speculation
from oblr_megatron.weights.adapter import AdapterShape

MIN_KEY_LENGTH = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""

    def number(name: str, kind: Callable[[str], float], default: float, what: str) -> None:
        parser.add_argument(name, type=kind, default=default, help=f"{what} (default: %(default)s)")

    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any other than loopback needs a key")
    number("--port", port_number, 8000, "port to listen on")
    parser.add_argument(
        "--api-key-env", default=API_KEY, metavar="NAME", help="environment variable that holds the API key"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the weights; default: bfloat16 on GPUs, float32 on a CPU",
    )
    parser.add_argument(
        "--head-dtype",
        choices=get_args(HeadDtype),
        default="auto",
        help="dtype of the logits; must agree with the run's model.head_dtype (default: %(default)s)",
    )
    parser.add_argument(
        "--quantization",
        choices=("none", "fp8"),
        default="none",
        help="rounds the weights when they arrive, on GPUs; must equal the run's rollout.quantization",
    )
    number("--max-model-len", count, 1536, "most tokens of a prompt and its response together")
    number("--max-num-seqs", count, 256, "sequences decoded at once")
    number("--tensor-parallel-size", count, 1, "GPUs of the server")
    number("--gpu-memory-utilization", _share, 0.9, "share of each GPU's memory")
    number("--kv-cache-gib", amount, 0.5, "KV cache on a CPU")
    parser.add_argument("--num-threads", type=count, help="threads on a CPU; default: all cores")
    parser.add_argument(
        "--speculation",
        choices=get_args(Speculation),
        default="none",
        help="where drafts come from while few sequences run; must equal the run's rollout.speculation",
    )
    parser.add_argument(
        "--speculation-below",
        type=lambda text: whole(text, 0, LARGEST),
        metavar="N",
        help="most sequences sampled with drafts, 0: none (default: measured)",
    )
    parser.add_argument(
        "--moe-routing-replay",
        action="store_true",
        help="of a mixture: return the experts of each token, for runs with model.moe_routing_replay",
    )
    parser.add_argument(
        "--lora",
        type=_adapter,
        metavar="RANK:TARGETS",
        help="take adapters of this rank and of these matrices, e.g. 16:q_proj,v_proj",
    )
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further option of vLLM's engine, any number of times; must equal the run's rollout.vllm",
    )
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end together with the process that started the server"
    )
    parser.set_defaults(function=serve)


def serve(options: argparse.Namespace) -> int:
    """Check the options, and serve until a signal; returns the exit status.

    Raises:
        UserError: an option is wrong, the port is taken, or others could reach the server without a key.
        RunError: the engine did not start, or has died.
    """
    if options.die_with_parent:
        from oblr_megatron.runtime.processes import die_with

        die_with(os.getppid())  # at once: later, the parent may have ended already
    from oblr_megatron.checkpoint.hf_dir import check_hf_dir

    variable = options.api_key_env
    key = os.environ.pop(variable, None)  # the engine needs none
    if key == "" or (key is None and variable != API_KEY):
        what = f"{variable} is {'empty' if key == '' else 'not set'}"
        raise UserError(what, where="--api-key-env", fix=f'export {variable}="$(openssl rand -hex 32)", or unset it')
    key = key or ""
    check_exposure(options.host, key, variable)
    check_address(options.host, options.port)
    model = check_hf_dir(options.model)

    from oblr_megatron.model.precision import usable_gpus

    gpus = usable_gpus()
    on_gpu = gpus > 0
    spec = spec_of(options, "cuda" if on_gpu else "cpu")
    refuse(build_problem(on_gpu=on_gpu))
    check_quantization(spec)
    check_vllm_options(spec.vllm, on_gpu=on_gpu, where="--vllm")
    check_processor(spec.vllm, on_gpu=on_gpu, where="--vllm")
    check_speculation(spec.speculation, "--speculation")
    if spec.routes:
        check_routes(model.config, spec.vllm, spec.speculation, on_gpu=on_gpu, where="command line")
    merge = "leave it out, and set rollout.lora to 'merged' in the run"
    if spec.lora is not None and num_experts(model.config):
        raise UserError("engines take no adapters of a mixture", where="--lora", fix=merge)
    if spec.lora is not None:
        check_rank(spec.lora.rank, where="--lora", fix=merge)
        check_slot(spec.dtype, on_gpu=on_gpu, where="--lora", fix="add --dtype bfloat16")
    check_sizes(spec, model.config, gpus)
    model.tokenizer()  # raises if it does not fit the model
    from oblr_megatron.engine.http_door import run

    return run(spec, options.host, options.port, key)


def check_exposure(host: str, key: str, variable: str) -> None:
    """Refuse (UserError) to listen where other machines can reach the server without a key, or with a weak one."""
    from oblr_megatron.engine.http_messages import is_loopback

    if _is_wildcard(host):
        what = f"{host!r} is every interface of this machine"
        raise UserError(what, where="--host", fix="give the address of one interface")
    if not is_loopback(host) and not key:
        what = f"{host} can be reached from other machines, and every client can replace the weights"
        fix = f"set {variable} to a key in the environment, here and where the trainer runs, or listen on 127.0.0.1"
        raise UserError(what, where="--host", fix=fix)
    if key and not (len(key) >= MIN_KEY_LENGTH and is_key(key)):
        what = f"the key in {variable} is not {MIN_KEY_LENGTH} or more {KEY_CHARACTERS}"
        fix = f'set it: export {variable}="$(openssl rand -hex 32)"'
        raise UserError(what, where="--api-key-env", fix=fix)


def check_address(host: str, port: int) -> None:
    """Refuse (UserError) a taken port, an address of another machine, and a name that only this machine can reach."""
    from oblr_megatron.engine.http_messages import cannot_listen, is_loopback

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise cannot_listen(host, port, error) from None
    if is_loopback(str(address[0])) and not is_loopback(host):
        what = f"{host} is {address[0]} here, which no other machine can reach"
        fix = f"correct the line of {host} in /etc/hosts, or give an interface's address"
        raise UserError(what, where="--host", fix=fix)


def check_quantization(spec: EngineSpec) -> None:
    """Refuse (UserError) quantization on a CPU, and of weights that are not in bfloat16."""
    name, where = spec.quantization, "--quantization"
    if name != "none" and spec.device == "cpu":
        what = f"{name} needs a GPU: a push into a CPU engine writes plain weights"
        raise UserError(what, where=where, fix="leave the option out")
    if name != "none" and spec.dtype != "bfloat16":
        raise UserError(f"{name} needs bfloat16 weights, not {spec.dtype}", where=where, fix="add --dtype bfloat16")


def check_sizes(spec: EngineSpec, hf_config: Mapping[str, Any], devices: int) -> None:
    """Refuse (UserError) sizes that the model or the machine does not have."""
    check_head_size(hf_config, spec.model, on_gpu=spec.device == "cuda")
    positions = int(hf_config.get("max_position_embeddings", spec.max_model_len))
    if spec.max_model_len > positions:
        what = f"{spec.max_model_len} exceeds the model's max_position_embeddings {positions}"
        raise UserError(what, where="--max-model-len", fix=f"give {positions} or less")
    parallel, where = spec.tensor_parallel_size, "--tensor-parallel-size"
    if parallel > max(devices, 1):
        what = f"{parallel} GPUs are needed, but this machine has {devices}"
        raise UserError(what, where=where, fix=f"give {max(devices, 1)} or less")
    if (problem := heads_problem(hf_config, parallel, where)) is not None:
        what, fix = problem
        raise UserError(what, where=where, fix=fix)
    cache = 2 * spec.max_model_len * hf_config["num_hidden_layers"] * hf_config["num_key_value_heads"]
    cache *= head_dim(hf_config) * cache_bytes(spec.vllm, 4 if spec.dtype == "float32" else 2)
    if spec.device == "cpu" and cache > spec.kv_cache_bytes:
        held, needed = (f"{size / 2**30:.3g}" for size in (spec.kv_cache_bytes, cache))
        what = f"one sequence of {spec.max_model_len} tokens needs {needed} GiB, not {held}"
        raise UserError(what, where="--kv-cache-gib", fix="raise it, or lower --max-model-len")


def spec_of(options: argparse.Namespace, device: Literal["cpu", "cuda"]) -> EngineSpec:
    """The spec of the server's engine."""
    default: Literal["float32", "bfloat16"] = "bfloat16" if device == "cuda" else "float32"
    return EngineSpec(
        name="server",
        model=options.model.absolute(),
        dtype=options.dtype or default,
        device=device,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        kv_cache_bytes=int(options.kv_cache_gib * 2**30),
        num_threads=options.num_threads or len(os.sched_getaffinity(0)),
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.tensor_parallel_size,
        quantization=options.quantization,
        head_dtype=options.head_dtype,
        speculation=options.speculation,
        speculation_below=options.speculation_below,
        routes=options.moe_routing_replay,
        lora=options.lora,
        server=True,
        vllm=_vllm_options(options.vllm),
    )


def _vllm_options(texts: list[str]) -> dict[str, Any]:
    """Values are TOML or plain text, as in overrides. Example: ["block_size=16"] -> {"block_size": 16}"""
    from oblr_megatron.config.checks import apply_override

    table: dict[str, Any] = {}
    for text in texts:
        if not text.partition("=")[1]:
            raise UserError(f"{text!r} is not NAME=VALUE", where="--vllm", fix="write e.g. block_size=16")
        apply_override(table, text)
    return table


def _adapter(text: str) -> AdapterShape:
    """An option's type: the shape of adapters."""
    try:
        return AdapterShape.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    """An option's type: a share of a whole."""
    value = amount(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 1")
    return value


def _is_wildcard(host: str) -> bool:
    """Whether the host, in any spelling, stands for all interfaces. Examples: "0.0.0.0", "0", "::ffff:0.0.0.0"."""
    if not host:
        return True
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # `check_address` reports it
    addresses = [ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in infos]
    return any((getattr(one, "ipv4_mapped", None) or one).is_unspecified for one in addresses)
