"""Messages between the trainer and an API server, as JSON: paths, bodies, answers. Imports no torch and no vllm.

A server holds the weights of one push, named by a `Holding`: a `holder` that each run draws, and a version. A request
for samples names the holding that it expects, and a server that holds anything else refuses. So a restarted server or
the weights of another run cannot be used by mistake.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.engine.routes import routes_of
from oblr_megatron.errors import RunError
from oblr_megatron.types import Sample

PREFIX = "/oblr"
API_KEY = "OBLR_API_KEY"
"""Environment variable with the key of the servers."""
INFO, GENERATE, DIGESTS, SPECULATION = (f"{PREFIX}/{name}" for name in ("info", "generate", "digests", "speculation"))
PUSH = tuple(f"{PREFIX}/push/{step}" for step in ("open", "start", "update", "finish", "abort"))
PUSH_OPEN, PUSH_START, PUSH_UPDATE, PUSH_FINISH, PUSH_ABORT = PUSH
REFUSED, INVALID, FAILED = 409, 400, 500
"""HTTP status if the server's state forbids the request, if the request is invalid, and if the engine failed."""

DAMAGED = "damaged"
"""The "kind" in the JSON of a refusal if a bucket was damaged on the way: a second push may help."""

PROTOCOL = 5
"""Version of these messages, to be raised with every change. Both sides must have the same."""


class Message(BaseModel):
    """Base of all messages; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Holding(Message):
    """Names the weights of a push. Example: Holding(holder="9f2c51", version=3); Holding() is the checkpoint."""

    holder: str = ""
    version: int = 0


class Info(Message):
    """What a server says about itself.

    Example: Info(protocol=1, instance="7d3a90", model="/models/q", shapes="5be1...", dtype="float32",
                  max_model_len=1536, max_num_seqs=256, workers=1, transfer="oblr_server_shm", holding=Holding(),
                  unusable=None)
    """

    protocol: int
    instance: str  # drawn by each server process
    model: str
    shapes: str  # `shapes_digest` of the checkpoint it started from
    dtype: str
    quantization: str = "none"  # vLLM's name, e.g. "fp8_per_tensor"
    speculation: str = "none"
    routes: bool = False  # whether it can return routes
    vllm: dict[str, Any] = {}  # further options that it was started with
    max_model_len: int
    max_num_seqs: int
    workers: int  # processes that receive weights, one per GPU
    transfer: str  # name of the weight-transfer backend
    holding: Holding
    unusable: str | None


class GenerateBody(Message):
    """Prompts with their positions in the step's batch; the other fields are those of `SamplingRequest`."""

    holding: Holding
    prompts: list[list[int]] = Field(min_length=1)
    positions: list[int]
    group_size: int = Field(ge=1)
    temperature: float
    max_tokens: int = Field(ge=1)
    seed: int
    top_p: float
    top_k: int
    routes: bool = False

    @classmethod
    def of(
        cls, holding: Holding, request: SamplingRequest, prompts: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> GenerateBody:
        """A request for some prompts of a batch."""
        return cls(
            holding=holding, prompts=[list(ids) for ids in prompts], positions=list(positions), **asdict(request)
        )

    def request(self) -> SamplingRequest:
        """How to sample the prompts."""
        return SamplingRequest(**self.model_dump(exclude={"holding", "prompts", "positions"}))


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


class Response(Message):
    """One response. The trainer knows its prompt and position."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    routes: Routes | None = None


class GenerateAnswer(Message):
    """A group of responses for each prompt, in the order of the request, and the weights that sampled them."""

    holding: Holding
    groups: list[list[Response]]

    def samples(self, prompts: Sequence[Sequence[int]], positions: Sequence[int]) -> list[list[Sample]]:
        """The groups as `Sample` records; raises as `Routes.routes`."""
        return [
            [
                Sample(
                    group=position,
                    prompt_ids=tuple(prompt),
                    response_ids=one.ids,
                    logprobs=one.logprobs,
                    text=one.text,
                    finish_reason=one.finish_reason,
                    version=self.holding.version,
                    routes=None if one.routes is None else one.routes.routes(len(prompt) + len(one.ids)),
                )
                for one in group
            ]
            for position, prompt, group in zip(positions, prompts, self.groups, strict=True)
        ]


def ended_of(sample: Sample) -> Literal["stop", "length"]:
    """How a response of an engine ended."""
    return "length" if sample.finish_reason == "length" else "stop"


def to_response(sample: Sample) -> Response:
    """The part of a sample that is sent."""
    return Response.model_construct(
        ids=sample.response_ids,
        logprobs=sample.logprobs,
        text=sample.text,
        finish_reason=ended_of(sample),
        routes=None if sample.routes is None else Routes.of(sample.routes),
    )


class OpenBody(Message):
    """Parameters of the transport; the keys are those of the backend."""

    init_info: dict[str, Any]


class StartBody(Message):
    """A push begins; its manifest is a list of (name, dtype, shape)."""

    holding: Holding
    manifest: list[tuple[str, str, tuple[int, ...]]]


class UpdateBody(Message):
    """One bucket of the push that `holding` names."""

    holding: Holding
    update_info: dict[str, Any]


class FinishBody(Message):
    """All buckets have been sent."""

    holding: Holding


class AbortBody(Message):
    """The trainer gives the push up."""

    holding: Holding
    reason: str


class Report(Message):
    """What an engine's speculation did since the last report.

    Example: Report(drafts=120, proposed=540, accepted=310, below=7)
    """

    drafts: int  # of one sequence in one step
    proposed: int  # tokens in them
    accepted: int  # of these tokens
    below: int  # see `BreakEven.below`


class DigestsAnswer(Message):
    """Digests of the weights in place, one dict per worker; see `weights.verify`."""

    workers: list[dict[str, str]]


def shapes_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """A hash of all tensor names and shapes: it differs between architectures."""
    listing = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]
