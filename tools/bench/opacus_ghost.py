"""Run an OBLR-PO step with Opacus's ghost clipping, to compare the cost of per-sample norms.

Opacus computes ||g_i|| from each layer's inputs and output gradients in a first backward pass, and a weighted sum of
the g_i in a second one through the same graph (`opacus.utils.fast_gradient_clipping_utils`). Opacus's weights are
min(1, C / ||g_i||); here a rule computes them from the norms. The rest is Opacus's own code, order and defaults.

The model is transformers' Qwen3 with torch's RMSNorm, for which Opacus has a grad sampler (transformers' RMSNorm would
use functorch). Every parameter is covered: linear layers and the embedding by ghost norms, norm weights by per-sample
gradients. Opacus refuses tied embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

if TYPE_CHECKING:
    from oblr_megatron.config import OptimizerConfig
    from oblr_megatron.types import Sample

WeightRule = Callable[[Tensor], Tensor]
"""Squared norms [n] fp64 -> weights of the samples' gradients [n]."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples of equal length, as one batch.

    Example for prompt (5, 9) and responses (7, 1), (3, 4): Rows(ids=[[5, 9, 7, 1], [5, 9, 3, 4]], prompt=2)
    """

    ids: Tensor  # [n, t] int64
    prompt: int  # tokens per prompt

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Rows:
        """Stack samples. Prompts and responses must have equal lengths, since padding would cost Opacus extra time."""
        lengths = {(len(sample.prompt_ids), len(sample.response_ids)) for sample in samples}
        assert len(lengths) == 1, f"samples have different lengths: {sorted(lengths)}"
        ids = torch.tensor([sample.prompt_ids + sample.response_ids for sample in samples], device=device)
        return cls(ids, len(samples[0].prompt_ids))

    def split(self) -> list[Rows]:
        """One batch per sample."""
        return [Rows(ids, self.prompt) for ids in self.ids.split(1)]


class GhostTrainer:
    """A plain PyTorch policy with AdamW and clipping. Opacus's norms weight its gradient.

    Args:
        model: from `build_model`.
        optimizer: settings for torch's AdamW, which megatron-core uses on a CPU.
        lr: learning rate.
    """

    def __init__(self, model: Qwen3ForCausalLM, optimizer: OptimizerConfig, lr: float) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping  # only these steps need Opacus

        self._ghost = GradSampleModuleFastGradientClipping(model.train(), loss_reduction="sum")
        self._weights = list(model.parameters())
        self._clip = optimizer.clip_grad
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
        )

    def plain_gradient(self, batches: Sequence[Rows], coefficients: Tensor) -> None:
        """Set the gradients to -sum_n c_n grad_theta sum_t log pi(o_t), for coefficients [n]; computes no norms."""
        self._ghost.disable_hooks()
        for rows, part in zip(batches, coefficients.split([len(rows.ids) for rows in batches]), strict=True):
            _weighted(self._losses(rows), part).backward()
        self._ghost.enable_hooks()

    def ghost_gradient(self, batches: Sequence[Rows], rule: WeightRule) -> None:
        """The same gradient with coefficients from the rule, applied to the squared norms of all samples."""
        losses, sq_norms = self._norm_pass(batches)
        self._optimizer.zero_grad()  # clears the unweighted sum of the first backward
        self._ghost.disable_hooks()
        _weighted(losses, rule(sq_norms)).backward()
        self._ghost.enable_hooks()

    def update(self) -> None:
        """Clip the gradients, step, clear them."""
        nn.utils.clip_grad_norm_(self._weights, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def sq_norms(self, batches: Sequence[Rows]) -> Tensor:
        """||grad_theta sum_t log pi(o_t)||^2 of each sample: [n] fp64, from norms in the weights' dtype."""
        sq_norms = self._norm_pass(batches)[1]
        self._optimizer.zero_grad()
        return sq_norms

    def _norm_pass(self, batches: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Losses [n] with their graphs kept for the second backward, and squared norms [n]."""
        losses, sq_norms = [], []
        for rows in batches:
            losses.append(self._losses(rows))
            losses[-1].sum().backward(retain_graph=True)
            sq_norms.append(self._ghost.get_norm_sample().double().square())
        return torch.cat(losses), torch.cat(sq_norms)

    def _losses(self, rows: Rows) -> Tensor:
        """-sum_t log pi(o_t) of each sample: [n]."""
        logits = self._ghost(input_ids=rows.ids, use_cache=False).logits[:, rows.prompt - 1 : -1]  # [n, T, V]
        labels = rows.ids[:, rows.prompt :, None]
        return -logits.log_softmax(dim=-1).gather(-1, labels).sum(dim=(1, 2))


def build_model(config: Qwen3Config, dtype: torch.dtype, device: torch.device) -> Qwen3ForCausalLM:
    """transformers' Qwen3 with SDPA attention, torch's RMSNorm and random weights."""
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config)
    model.model.embed_tokens.padding_idx = cast(int, None)  # otherwise the padding token gets no gradient
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen3RMSNorm):
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    nn.Module.to(model, device=device, dtype=dtype)  # transformers' own `to` is not typed
    return model


def _weighted(losses: Tensor, coefficients: Tensor) -> Tensor:
    return (coefficients.to(losses) * losses).sum()
