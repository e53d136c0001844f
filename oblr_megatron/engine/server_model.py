"""The model in an API server: `engine.core`'s counterpart over vLLM's asynchronous engine client.

Each request for samples names the weights that it expects. `engine.state` decides whether the server may sample, and
which step of a push comes next.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from vllm import TokensPrompt
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from oblr_megatron.checkpoint.hf_dir import checkpoint_shapes
from oblr_megatron.checks.vllm_options import KEY
from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.engine.samples import sampling_params, to_sample
from oblr_megatron.engine.state import Refusal, WeightState, check_reset
from oblr_megatron.errors import DamagedError, RunError
from oblr_megatron.types import Sample
from oblr_megatron.weights.manifest import TensorSpec, parts_of
from oblr_megatron.weights.names import HF_EMBEDDING
from oblr_megatron.weights.shm import DAMAGED


class ServedModel:
    """Holds vLLM's engine client (`AsyncLLM`). A server has one, and uses it from its event loop only."""

    def __init__(self, client: Any) -> None:
        self._client, self._instance = client, secrets.token_hex(8)
        self._config = client.vllm_config
        self._model_config = client.model_config
        self._tokenizer = client.get_tokenizer()
        self._routes: bool = self._config.aux_output_config.enable_return_routed_experts
        self._dtype = str(self._model_config.dtype).removeprefix("torch.")
        shapes = checkpoint_shapes(Path(self._model_config.model))
        self._vocab_size, self._digest = shapes[HF_EMBEDDING][0], http.shapes_digest(shapes)
        self._state = WeightState(shapes, self._dtype)
        self._requests: set[asyncio.Future[Any]] = set()  # prompts that are being sampled
        self._numbers = count()
        self._starting = asyncio.Lock()
        self._push_lock = asyncio.Lock()

    async def warm_up(self) -> None:
        """Sample one token: vLLM finds some faults only in its first forward pass, and they should fail the start."""
        await self._client.update_weight_version("0")
        request = SamplingRequest(group_size=1, temperature=0.0, max_tokens=1, seed=0)
        await self._group((0,), request, 0)

    async def info(self) -> http.Info:
        """The model, its limits and its state.

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
            routes=self._routes,
            speculation=getattr(self._config.speculative_config, "method", "none"),
            vllm=self._config.additional_config.get(KEY, {}),
            max_model_len=self._model_config.max_model_len,
            max_num_seqs=self._config.scheduler_config.max_num_seqs,
            workers=self._config.parallel_config.world_size_across_dp,
            transfer=self._config.weight_transfer_config.backend,
            holding=self._state.holding,
            unusable=self._state.unusable,
        )

    async def generate(self, body: http.GenerateBody) -> http.GenerateAnswer:
        """Sample a group of responses for each prompt.

        Raises:
            Refusal: the server holds other weights than expected, or none that can be used.
            ValueError: vLLM does not accept a prompt.
        """
        request = body.request()
        if len(body.positions) != len(body.prompts):
            raise ValueError(f"{len(body.prompts)} prompts at {len(body.positions)} positions")
        if request.routes and not self._routes:
            raise ValueError("routes were asked for, but the server was started without --moe-routing-replay")
        self._state.check_usable(body.holding)
        async with self._starting:
            if not self._requests:  # a cached prefix changes the log-probs' last bits: see EngineServer.generate
                await self._client.reset_prefix_cache()
            self._state.check_usable(body.holding)
            tasks = [
                asyncio.ensure_future(self._group(prompt, request, position))
                for prompt, position in zip(body.prompts, body.positions, strict=True)
            ]
            self._requests.update(tasks)
            for task in tasks:
                task.add_done_callback(self._requests.discard)
        try:
            groups = await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self._state.check_usable(body.holding)  # refuses if a push cancelled them; otherwise the client is gone
            raise
        finally:  # if one failed, or the client has disconnected
            for task in tasks:
                task.cancel()
        copies = request.group_size if request.greedy else 1
        return http.GenerateAnswer.model_construct(
            holding=body.holding, groups=[[http.to_response(one) for one in group] * copies for group in groups]
        )

    async def open_push(self, body: http.OpenBody) -> None:
        """Pass the transport's parameters to vLLM."""
        async with self._push_lock:
            await self._weights(self._client.init_weight_transfer_engine(WeightTransferInitRequest(body.init_info)))

    async def start_push(self, body: http.StartBody) -> None:
        """Begin to replace the weights. Responses in progress are dropped, because the push replaces their weights."""
        async with self._push_lock:
            await self._end_push(f"push {body.holding.version} has not ended")
            for task in (sampling := list(self._requests)):
                task.cancel()
            if sampling:
                await asyncio.wait(sampling)
            manifest = tuple(TensorSpec(name, dtype, shape) for name, dtype, shape in body.manifest)
            with self._state.begin(body.holding, manifest):
                await self._weights(self._client.start_weight_update())

    async def update_push(self, body: http.UpdateBody) -> None:
        """Load one bucket."""
        async with self._push_lock:
            with self._state.bucket(parts_of(body.update_info), body.holding):
                await self._weights(self._client.update_weights(WeightTransferUpdateRequest(body.update_info)))

    async def finish_push(self, body: http.FinishBody) -> None:
        """Serve the new weights, provided that all of them have come."""
        async with self._push_lock:
            with self._state.finish(body.holding):
                await self._weights(self._client.finish_weight_update(str(body.holding.version)))
                check_reset(await self._client.reset_prefix_cache())

    async def digests(self) -> http.DigestsAnswer:
        """Digests of the weights in place."""
        async with self._push_lock:
            return http.DigestsAnswer(workers=await self._client.collective_rpc("oblr_read_back"))

    async def speculation(self) -> http.Report:
        """What speculation did since the last call; a `Refusal` if the server does not speculate."""
        if self._config.speculative_config is None:
            raise Refusal("it was started without --speculation")
        report = await self._client.engine_core.call_utility_async("oblr_speculation")  # see `engine.tail_scheduler`
        return http.Report(**report)

    async def abort_push(self, body: http.AbortBody) -> None:
        """Give up a push, if it is the open one or the last one."""
        async with self._push_lock:
            await self._end_push(f"push {body.holding.version} failed: {body.reason}", body.holding)

    async def _group(self, prompt: Any, request: SamplingRequest, position: int) -> list[Sample]:
        final: Any = None
        parameters = sampling_params(request, position)
        inputs = TokensPrompt(prompt_token_ids=list(prompt))
        async for output in self._client.generate(inputs, parameters, f"oblr-{next(self._numbers)}"):
            final = output
        if final is None or not final.finished:
            raise RunError("vLLM ended a prompt's sampling without a result")
        version = self._state.holding.version
        return [
            to_sample(position, prompt, one, version, self._tokenizer, self._vocab_size, routes=request.routes)
            for one in final.outputs
        ]

    async def _end_push(self, reason: str, holding: http.Holding | None = None) -> None:
        """Mark the weights as unusable, and close the update session that a failed push has left open in vLLM."""
        self._state.fail(reason, holding)
        if self._state.leave_session():
            with suppress(Exception):  # a failing update is the only way to end vLLM's update session early
                await self._client.update_weights(WeightTransferUpdateRequest({}))

    async def _weights(self, call: Any) -> None:
        """Await a call about weights. An error of vLLM becomes a refusal of the push, unless the engine died of it.

        Raises:
            DamagedError: a bucket has another checksum than the trainer's.
            Refusal: any other error.
        """
        try:
            await call
        except Exception as error:  # any error: vLLM has no type of its own for a failed update
            if self._client.errored:
                raise
            kind = DamagedError if DAMAGED in str(error) else Refusal
            raise kind(str(error) or type(error).__name__) from error
