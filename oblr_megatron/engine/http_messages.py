"""Calls of an engine as JSON over HTTP. Imports no torch and no vllm.

A path names a method of `engine.core.EngineServer`. The body holds its arguments, and the answer its value.

A server holds the weights of one push, named by a `Holding`: a `holder` that each run draws, and a version. A request
for samples names the holding that it expects, and a server that holds anything else refuses. So a restarted server or
the weights of another run cannot be used by mistake.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from oblr_megatron.engine.protocol import PromptRequest
from oblr_megatron.engine.routes import routes_of
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.types import RECORDED, Sample
from oblr_megatron.weights.adapter import AdapterShape

HEALTH = "/health"
PUSH = ("open_push", "start_push", "update_push", "finish_push", "abort_push")
PATHS = {method: f"/oblr/{method}" for method in ("info", "sample", *PUSH, "digests", "speculation")}
"""Path of each method that can be called over HTTP."""
REFUSED, INVALID, FAILED = 409, 400, 500
"""HTTP status if the server's state forbids the request, if the request is invalid, and if the engine failed."""

DAMAGED = "damaged"
"""The "kind" in the JSON of a refusal if a bucket was damaged on the way: a second push may help."""

PROTOCOL = 13
"""Version of these messages, to be raised with every change. Both sides must have the same."""


class Message(BaseModel):
    """Base of all messages; an unknown field is an error."""

    # a log-prob may be NaN: the trainer leaves the sample out (JSON's null would make it an invalid answer)
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Holding(Message):
    """Names the weights of a push. Example: Holding(holder="9f2c51", version=3); Holding() is the checkpoint."""

    holder: str = ""
    version: int = 0


class Health(Message):
    """The answer to `HEALTH`. Example: Health(silent=0.0)"""

    silent: float  # seconds since the engine left a ping without an answer: at most its current step or part of a push


class Info(Message):
    """Settings and state of a server.

    Example: Info(protocol=1, instance="7d3a90", model="/models/q", shapes="5be1...", dtype="float32",
                  max_model_len=1536, max_num_seqs=256, workers=1, transfer="oblr_server_shm", holding=Holding(),
                  unusable=None, generated=51200, cached=0)
    """

    protocol: int
    instance: str  # drawn by each server process
    model: str
    shapes: str  # this and the next two: `ModelIdentity` of the checkpoint it started from
    traits: dict[str, Any] = {}
    fingerprint: str = ""
    dtype: str
    widens_logits: bool = False  # whether bf16 weights give fp32 logits
    quantization: str = "none"  # vLLM's name, e.g. "fp8_per_tensor"
    speculation: str = "none"
    routes: bool = False  # whether it can return routes
    lora: AdapterShape | None = None  # of the adapters that it takes
    vllm: dict[str, Any] = {}  # further options that it was started with
    max_model_len: int
    max_num_seqs: int
    workers: int  # processes that receive weights, one per GPU
    transfer: str  # name of the weight-transfer backend
    holding: Holding
    base: str | None = None  # holder of the base weights that it holds for adapters
    unusable: str | None
    generated: int  # tokens of complete responses since the start
    cached: int  # prompt tokens of these that came from the prefix cache; of a group those of one response


class Routes(Message):
    """Experts of all tokens of a prompt and its response but the last.

    Example: Routes(dtype="uint8", shape=(38, 48, 8), data="AwdC...")
    """

    dtype: Literal["uint8", "<i2"]  # the second with more than 256 experts
    shape: tuple[int, int, int]  # tokens - 1, layers, k
    data: str  # base64, in C order

    @classmethod
    def of(cls, routes: NDArray[np.int16]) -> Routes:
        """From `Sample.routes`."""
        rows = routes[:-1]
        dtype: Literal["uint8", "<i2"] = "uint8" if rows.max(initial=0) < 256 else "<i2"
        data = base64.b64encode(rows.astype(dtype).tobytes()).decode()
        return cls.model_construct(dtype=dtype, shape=rows.shape, data=data)

    def routes(self, tokens: int) -> NDArray[np.int16]:
        """`Sample.routes` of a sample of so many tokens; a `RunError` if the data do not fit it."""
        try:
            rows = np.frombuffer(base64.b64decode(self.data, validate=True), self.dtype).reshape(self.shape)
        except ValueError as error:
            raise RunError(f"the routes of a sample are damaged: {error}") from error
        return routes_of(rows, tokens)


class Recorded(Message):
    """`Sample.recorded`. Example: Recorded(tokens=32, data="AwdC...")"""

    tokens: int  # of each row
    data: str  # base64, rows of RECORDED

    @classmethod
    def of(cls, recorded: NDArray[np.void]) -> Recorded:
        """From `Sample.recorded`."""
        return cls.model_construct(tokens=recorded.shape[1], data=base64.b64encode(recorded.tobytes()).decode())

    def rows(self, count: int) -> NDArray[np.void]:
        """`Sample.recorded` of a response of so many tokens; a `RunError` if the data do not fit it."""
        try:
            flat = np.frombuffer(base64.b64decode(self.data, validate=True), RECORDED)
            return flat.reshape(count, self.tokens)
        except ValueError as error:
            raise RunError(f"the recorded tokens of a sample are damaged: {error}") from error


class Response(Message):
    """One response. The trainer knows its prompt and position."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    routes: Routes | None = None
    recorded: Recorded | None = None


class SampleAnswer(Message):
    """The answer to `sample`: a group of responses for each prompt, in their order, and the weights that drew them."""

    holding: Holding
    groups: list[list[Response]]

    @classmethod
    def of(cls, holding: Holding, groups: Iterable[Sequence[Sample]]) -> SampleAnswer:
        """From samples."""
        return cls.model_construct(holding=holding, groups=[[to_response(one) for one in group] for group in groups])

    def samples(self, asked: Sequence[PromptRequest]) -> list[list[Sample]]:
        """The groups as `Sample` records; raises as `Routes.routes`."""
        return [
            [
                Sample(
                    group=one.position,
                    prompt_ids=one.ids,
                    response_ids=response.ids,
                    logprobs=response.logprobs,
                    text=response.text,
                    finish_reason=response.finish_reason,
                    version=self.holding.version,
                    routes=response.routes.routes(len(one.ids) + len(response.ids)) if response.routes else None,
                    recorded=response.recorded.rows(len(response.ids)) if response.recorded else None,
                )
                for response in group
            ]
            for one, group in zip(asked, self.groups, strict=True)
        ]


def ended_of(sample: Sample) -> Literal["stop", "length"]:
    """End of an engine's response."""
    return "length" if sample.finish_reason == "length" else "stop"


def to_response(sample: Sample) -> Response:
    """The part of a sample that is sent."""
    return Response.model_construct(
        ids=sample.response_ids,
        logprobs=sample.logprobs,
        text=sample.text,
        finish_reason=ended_of(sample),
        routes=None if sample.routes is None else Routes.of(sample.routes),
        recorded=None if sample.recorded is None else Recorded.of(sample.recorded),
    )


class DraftReport(Message):
    """Drafts of an engine since the last report, and the bound.

    Example: DraftReport(drafts=120, proposed=540, accepted=310, below=7)
    """

    drafts: int  # a draft is for one sequence in one step
    proposed: int  # tokens in them
    accepted: int  # tokens among these
    below: int  # see `BreakEven.below`


def shapes_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """A hash of all tensor names and shapes: it differs between architectures."""
    listing = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def cannot_listen(host: str, port: int, error: Exception) -> UserError:
    """What a server says that cannot have its address."""
    fix = "choose another port or address"
    return UserError(f"cannot listen on {host}:{port}: {error}", where="--host, --port", fix=fix)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
