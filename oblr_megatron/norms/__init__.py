"""Exact per-sample gradient norms for a GPTModel that somebody else builds and trains (docs/norms_library.md).

    from oblr_megatron.norms import TokenBatch, clipped_grad_sum, per_sample_sq_grad_norms, tapped, weighted_grad_sum

The passes are those of the trainer (`oblr_megatron/gradient`). Imports no vLLM; loads no configuration, reward or
rollout.
"""

from oblr_megatron.norms.api import clipped_grad_sum, per_sample_sq_grad_norms, weighted_grad_sum
from oblr_megatron.norms.attach import tapped
from oblr_megatron.types import TokenBatch

__all__ = ["TokenBatch", "clipped_grad_sum", "per_sample_sq_grad_norms", "tapped", "weighted_grad_sum"]
