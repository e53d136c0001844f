"""The model an API server serves, and the state it may be used in: the counterpart of `vllm_process.EngineServer`.

It serves one complete set of weights or nothing. From the first word of a push until its end it refuses to generate,
and so it does after a push that failed, until one succeeds. Whoever asks for samples names the weights they expect.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from oblr_megatron.checkpoint.hf_dir import checkpoint_shapes
from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.engine.samples import sampling_params, to_sample
from oblr_megatron.errors import RunError, WeightError
from oblr_megatron.types import Sample
from oblr_megatron.weights.manifest import Ledger, TensorSpec, check_manifest
from oblr_megatron.weights.names import HF_EMBEDDING


class Refusal(RunError):
    """What is asked for does not fit the state the server is in; the server itself is well."""


class ServedModel:
    """Holds vLLM's engine client (`AsyncLLM`); one instance a server, used from its event loop alone."""

    def __init__(self, client: Any) -> None:
        self._client, self._instance = client, secrets.token_hex(8)
        self._config = client.vllm_config
        self._model_config = client.model_config
        self._tokenizer = client.get_tokenizer()
        self._shapes = checkpoint_shapes(Path(self._model_config.model))
        self._dtype = str(self._model_config.dtype).removeprefix("torch.")
        self._digest = http.shapes_digest(self._shapes)
        self._holding = http.Holding()
        self._pushing: http.Holding | None = None
        self._ledger: Ledger | None = None
        self._unusable: str | None = None
        self._requests: set[asyncio.Future[Any]] = set()  # prompts that are being sampled
        self._numbers = count()
        self._starting = asyncio.Lock()
        self._push_lock = asyncio.Lock()

    async def warm_up(self) -> None:
        """Sample one token: what vLLM finds out only in its first forward pass shall fail the start."""
        await self._client.update_weight_version("0")
        request = SamplingRequest(group_size=1, temperature=0.0, max_tokens=1, seed=0)
        await self._group((0,), request, 0)

    def info(self) -> http.Info:
        """Which model, with which limits, in which state.

        Raises:
            RunError: the engine has died; vLLM's server ends a few seconds after it.
        """
        if self._client.errored:
            raise RunError("its engine has died")
        return http.Info(
            protocol=http.PROTOCOL,
            instance=self._instance,
            model=str(self._model_config.model),
            shapes=self._digest,
            dtype=self._dtype,
            quantization=self._model_config.quantization or "none",
            max_model_len=self._model_config.max_model_len,
            max_num_seqs=self._config.scheduler_config.max_num_seqs,
            workers=self._config.parallel_config.world_size_across_dp,
            transfer=self._config.weight_transfer_config.backend,
            holding=self._holding,
            unusable=self._unusable,
        )

    async def generate(self, body: http.GenerateBody) -> http.GenerateAnswer:
        """Sample a group for each prompt.

        Raises:
            Refusal: other weights are held than the ones expected, or none that can be used.
            ValueError: vLLM does not take a prompt.
        """
        request = _request(body)
        if len(body.positions) != len(body.prompts):
            raise ValueError(f"{len(body.prompts)} prompts at {len(body.positions)} positions")
        self._check_usable(body.holding)
        async with self._starting:
            if not self._requests:  # a prefix read from the cache changes the log-probs' last bits: see vllm_process
                await self._client.reset_prefix_cache()
            self._check_usable(body.holding)
            tasks = [
                asyncio.ensure_future(self._group(prompt, request, position))
                for prompt, position in zip(body.prompts, body.positions, strict=True)
            ]
            self._track(tasks)
        groups = await self._all(tasks, body.holding)
        copies = request.group_size if request.greedy else 1
        return http.GenerateAnswer.model_construct(
            holding=body.holding, groups=[[http.to_response(one) for one in group] * copies for group in groups]
        )

    async def open_push(self, body: http.OpenBody) -> None:
        """Hand the data plane its parameters."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async with self._push_lock:
            await self._weights(self._client.init_weight_transfer_engine(WeightTransferInitRequest(body.init_info)))

    async def start_push(self, body: http.StartBody) -> None:
        """Begin to replace the weights; what is being sampled is given up.

        Raises:
            Refusal: the manifest is not this model's; the weights stay, but are not to be used.
        """
        async with self._push_lock:
            await self._end_push(f"push {body.holding.version} has not ended")
            await self._cancel_requests()
            manifest = tuple(TensorSpec(name, dtype, shape) for name, dtype, shape in body.manifest)
            self._refusing(lambda: check_manifest(manifest, self._shapes, self._dtype))
            await self._weights(self._client.start_weight_update())
            self._ledger, self._pushing = Ledger(manifest), body.holding

    async def update_push(self, body: http.UpdateBody) -> None:
        """Take in one bucket."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from oblr_megatron.engine.transfer import parts_of

        async with self._push_lock:
            ledger = self._open_ledger(body.holding)
            try:
                self._refusing(lambda: ledger.take(parts_of(body.update_info)))
                await self._weights(self._client.update_weights(WeightTransferUpdateRequest(body.update_info)))
            except RunError as error:
                await self._end_push(f"push {body.holding.version} failed: {error}")
                raise

    async def finish_push(self, body: http.FinishBody) -> None:
        """Serve the new weights, if all of them have come."""
        async with self._push_lock:
            ledger = self._open_ledger(body.holding)
            try:
                self._refusing(ledger.finish)
                await self._weights(self._client.finish_weight_update(str(body.holding.version)))
                if not await self._client.reset_prefix_cache():
                    raise Refusal("vLLM kept cached prefixes of the old weights")
            except RunError as error:
                await self._end_push(f"push {body.holding.version} failed: {error}")
                raise
            self._ledger = self._pushing = self._unusable = None
            self._holding = body.holding

    async def digests(self) -> http.DigestsAnswer:
        """Of the weights that are in place."""
        async with self._push_lock:
            return http.DigestsAnswer(workers=await self._client.collective_rpc("oblr_read_back"))

    async def abort_push(self, body: http.AbortBody) -> None:
        """Give the push up, if it is the one that is open or the last; a later complete one mends what it left."""
        async with self._push_lock:
            if body.holding in (self._pushing, self._holding):
                await self._end_push(f"push {body.holding.version} failed: {body.reason}")

    async def _group(self, prompt: Any, request: SamplingRequest, position: int) -> list[Sample]:
        from vllm import TokensPrompt

        final: Any = None
        parameters = sampling_params(request, position)
        inputs = TokensPrompt(prompt_token_ids=list(prompt))
        async for output in self._client.generate(inputs, parameters, f"oblr-{next(self._numbers)}"):
            final = output
        if final is None or not final.finished:
            raise RunError("vLLM ended a prompt's sampling without a result")
        vocab_size = self._shapes[HF_EMBEDDING][0]
        return [
            to_sample(position, prompt, one, self._holding.version, self._tokenizer, vocab_size)
            for one in final.outputs
        ]

    async def _all(self, tasks: Sequence[asyncio.Future[Any]], holding: http.Holding) -> list[list[Sample]]:
        """All of a request's groups; if one fails, or the client goes, the others are given up."""
        try:
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            self._check_usable(holding)  # it was a push that ended them; else it is the client who is gone
            raise
        finally:
            for task in tasks:
                task.cancel()

    def _track(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        self._requests.update(tasks)
        for task in tasks:
            task.add_done_callback(self._requests.discard)

    async def _cancel_requests(self) -> None:
        """Abort what is being sampled, so that no sequence goes on with other weights than it began with."""
        tasks = list(self._requests)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _end_push(self, reason: str) -> None:
        """Mark the weights as unusable, and close vLLM's update session if one is open."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._unusable, ledger = reason, self._ledger
        self._ledger = self._pushing = None
        if ledger is not None:
            with suppress(Exception):  # vLLM ends a session when an update fails, and has no other way to
                await self._client.update_weights(WeightTransferUpdateRequest({}))

    async def _weights(self, call: Any) -> None:
        """Await a call about weights; whatever fails in it is a refusal of the push, unless the engine died of it."""
        try:
            await call
        except Exception as error:
            if self._client.errored:
                raise
            raise Refusal(str(error) or type(error).__name__) from error

    def _refusing(self, check: Any) -> None:
        try:
            check()
        except WeightError as error:
            raise Refusal(str(error)) from error

    def _open_ledger(self, holding: http.Holding) -> Ledger:
        if self._ledger is None or self._pushing != holding:
            raise Refusal(f"push {holding.version} is not open; {self._unusable or 'none is'}")
        return self._ledger

    def _check_usable(self, holding: http.Holding) -> None:
        if self._unusable is not None:
            raise Refusal(f"{self._unusable}; it generates again after a complete push")
        if holding != self._holding:
            raise Refusal(f"it holds {_name(self._holding)}, not {_name(holding)}")


def _request(body: http.GenerateBody) -> SamplingRequest:
    return SamplingRequest(
        group_size=body.group_size,
        temperature=body.temperature,
        max_tokens=body.max_tokens,
        seed=body.seed,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def _name(holding: http.Holding) -> str:
    return f"version {holding.version} of run {holding.holder}" if holding.holder else "the checkpoint it started from"
