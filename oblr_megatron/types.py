"""The records that travel between the stages of a step.

Shape letters used in the whole package: Q prompts a step, G responses a prompt (the group), N = Q * G samples in
prompt-major order (sample n belongs to prompt n // G), b samples in a microbatch, t padded tokens of a microbatch,
T tokens of one sample, V vocabulary, P parameters, R folds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # `types` is imported by the torch-free half of the package
    import numpy as np
    from torch import Tensor

FinishReason = Literal["stop", "length", "failed", "late"]
"""End of a response: by itself; at a limit of tokens or turns; by an error of the environment; after its deadline.
The last two have an empty text, and the tokens drawn so far."""


Speculation = Literal["none", "ngram", "suffix"]
"""Where an engine takes drafts of the next tokens from."""

HeadDtype = Literal["auto", "model", "float32"]
"""Dtype of the logits of bf16 weights; "auto" is float32 on GPUs (docs/precision.md)."""


def widens_logits(head_dtype: HeadDtype, dtype: str, *, on_gpu: bool) -> bool:
    """Whether the output layer multiplies bf16 factors to fp32 logits."""
    return dtype == "bfloat16" and (head_dtype == "float32" or (head_dtype == "auto" and on_gpu))


RECORDED = [("id", "<i4"), ("logprob", "<f4")]
"""numpy's description of a recorded token: 8 bytes. A logprob of -inf marks an entry that names no token."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, ready to be sampled from.

    Example: Prompt(row=41, id="gsm8k-train-41", text="Q: 2+3?\\nA:", token_ids=(5, 9, 2), answer="5", source="gsm8k")
    """

    row: int  # line in the source file, counted from 0
    id: str
    text: str  # after the template
    token_ids: tuple[int, ...]
    answer: str  # gold answer as the data set gives it
    source: str
    tolerance: str = ""  # "" the answer is exact; "0.1" or "1%" is how far off the benchmark lets a number be
    columns: str = ""  # all columns of the row as a JSON object; "" without data.keep_columns


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, as the rollout engine returned it.

    `logprobs` are those of the distribution the tokens were drawn from (temperature applied), one for each response
    token; an end-of-sequence token that the model produced is part of the response.

    With an environment (docs/environments.md) the response is all that follows the prompt. `mask` then says which of
    its tokens the policy wrote. The score is the sum over these tokens alone; the others have a log-prob of 0.

    `routes` (docs/moe.md, "Routing replay") are the experts that the engine took for every token of prompt and
    response. Row j belongs to input position j. A row of -1 means that the route is not known. The last token of a
    response is never an input, so its row is -1. Equality of samples ignores the routes.

    `recorded` (`algo.center`, `rollout.top_k`) are the tokens that the engine gave most probability at each token of
    the response, with their log-probs, as `RECORDED`. The drawn token may not be among them. Under a filter a row that
    ends with a log-prob of -inf names all tokens that could be drawn. Equality ignores them, too.

    Example: Sample(group=0, prompt_ids=(5, 9, 2), response_ids=(7, 1), logprobs=(-0.1, -0.02), text="5",
                    finish_reason="stop", version=3)
    """

    group: int  # position of the prompt in the step's batch, 0..Q-1
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str  # decoded without special tokens
    finish_reason: FinishReason
    version: int  # of the weights that produced it
    mask: tuple[bool, ...] = ()  # True where the policy wrote the response's token; empty: everywhere
    environment_reward: float | None = None  # of the environment, if it gives one
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)  # int16 [tokens, layers, k]
    recorded: np.ndarray | None = field(default=None, compare=False, repr=False)  # RECORDED [response tokens, k]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_inputs(self) -> int:
        """Tokens that the policy reads in a pass: all but the last one, which predicts nothing; at least 1."""
        return max(1, self.num_tokens - 1)

    @property
    def length(self) -> int:
        """Response tokens that the policy wrote."""
        return sum(self.mask) if self.mask else len(self.response_ids)

    @property
    def turns(self) -> int:
        """Stretches of tokens that the policy wrote."""
        before = (False, *self.mask[:-1])
        written = sum(own and not last for own, last in zip(self.mask, before, strict=True)) if self.mask else 1
        return written if self.response_ids else 0


@dataclass(slots=True)
class Scored:
    """A step's rewards, on every rank.

    Example for Q = 1, G = 2: Scored(rewards=[[1., 0.]], lengths=[[5, 7]], failures=0)
    """

    rewards: Tensor  # [Q, G] fp64
    lengths: Tensor  # [Q, G] int64, response tokens that the policy wrote
    failures: int  # responses without a score (exception, deadline), counted as 0


class TokenRows:
    """The layout of a microbatch: one sample a row, padded on the right, or all samples packed in one row.

    It waits in host memory. A pass moves it to the device, but for some fields (`sequence.on_device`), and notes the
    counted tokens before, so that nothing waits for a GPU.
    """

    __slots__ = ()
    input_ids: Tensor  # [b, t] int64
    labels: Tensor  # [b, t] int64, what position j predicts
    mask: Tensor  # [b, t] bool, True where a label counts
    cu_seqlens: Tensor | None  # [n + 1] int32, packed only: sample i is tokens cu_seqlens[i]..cu_seqlens[i + 1]
    counted: Tensor | None  # [m] int64 in host memory, positions of the mask among the b * t; None: not noted

    @property
    def num_samples(self) -> int:
        """n, which is b unless packed."""
        return len(self.input_ids) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def per_token(self, values: Tensor) -> Tensor:
        """Expand values of samples [n] to their tokens: [b, t]."""
        if self.cu_seqlens is None:
            return values[:, None].expand(self.input_ids.shape)
        import torch

        lengths = self.cu_seqlens.diff().tolist()  # no index on the values' device, which would wait for it
        return torch.cat([value.expand(length) for value, length in zip(values, lengths, strict=True)])[None]

    def per_sample(self, values: Tensor) -> Tensor:
        """Sum values of this rank's tokens [b, t] over the counted tokens of each sample: [n]."""
        values = values.masked_fill(~self.mask, 0.0)
        if self.cu_seqlens is None:
            return values.sum(dim=1)
        import torch

        segments = self.per_token(torch.arange(self.num_samples, device=values.device))[0]
        return values.new_zeros(self.num_samples).index_add(0, segments, values[0])


@dataclass(slots=True)
class TokenBatch(TokenRows):
    """A microbatch of the norms' library (docs/norms_library.md). Subclasses may have more fields.

    Tensors with the shape of `input_ids` are padded and cut over context-parallel ranks like it. Tensors of [n] have
    one value a sample.

    Example, two samples as rows:    input_ids [[5, 9, 7], [3, 2, 0]]  labels [[9, 7, 0], [2, 0, 0]]
        mask [[T, T, F], [T, F, F]]
    Packed: input_ids [[5, 9, 7, 3, 2]], cu_seqlens [0, 3, 5]
    """

    input_ids: Tensor  # [b, t] int64
    labels: Tensor  # [b, t] int64, what position j predicts
    mask: Tensor  # [b, t] bool, True where a label counts
    cu_seqlens: Tensor | None = None  # [n + 1] int32, packed only
    sample_index: Tensor | None = None  # [n] int64, position among the samples of a call; the library sets it
    counted: Tensor | None = None  # as in `TokenRows`; a pass sets it


@dataclass(slots=True)
class MicroBatch(TokenRows):
    """Samples that go through the model together, padded on the right.

    Position j predicts token j + 1: `labels[:, j]` is that token, `mask[:, j]` is True where it is a response token and
    the policy wrote it. "Response tokens" means these alone, in all that follows.
    One sample a row, or packed: all samples in one row, separated at `cu_seqlens`.

    The last token of a sample predicts nothing, so it is a label and no input.

    Example for prompt (5, 9), response (7, 1), padded to 4:
        input_ids [[5, 9, 7, 0]]  labels [[9, 7, 1, 0]]  mask [[F, T, T, F]]  rollout_logprobs [[0, -.1, -.02, 0]]
        token_index [[0, 0, 1, 0]]
    Packed with a second sample of 3 tokens: shapes [1, 6], sample_index [n0, n1], cu_seqlens [0, 4, 6]
    """

    input_ids: Tensor  # [b, t] int64
    labels: Tensor  # [b, t] int64
    mask: Tensor  # [b, t] bool
    rollout_logprobs: Tensor  # [b, t] fp32, 0 where mask is False
    sample_index: Tensor  # [n] int64, position of each sample among the step's N; n = b unless packed
    cu_seqlens: Tensor | None = None  # [n + 1] int32, packed only: sample i is tokens cu_seqlens[i]..cu_seqlens[i + 1]
    token_index: Tensor | None = None  # [b, t] int64, place of `labels` among its response's tokens, 0 without mask
    routes: Tensor | None = None  # [b, t, layers, k] int16 in host memory, -1 without a route; None: none has one
    recorded_ids: Tensor | None = None  # [b, t, k] int32, tokens that the engine recorded at `labels`; None: none
    recorded_logprobs: Tensor | None = None  # [b, t, k] fp32, log mu of each; -inf where the engine named no token.
    # Both are in host memory until the loss.
    supported: Tensor | None = None  # [b, t] bool, True where no other token could be drawn at `labels`; None: nowhere
    counted: Tensor | None = None  # as in `TokenRows`; a pass sets it

    def of_tokens(self, table: Tensor) -> Tensor:
        """Look up values of response tokens: table [N, T] -> [b, t], 0 where mask is False."""
        assert self.token_index is not None, "the microbatch has no token_index"
        return table[self.per_token(self.sample_index), self.token_index].masked_fill(~self.mask, 0)

    @property
    def label_is_recorded(self) -> Tensor:
        """[b, t, k] bool, which of the recorded tokens is the label; False for entries that name no token."""
        assert self.recorded_ids is not None and self.recorded_logprobs is not None, "no tokens are recorded"
        return (self.recorded_ids == self.labels[..., None]) & (self.recorded_logprobs > float("-inf"))


@dataclass(frozen=True, slots=True)
class RouterMetrics:
    """Router statistics of the policy-gradient pass, mean over tokens and layers.

    Example: RouterMetrics(aux_loss=1.02, z_loss=3.1, max_load=1.9)
    """

    aux_loss: float  # before its coefficient; 1 when every expert is as likely as any other
    z_loss: float  # before its coefficient
    max_load: float  # largest load of an expert over the mean load of its layer: 1 to experts / experts per token
    route_mismatch_fraction: float | None = None  # share of the router's own choices that replay replaced


@dataclass(frozen=True, slots=True)
class RejectionMetrics:
    """Tokens and samples that `rollout.rejection` left out of a gradient, under verl's names.

    Example: RejectionMetrics(rollout_rs_masked_fraction=2e-4, rollout_rs_seq_masked_fraction=0.03, kl=1e-4)
    """

    rollout_rs_masked_fraction: float  # share of response tokens
    rollout_rs_seq_masked_fraction: float  # share of responses that lost a token
    kl: float  # mean of log pi_rollout - log pi_trainer, nats


@dataclass(frozen=True, slots=True)
class ClipMetrics:
    """The clipped ratios of a step's updates so far, shares of their response tokens, under verl's names.

    Example: ClipMetrics(pg_clipfrac=0.012, pg_clipfrac_lower=0.0, ppo_kl=3e-4)
    """

    pg_clipfrac: float  # ratios beyond 1 - clip_low or 1 + clip_high
    pg_clipfrac_lower: float  # ratios above clip_dual with a negative advantage
    ppo_kl: float  # mean of log pi_old - log pi, nats


@dataclass(slots=True)
class GradientStats:
    """Statistics of the policy gradient; the gradient itself is in the model's main_grad.

    Example: GradientStats(loss=-0.02, sq_norm=3.1e-3, fold_sq_norm_mean=1.1e-2, num_folds=4, entropy=1.9,
                           logprob_abs_diff=2e-6, truncated_ratio_fraction=0.0, num_tokens=3120)
    """

    loss: float  # sum_n coefficient_n * sum_t rho_t log pi_t, with the sign that is minimised
    sq_norm: float  # B = ||g||^2, unclipped, all parameters, all ranks
    fold_sq_norm_mean: float  # M = mean_f ||g_f||^2
    num_folds: int  # R; with 1, M carries no information
    entropy: float  # mean over response tokens of the sampling distribution's entropy, nats
    logprob_abs_diff: float  # mean |log pi_trainer - log pi_rollout| over response tokens
    truncated_ratio_fraction: float  # share of importance ratios cut at the cap
    num_tokens: int  # response tokens that went through the pass
    weight_mean: float = 1.0  # mean over them of rho, with what was left out as 0
    kl: float | None = None  # mean over them of k3 (algo/kl.py), nats: KL(pi || pi_ref); None without a penalty
    momentum_dot: float = math.nan  # <g, m>, m the average of earlier raw gradients; NaN without one
    sample_sq_norm: float = math.nan  # sum_n coefficient_n^2 w_n; NaN where norms are not measured
    routers: RouterMetrics | None = None  # for a mixture, when router losses have a pass
    rejection: RejectionMetrics | None = None  # with rollout.rejection
    clipping: ClipMetrics | None = None  # with algo.updates_per_batch
    unrecorded_fraction: float | None = None  # share of response tokens that were not recorded; with algo.center
