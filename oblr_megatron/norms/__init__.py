"""Exact squared gradient norms of single samples, over all parameters, in every parallel layout.

    w_i = ||grad_theta loss_i||^2                                         docs/norms_library.md

    from oblr_megatron.norms import TokenBatch, clipped_grad_sum, per_sample_sq_grad_norms, tapped, weighted_grad_sum

For each parameter: sum the partial gradients of one sample over ranks, square, and count each shard once. The trainer
is the first user. Imports no vLLM; loads no configuration, reward or rollout. In reading order:

    api             the public functions
    attach          taps on a model that somebody else has built; own_gradients: `main_grad` for one without a wrapper
    rules           how each parameter's gradient is spread over ranks: shard, partial or copy
    segments        per-sample weight gradients from the factors x and dy; pure functions
    products        ||dy^T x||^2 in tiles, by the cheaper of two methods
    norm_sink       receives x and dy during backward and passes on squared norms
    accumulate      sums each sample's squared norms on one rank; buffers what other ranks must add to first
    embedding_rows  the buffered rows of the embedding and of a tied output layer
    reduce          combines the ranks
    two_pass, inline, bookkeep, stash    the modes; buffer: gradients in the layout of megatron's buffers
    oracle          the same norms, slow and obvious: one autograd call a sample
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oblr_megatron.norms.api import clipped_grad_sum, per_sample_sq_grad_norms, weighted_grad_sum
    from oblr_megatron.norms.attach import tapped
    from oblr_megatron.types import TokenBatch

__all__ = ["TokenBatch", "clipped_grad_sum", "per_sample_sq_grad_norms", "tapped", "weighted_grad_sum"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the oracle and the segments load no megatron-core."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oblr_megatron.norms import api

    return getattr(api, name)
