"""Checks of rollout.servers. Before a run begins each fault is a `UserError`; later a server with one is not used."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from urllib.parse import urlsplit

import torch

from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.checks.vllm_options import serve_words
from oblr_megatron.config import Config
from oblr_megatron.engine.http_messages import PROTOCOL, Holding, Info
from oblr_megatron.engine.identity import ModelIdentity
from oblr_megatron.engine.plugin import NCCL_BACKEND, SERVER_SHM_BACKEND
from oblr_megatron.engine.protocol import API_KEY, api_key
from oblr_megatron.errors import Problem, RunError, UserError
from oblr_megatron.rollout.placement import adapter_shape, engine_dtype
from oblr_megatron.rollout.server_client import ServerLostError, VllmServer
from oblr_megatron.types import widens_logits
from oblr_megatron.weights.adapter import AdapterShape

WHERE = "config: rollout.servers"
ANSWER_SECONDS = 10.0


def check_servers(config: Config) -> None:
    """Ask every server for its settings. Refuse (UserError) one that does not answer or does not fit the run."""
    urls = config.rollout.servers
    for url in urls:
        _check_url(url)
    if len(set(urls)) < len(urls):
        raise UserError(f"a server is listed twice: {', '.join(urls)}", where=WHERE, fix="list each server once")
    named: dict[str, str] = {}  # the URL of each server process
    model = ModelIdentity.of(config.model.path)
    for url, answer in zip(urls, asyncio.run(_ask_all(urls, api_key())), strict=True):
        if isinstance(answer, BaseException):
            raise answer
        for what, fix in misfits(answer, config, model):
            raise UserError(f"{url} {what}", where=WHERE, fix=fix)
        if (first := named.setdefault(answer.instance, url)) != url:
            raise UserError(f"{first} and {url} are one server", where=WHERE, fix="list each server once")


async def _ask_all(urls: tuple[str, ...], key: str) -> list[Info | BaseException]:
    return await asyncio.gather(*(_ask(url, key) for url in urls), return_exceptions=True)


async def _ask(url: str, key: str) -> Info:
    """The server's settings."""
    server = VllmServer(url, key, owner="the check before the run")
    try:
        return await server.info(ANSWER_SECONDS)
    except RunError as error:
        lost = isinstance(error, ServerLostError)
        what = "cannot be reached" if lost else "does not answer like an oblr-megatron server"
        fix = f"start it with oblr-megatron serve, and check the address and the key in {API_KEY}"
        reason = str(error).replace(server.name, "it")
        raise UserError(f"{url} {what}: {reason}", where=WHERE, fix=fix) from None
    finally:
        await server.close()


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.path.strip("/") or parts.query:
        raise UserError(f"{url!r} is not the address of a server", where=WHERE, fix="use the form http://HOST:PORT")


def misfits(info: Info, config: Config, own: ModelIdentity) -> Iterator[Problem]:
    """Why a server does not fit the run; `own` is the identity of the run's model."""
    model, rollout = config.model, config.rollout
    if info.protocol != PROTOCOL:
        what = f"has version {info.protocol} of the messages, but this trainer has {PROTOCOL}"
        yield what, "install the same version of oblr-megatron on both sides"
    sent_by = NCCL_BACKEND if torch.cuda.is_available() else SERVER_SHM_BACKEND
    if info.transfer != sent_by:
        what = f"receives weights by {info.transfer}, but this trainer sends them by {sent_by}"
        yield what, "run the trainer and its servers on GPUs, or all of them on CPUs"
    for what in _differences(info, own, str(model.path), weights=rollout.only):
        yield f"serves {info.model}{what}", f"start it with --model {model.path}"
    dtype = str(engine_dtype(config)).removeprefix("torch.")
    if info.dtype != dtype:
        what = f"computes in {info.dtype}, but the run pushes {dtype}"
        yield what, f"start it with --dtype {dtype}, or set rollout.dtype to {info.dtype!r}"
    wider = widens_logits(model.head_dtype, info.dtype, on_gpu=torch.cuda.is_available())
    if info.widens_logits != wider:
        names = ("float32", "model") if wider else ("model", "float32")
        what = f"has logits of head_dtype {names[1]!r}, but model.head_dtype {model.head_dtype!r} needs {names[0]!r}"
        yield what, f"start it with --head-dtype {names[0]}, or set model.head_dtype to {names[1]!r}"
    if (info.quantization == "none") != (rollout.quantization == "none"):
        what = f"has quantization {info.quantization!r}, but the run has {rollout.quantization!r}"
        yield what, f"start it with --quantization {rollout.quantization}, or set rollout.quantization"
    if model.moe_routing_replay and not info.routes:
        what = "does not return the experts that it takes, but model.moe_routing_replay needs them"
        yield what, "start it with --moe-routing-replay"
    if info.speculation != rollout.speculation:
        what = f"has speculation {info.speculation!r}, but the run has {rollout.speculation!r}"
        yield what, f"start it with --speculation {rollout.speculation}, or set rollout.speculation"
    lora = adapter_shape(config)
    if info.lora != lora:
        what = f"takes {_adapters(info.lora)}, but the run pushes {_adapters(lora)}"
        yield (
            what,
            f"start it with {'no --lora' if lora is None else f'--lora {lora}'}, or set rollout.lora to 'merged'",
        )
    if info.vllm != rollout.vllm:
        what = f"was started with the vLLM options {info.vllm}, but rollout.vllm is {rollout.vllm}"
        yield what, f"start it with {shlex.join(serve_words(rollout.vllm)) or 'no --vllm'}, or set rollout.vllm"
    if rollout.only and (info.holding != Holding() or info.unusable is not None):
        pushed = (
            "the weights that a trainer pushed" if info.unusable is None else f"no usable weights ({info.unusable})"
        )
        yield f"holds {pushed}, but --rollout-only samples from those of the checkpoint", "start it again"
    longest = max_model_len(config)
    if info.max_model_len < longest:
        what = f"takes {info.max_model_len} tokens of prompt and response together, but the run needs {longest}"
        yield what, f"start it with --max-model-len {longest}"


def _differences(info: Info, own: ModelIdentity, path: str, *, weights: bool) -> Iterator[str]:
    """Differences of a server's model from the run's; those of `weights` count if no push replaces them."""
    if info.shapes != own.shapes:
        yield f", and its tensors differ from those of {path}"
    for name, value in own.traits.items():
        if (other := info.traits.get(name)) != value:
            yield f" with {name} {other}, but {path} has {name} {value}"
    if weights and info.fingerprint != own.fingerprint:
        yield f", and its weights differ from those of {path}"


def _adapters(lora: AdapterShape | None) -> str:
    return "all weights" if lora is None else f"adapters {lora}"
