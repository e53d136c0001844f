"""`oblr-megatron serve`: stock vLLM's API server with the options, plugins and precautions `rollout.servers` needs.

    OBLR_API_KEY=... oblr-megatron serve --model models/q --host 10.0.0.5 --port 8000

The command checks, and then becomes the server: one process to signal, which ends the engine's processes with it.
Whoever can speak to it can replace its weights, so it listens on loopback, or on one interface and asks for a key.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from oblr_megatron.engine.plugin import NCCL_BACKEND, SERVER_SHM_BACKEND
from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.engine.server_guard import KEY_VARIABLE, is_loopback
from oblr_megatron.errors import UserError

MIN_KEY_LENGTH = 16
PLUGIN = "oblr_megatron"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
_NOT_INHERITED = (
    "VLLM_SERVER_DEV_MODE",  # opens endpoints that run any method in the engine
    "VLLM_ALLOW_INSECURE_SERIALIZATION",  # lets pickles in
    "VLLM_API_KEY",  # guards some paths only; ours guards all
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback a key is needed")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--api-key-env", default="OBLR_API_KEY", metavar="NAME", help="environment variable that holds the API key"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the weights; by default bfloat16 on GPUs, float32 on a CPU"
    )
    parser.add_argument(
        "--quantization",
        choices=("none", "fp8"),
        default="none",
        help="of the weights, rounded as they come, on GPUs; the run's rollout.quantization must be the same",
    )
    parser.add_argument("--max-model-len", type=int, default=1536, help="longest prompt and response together")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="sequences decoded at once")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of the server")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5, help="KV cache of a server on a CPU")
    parser.add_argument("--num-threads", type=int, help="threads of a server on a CPU; by default all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the process that started the server does"
    )
    parser.set_defaults(function=serve)


def serve(options: argparse.Namespace) -> int:
    """Check, and replace this process by vLLM's API server.

    Raises:
        UserError: an option is wrong, the port taken, or the server would stand open.
    """
    import torch

    from oblr_megatron.checkpoint.hf_dir import check_hf_dir

    key = os.environ.get(options.api_key_env, "")
    check_exposure(options.host, key, options.api_key_env)
    check_hf_dir(options.model)
    check_address(options.host, options.port)
    check_installation()
    spec = spec_of(options, "cuda" if torch.cuda.is_available() else "cpu")
    check_quantization(spec)
    environment = server_environment(os.environ, spec, key, own_key_variable=options.api_key_env)
    if options.die_with_parent:
        from oblr_megatron.runtime.stopping import die_with

        die_with(os.getppid())
    sys.stdout.flush()
    os.execve(sys.executable, command(spec, options.host, options.port), environment)


def check_exposure(host: str, key: str, variable: str) -> None:
    """Refuse to listen where others can reach the server unless they need a key.

    Raises:
        UserError: no key, a short one, or no particular interface.
    """
    where = "--host"
    if _is_wildcard(host):
        raise UserError(f"{host} is every interface of this machine", where=where, fix="give the address of one")
    if not is_loopback(host) and not key:
        raise UserError(
            f"{host} can be reached from other machines, and whoever reaches the server can replace its weights",
            where=where,
            fix=f"put a key into the environment variable {variable}, here and where the trainer runs, or listen on "
            "127.0.0.1",
        )
    if key and (len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key):
        raise UserError(
            f"the key in {variable} is not {MIN_KEY_LENGTH} or more printable characters without spaces",
            where="--api-key-env",
            fix=f'set it with: export {variable}="$(openssl rand -hex 32)"',
        )


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be bound.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error}", where="--host, --port", fix="choose another port or address"
        ) from None


def check_quantization(spec: EngineSpec) -> None:
    """Refuse to round weights where that does not work.

    Raises:
        UserError: on a CPU; or from weights that are not in bfloat16.
    """
    if spec.quantization == "none":
        return
    if spec.device == "cpu":
        raise UserError(
            f"{spec.quantization} needs a GPU: vLLM has no FP8 products on a CPU",
            where="--quantization",
            fix="leave it out",
        )
    if spec.dtype != "bfloat16":
        raise UserError(
            f"{spec.quantization} of weights in {spec.dtype}", where="--quantization", fix="give --dtype bfloat16"
        )


def check_installation() -> None:
    """Refuse to start a server that would not find our plugins.

    Raises:
        UserError: the installed metadata does not name them.
    """
    for group in PLUGIN_GROUPS:
        if PLUGIN not in entry_points(group=group).names:
            raise UserError(
                f"the installed package names no plugin {PLUGIN!r} for {group}",
                where="installation",
                fix="install the package again: pip install --no-deps --no-build-isolation --editable .",
            )


def spec_of(options: argparse.Namespace, device: Literal["cpu", "cuda"]) -> EngineSpec:
    """The engine in the server."""
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
        seed=options.seed,
    )


def server_environment(
    environment: Mapping[str, str], spec: EngineSpec, key: str, own_key_variable: str = ""
) -> dict[str, str]:
    """The server process's environment: as an engine process's, our plugins named, the key for the guard.

    Args:
        environment: of this process.
        spec: of the engine.
        key: that the server asks for; empty for none.
        own_key_variable: where the key came from; vLLM's processes need it once only.
    """
    from oblr_megatron.engine.handle import child_environment  # imports torch, and the command line waits for it

    kept = child_environment(environment, spec)
    if spec.device == "cuda":  # on a CPU it spares a process between the engine and the model
        kept.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    for name in (*_NOT_INHERITED, KEY_VARIABLE, own_key_variable):
        kept.pop(name, None)
    return kept | {"VLLM_PLUGINS": PLUGIN} | ({KEY_VARIABLE: key} if key else {})


def command(spec: EngineSpec, host: str, port: int) -> list[str]:
    """The server's command line. (`vllm serve` looks for a package called vllm, which vLLM's CPU build is not.)"""
    on_gpu = spec.device == "cuda"
    options: dict[str, object] = {
        "model": spec.model,
        "host": host,
        "port": port,
        "dtype": spec.dtype,
        "max-model-len": spec.max_model_len,
        "max-num-seqs": spec.max_num_seqs,
        "seed": spec.seed,
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from, temperature applied
        "weight-transfer-config": json.dumps({"backend": NCCL_BACKEND if on_gpu else SERVER_SHM_BACKEND}),
        "worker-extension-cls": "oblr_megatron.engine.plugin.ReadBack",
        "middleware": "oblr_megatron.engine.server_guard.Guard",
        "allowed-origins": "[]",
    }
    if on_gpu:
        options |= {
            "gpu-memory-utilization": spec.gpu_memory_utilization,
            "tensor-parallel-size": spec.tensor_parallel_size,
        }
        if spec.vllm_quantization is not None:
            options["quantization"] = spec.vllm_quantization
    else:
        options |= {"kv-cache-memory-bytes": spec.kv_cache_bytes, "max-num-batched-tokens": spec.cpu_step_tokens}
    flags = [
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        *([] if on_gpu else ["--enforce-eager", "--no-enable-chunked-prefill"]),
    ]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *flags]


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == ""
