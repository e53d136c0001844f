"""Do a Megatron checkpoint and a Hugging Face directory give the same logits?

The checkpoint goes through megatron-core's own loading into a policy, the directory through transformers, both in fp32
and one after the other. The two may add in another order and do nothing else differently, so their logits differ by a
few roundings: on a CPU 0 to 3e-7 of the largest logit, from models of two layers to Qwen3-0.6B's shape (where it is 0).
One of the 16 values of one q norm off by 0.05 moves them by 2e-3 of it, heads in another order, gate for up or a
neighbour's expert by tenths. TOLERANCE lies between, with room for other kernels and more layers. It does not find a
wrong value too small to be seen in a logit: that is what checksums are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from oblr_megatron.checkpoint.distributed import load_weights
from oblr_megatron.checkpoint.pieces import single_process
from oblr_megatron.config import ModelConfig
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.qwen3 import build_policy
from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.transformer_config import HFConfig
from oblr_megatron.types import MicroBatch

PROMPT = "Question: what is 12 + 30? Answer: 42. The capital of France is"
TOLERANCE = 1e-4  # of the largest logit


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near two models' logits are. Example: Agreement(difference=9.5e-06, scale=14.2, same_top=16, tokens=16)"""

    difference: float  # largest, absolute
    scale: float  # largest logit, absolute
    same_top: int  # positions whose likeliest token is the same
    tokens: int

    @property
    def holds(self) -> bool:
        """Within the tolerance; not where a logit is NaN."""
        return self.difference <= TOLERANCE * self.scale

    def __str__(self) -> str:
        relative = self.difference / self.scale if self.scale else float("nan")
        return (
            f"logits of {self.tokens} tokens differ by {self.difference:.1e} at most, {relative:.1e} of the largest; "
            f"likeliest token the same in {self.same_top} of {self.tokens}"
        )


def check_logits(checkpoint: Path, hf_dir: Path, dtype: torch.dtype, prompt: str = PROMPT) -> Agreement:
    """Compare the logits of every token of a prompt; takes 12 bytes a parameter.

    Args:
        checkpoint: of the run's own naming (see `pieces.py`).
        hf_dir: with weights and tokenizer.
        dtype: both models' weights are rounded to it, so that a conversion to it counts as exact.
        prompt: the text; the shorter, the less it shows.

    Raises:
        RunError: the logits differ, or the checkpoint does not hold the model.
        UserError: the tokenizer makes no token out of the prompt.
    """
    from transformers import AutoConfig, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(hf_dir)(prompt, return_tensors="pt").input_ids
    if not ids.numel():
        raise UserError("the prompt has no tokens", where="--prompt", fix="give another text")
    with single_process() as parallel:
        ids = ids.to(parallel.device)
        found = _policy_logits(checkpoint, hf_dir, AutoConfig.from_pretrained(hf_dir), dtype, ids, parallel)
    agreement = agreement_of(found, _transformers_logits(hf_dir, dtype, ids))
    if not agreement.holds:
        raise RunError(
            f"{checkpoint} and {hf_dir} are not the same model: {agreement}; {TOLERANCE:.0e} of the largest is allowed"
        )
    return agreement


def agreement_of(found: Tensor, expected: Tensor) -> Agreement:
    """Of two models' logits, [b, t, V]."""
    return Agreement(
        difference=float((found - expected).abs().max()),
        scale=float(expected.abs().max()),
        same_top=int((found.argmax(-1) == expected.argmax(-1)).sum()),
        tokens=found.shape[:-1].numel(),
    )


def _policy_logits(
    checkpoint: Path, hf_dir: Path, hf_config: HFConfig, dtype: torch.dtype, ids: Tensor, parallel: Parallel
) -> Tensor:
    """[b, t, V] without the padded vocabulary."""
    policy = build_policy(hf_config, ModelConfig.model_validate({"path": hf_dir, "dtype": "float32"}), parallel)
    load_weights(policy, checkpoint)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter.copy_(parameter.to(dtype))
    batch = MicroBatch(
        input_ids=ids,
        labels=torch.zeros_like(ids),
        mask=torch.zeros_like(ids, dtype=torch.bool),
        rollout_logprobs=torch.zeros(ids.shape, device=ids.device),
        sample_index=torch.arange(len(ids), device=ids.device),
    )

    def keep(logits: Tensor, _batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return logits.sum(), {"logits": logits[..., : policy.vocab_size].float()}

    return run_schedule(policy, [batch], keep, forward_only=True)[0]["logits"]


@torch.no_grad()
def _transformers_logits(hf_dir: Path, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """[b, t, V]"""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype)
    logits: Tensor = model.float().to(ids.device).eval()(ids).logits
    return logits
