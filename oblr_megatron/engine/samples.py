"""Converts requests to vLLM's sampling parameters, and vLLM's completions to checked samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oblr_megatron.engine.protocol import SamplingRequest, prompt_seed
from oblr_megatron.engine.routes import routes_of
from oblr_megatron.errors import RunError
from oblr_megatron.types import RECORDED, Sample


def sampling_params(request: SamplingRequest, group: int, vocab_size: int, stop: Sequence[int] = ()) -> Any:
    """vLLM's `SamplingParams` for the prompt at position `group` of the step's batch; `stop` tokens end a response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1 if request.greedy else request.group_size,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        max_tokens=request.max_tokens,
        stop_token_ids=list(stop),
        seed=prompt_seed(request.seed, group),  # vLLM adds g for response g of a group
        logprobs=min(request.recorded, vocab_size),  # besides that of the sampled token
        flat_logprobs=True,
        detokenize=False,  # done once at the end: decoding each token costs a small model 15%
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM would deep-copy it, but only this request uses it
    )


def to_sample(
    group: int,
    prompt: Sequence[int],
    completion: Any,
    version: int,
    tokenizer: Any,
    vocab_size: int,
    *,
    routes: bool = False,
    recorded: bool = False,
) -> Sample:
    """One response, checked: a log-prob for each token, a normal end, one version of the weights throughout.

    Args:
        group: position of the prompt in the step's batch.
        prompt: its token ids.
        completion: vLLM's `CompletionOutput`.
        version: of the weights that are served.
        tokenizer: for the text.
        vocab_size: rows of the checkpoint's embedding. vLLM pads them, and no token may come from the padding.
        routes: whether the sample holds the routes of its tokens.
        recorded: whether it holds the most likely tokens at each draw.

    Raises:
        RunError: a check failed.
    """
    versions = {span.version for span in completion.weight_versions or ()}
    if versions != {str(version)}:
        raise RunError(f"a response was sampled by weights {sorted(versions)}, not by version {version}")
    firsts = completion.logprobs.start_indices  # each token's entries begin with the one that was drawn
    logprobs = [completion.logprobs.logprobs[first] for first in firsts] if recorded else completion.logprobs.logprobs
    if len(logprobs) != len(completion.token_ids) or completion.finish_reason not in ("stop", "length"):
        raise RunError(
            f"a response of {len(completion.token_ids)} tokens has {len(logprobs)} log-probs and ended with "
            f"{completion.finish_reason!r}"
        )
    largest = max(completion.token_ids, default=0)
    if largest >= vocab_size:
        raise RunError(f"a response holds token {largest}, outside the vocabulary of {vocab_size}")
    return Sample(
        group=group,
        prompt_ids=tuple(prompt),
        response_ids=tuple(completion.token_ids),
        logprobs=tuple(logprobs),
        text=tokenizer.decode(list(completion.token_ids), skip_special_tokens=True),
        finish_reason=completion.finish_reason,
        version=version,
        routes=routes_of(completion.routed_experts, len(prompt) + len(completion.token_ids)) if routes else None,
        recorded=_recorded(completion.logprobs, len(logprobs)) if recorded else None,
    )


def _recorded(logprobs: Any, tokens: int) -> NDArray[np.void]:
    """`Sample.recorded` from vLLM's `FlatLogprobs`: for each token the drawn one, then the most likely ones.

    Raises:
        RunError: the tokens have different numbers of entries.
    """
    if tokens == 0:
        return np.zeros((0, 0), RECORDED)
    if len(logprobs.token_ids) % tokens or len({*np.diff(logprobs.start_indices).tolist()}) > 1:
        raise RunError(f"the engine returned {len(logprobs.token_ids)} log-probs for {tokens} tokens")
    table = np.zeros((tokens, len(logprobs.token_ids) // tokens), RECORDED)
    table["id"] = np.reshape(logprobs.token_ids, table.shape)
    table["logprob"] = np.reshape(logprobs.logprobs, table.shape)
    return table[:, 1:].copy()
