"""Speculation that changes no draw: verifies drafts with the noise that sampling without drafts would use.

vLLM verifies drafts by rejection sampling, which draws other random numbers than plain sampling does. Samples of a seed
would then depend on when there were drafts, and so on the time that steps take. Here every position of a draft draws
its token as plain sampling would at that position. Tokens are kept up to the first one that differs from the draft:

    x_j = draw(p_j, noise_j)   for j = 0, 1, ...          keep x_0, ..., x_a, with the least a where x_a != draft_a

A draft without probabilities of its own (n-grams, suffixes) is accepted with chance p(draft) by both rules, so nothing
is lost. Log-probs come from vLLM's own sampler: they are of the distribution that was sampled from.

It also avoids a fault of vLLM 0.32 on CPUs: its rejection sampler writes temperature, top_p and top_k of the drafts'
positions into a copy, and then divides the logits by uninitialised memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def install() -> None:
    """Replace vLLM's rejection sampling, in both of its model runners.

    Raises:
        RuntimeError: this vLLM verifies drafts elsewhere.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not hasattr(rejection_sampler, "RejectionSampler"):
        raise RuntimeError("this vLLM has no RejectionSampler: speculation would change the draws")
    rejection_sampler.RejectionSampler.forward = verify  # type: ignore[method-assign, assignment]
    if current_platform.is_cuda():  # CPU engines have the first runner (engine/handle.py)
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler as second

        if not hasattr(second, "rejection_sample"):
            raise RuntimeError("this vLLM's runner V2 has no rejection_sample: speculation would change the draws")
        second.rejection_sample = verify_with_positions


def verify(sampler: Any, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
    """`RejectionSampler.forward` of vLLM's first model runner: the only one on CPUs, and that of "suffix" on GPUs.

    Args:
        sampler: the `RejectionSampler`.
        metadata: vLLM's `SpecDecodeMetadata`, of B requests with R rows in total: each draft token and one more.
        draft_probs: not used; n-grams and suffixes have none.
        logits: [R, V], request after request.
        sampling_metadata: vLLM's `SamplingMetadata`.

    Returns:
        vLLM's `SamplerOutput`, [B, longest draft + 1] tokens, -1 after the last one that is kept.
    """
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    excluded = sampling_metadata.allowed_token_ids_mask is not None or sampling_metadata.bad_words_token_ids
    assert not excluded, "a run excludes no tokens"
    device = logits.device
    lengths = torch.tensor(metadata.num_draft_tokens, device=device) + 1
    request_of = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    generators = {
        row: sampling_metadata.generators[request]
        for row, request in enumerate(request_of.tolist())
        if request in sampling_metadata.generators
    }
    states = {
        request: (generator, _state(generator))
        for request, generator in sampling_metadata.generators.items()
        if metadata.num_draft_tokens[request]
    }
    each_row = replace(
        sampling_metadata,
        generators=generators,  # the rows of a request share one, and draw from it in their order
        **{
            name: None if (values := getattr(sampling_metadata, name)) is None else values[request_of]
            for name in ("temperature", "top_p", "top_k")
        },
    )
    drawn = sampler.sampler(logits=logits, sampling_metadata=each_row)
    expected = torch.full_like(request_of, -1)
    expected[metadata.target_logits_indices.long()] = metadata.draft_token_ids.long()
    starts = lengths.cumsum(0) - lengths
    tokens, kept, rows = keep(drawn.sampled_token_ids[:, 0], expected, starts, lengths, metadata.max_spec_len + 1)
    counts = kept.tolist() if states else []
    for request, (generator, state) in states.items():
        _rewind(generator, state, metadata.num_draft_tokens[request] + 1, counts[request])
    logprobs = drawn.logprobs_tensors
    if logprobs is not None:
        flat = rows.flatten()
        logprobs = LogprobsTensors(
            logprobs.logprob_token_ids[flat], logprobs.logprobs[flat], logprobs.selected_token_ranks[flat]
        )
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def verify_with_positions(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    *_: Any,
    use_fp64: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rejection_sample` of vLLM's second model runner (GPUs), where noise is a function of seed and position.

    Args:
        target_logits: [R, V], at the temperature and filtered, request after request.
        draft_sampled: [R] input token of each row; from the second row of a request on, its draft.
        cu_num_logits: [B + 1] first row of each request, and R.
        pos: [R] position of each row.
        expanded_idx_mapping: [R] place of each row's request in `temperature` and `seed`.
        num_speculative_steps: longest draft.
        draft_logits, idx_mapping, expanded_local_pos: not used.
        temperature, seed: of all requests.
        use_fp64: precision of the noise.

    Returns:
        tokens [B, longest draft + 1], and [B] how many of them are kept.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    drawn = gumbel_sample(
        target_logits,
        expanded_idx_mapping,
        temperature,
        seed,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    starts, lengths = cu_num_logits[:-1].long(), cu_num_logits.diff().long()
    expected = draft_sampled.long().roll(-1)
    expected[starts + lengths - 1] = -1
    tokens, kept, _rows = keep(drawn, expected, starts, lengths, num_speculative_steps + 1)
    return tokens.to(draft_sampled.dtype), kept.int()


def keep(
    drawn: torch.Tensor, expected: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of each request up to the first one that differs from its draft, that one included.

    Example: drawn [5, 6, 8, 9], expected [5, 7, -1, -1], starts [0, 3], lengths [3, 1], width 3: tokens
    [[5, 6, -1], [9, -1, -1]], kept [2, 1].

    Args:
        drawn: [R] tokens, request after request.
        expected: [R] the draft at each row; -1 for none.
        starts: [B] first row of each request.
        lengths: [B] its rows.
        width: of the result, at least the longest of `lengths`.

    Returns:
        tokens [B, width], -1 after the last one; [B] how many are kept; [B, width] the row of each.
    """
    column = torch.arange(width, device=drawn.device)
    inside = column < lengths[:, None]
    rows = (starts[:, None] + column).clamp_(max=len(drawn) - 1)
    equal = (drawn == expected)[rows] & inside
    before = torch.cat([torch.ones_like(equal[:, :1]), equal[:, :-1]], 1).cumprod(1).bool() & inside
    return torch.where(before, drawn[rows], -1), before.sum(1), rows


def _state(generator: torch.Generator) -> Any:
    """A point of the generator's sequence: a state on CPUs, an offset on GPUs."""
    return generator.get_state() if generator.device.type == "cpu" else generator.get_offset()


def _rewind(generator: torch.Generator, state: Any, draws: int, kept: int) -> None:
    """Set the generator so that the request's next draw is the one for its next token.

    This step began at `state` and made `draws` draws, one for each row; `kept` of these tokens remain.
    """
    if draws == kept:
        return
    if generator.device.type == "cpu":
        generator.set_state(state)
        for _ in range(kept):  # as vLLM's sampler on CPUs does for each token
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    else:
        generator.set_offset(state + kept * (generator.get_offset() - state) // draws)
