"""What the trainer and an API server say to each other, as JSON: paths, bodies, answers. Imports no vllm and no torch.

A server holds the weights of one push. The push's `holder`, drawn by each run, and its version come back with every
request for samples, and a server that holds anything else refuses: after a restart it is not mistaken for the one that
was pushed to, nor are the weights of another run for this one's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from oblr_megatron.types import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oblr_megatron.engine.protocol import SamplingRequest

PREFIX = "/oblr"
INFO, GENERATE, DIGESTS = f"{PREFIX}/info", f"{PREFIX}/generate", f"{PREFIX}/digests"
PUSH_OPEN, PUSH_START, PUSH_UPDATE, PUSH_FINISH, PUSH_ABORT = (
    f"{PREFIX}/push/{step}" for step in ("open", "start", "update", "finish", "abort")
)
REFUSED, INVALID, FAILED = 409, 400, 500
"""Status of what the server's state, the request itself, and the engine's failure forbid."""

PROTOCOL = 1
"""Raised with every change of these messages; both sides must have the same."""


class Message(BaseModel):
    """Base of all of them: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Holding(Message):
    """Which weights a server has. Example: Holding(holder="9f2c51", version=3); as started: Holding()"""

    holder: str = ""
    version: int = 0


class Info(Message):
    """A server about itself.

    Example: Info(protocol=1, instance="7d3a90", model="/models/q", shapes="5be1...", dtype="float32",
                  max_model_len=1536, max_num_seqs=256, workers=1, transfer="oblr_server_shm", holding=Holding(),
                  unusable=None)
    """

    protocol: int
    instance: str  # drawn by each server process
    model: str
    shapes: str  # `shapes_digest` of the checkpoint it started from
    dtype: str
    quantization: str = "none"  # vLLM's name of it, e.g. "fp8_per_tensor"
    max_model_len: int
    max_num_seqs: int
    workers: int  # processes that take weights, one a GPU
    transfer: str  # name of the weight-transfer backend
    holding: Holding
    unusable: str | None


class GenerateBody(Message):
    """Prompts at their positions in the step's batch, and how to sample them; fields as in `SamplingRequest`."""

    holding: Holding
    prompts: list[list[int]] = Field(min_length=1)
    positions: list[int]
    group_size: int = Field(ge=1)
    temperature: float
    max_tokens: int = Field(ge=1)
    seed: int
    top_p: float
    top_k: int

    @classmethod
    def of(
        cls, holding: Holding, request: SamplingRequest, prompts: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> GenerateBody:
        """A request for some prompts of a batch."""
        return cls(
            holding=holding,
            prompts=[list(prompt) for prompt in prompts],
            positions=list(positions),
            group_size=request.group_size,
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            top_p=request.top_p,
            top_k=request.top_k,
        )


class Response(Message):
    """One response; prompt and position are known to whoever asked."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]


class GenerateAnswer(Message):
    """A group of responses for each prompt, in the order asked, and the weights that made them."""

    holding: Holding
    groups: list[list[Response]]

    def samples(self, prompts: Sequence[Sequence[int]], positions: Sequence[int]) -> list[list[Sample]]:
        """The groups as records."""
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
                )
                for one in group
            ]
            for position, prompt, group in zip(positions, prompts, self.groups, strict=True)
        ]


def to_response(sample: Sample) -> Response:
    """A record as it travels."""
    return Response.model_construct(
        ids=sample.response_ids, logprobs=sample.logprobs, text=sample.text, finish_reason=sample.finish_reason
    )


class OpenBody(Message):
    """Parameters of the data plane, in the backend's own words."""

    init_info: dict[str, Any]


class StartBody(Message):
    """A push begins: what it will hold as (name, dtype, shape), and whose it is."""

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


class DigestsAnswer(Message):
    """What is in place, worker by worker; see `weights.verify`."""

    workers: list[dict[str, str]]


def shapes_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """What tells models of different architecture apart: a hash of all names and shapes."""
    listing = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]
