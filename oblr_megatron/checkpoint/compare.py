"""Compares the logits of a Megatron checkpoint with those of a Hugging Face directory.

megatron-core loads the checkpoint into a policy, transformers loads the directory, both in fp32. The two differ only in
the order of additions: on a CPU by 0 to 3e-7 of the largest logit, for models from two layers to Qwen3-0.6B's shape
(where the difference is 0). An error of 0.05 in one of the 16 values of one q norm changes logits by 2e-3 of the
largest; permuted heads, swapped gate and up, or a wrong expert change them by tenths. TOLERANCE lies between, with room
for other kernels and more layers. Errors too small to show in a logit are found by checksums instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from oblr_megatron.checkpoint.distributed import load_weights
from oblr_megatron.checkpoint.hf_description import hf_config_in, tokenizer_in
from oblr_megatron.checkpoint.hf_dir import check_hf_files
from oblr_megatron.checkpoint.pieces import single_process
from oblr_megatron.config import ModelConfig
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.transformer_config import HFConfig
from oblr_megatron.types import MicroBatch

PROMPT = "Question: what is 12 + 30? Answer: 42. The capital of France is"
TOLERANCE = 1e-4  # relative to the largest logit


@dataclass(frozen=True, slots=True)
class Agreement:
    """Distance of two models' logits. Example: Agreement(difference=9.5e-06, scale=14.2, same_top=16, tokens=16)"""

    difference: float  # largest absolute difference
    scale: float  # largest absolute logit
    same_top: int  # positions with the same most likely token
    tokens: int

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; False if a logit is NaN."""
        return self.difference <= TOLERANCE * self.scale

    def __str__(self) -> str:
        relative = self.difference / self.scale if self.scale else float("nan")
        return (
            f"logits of {self.tokens} tokens differ by at most {self.difference:.1e}, {relative:.1e} of the largest; "
            f"same most likely token at {self.same_top} of {self.tokens} positions"
        )


def prompt_ids(files: Path, prompt: str = PROMPT) -> Tensor:
    """Token ids [1, t] of a prompt; longer texts test more. `files` has config and tokenizer, and needs no weights.

    Raises:
        UserError: the prompt has no tokens, or config or tokenizer cannot be read.
    """
    tokenizer = tokenizer_in(files, check_hf_files(files)["vocab_size"])
    ids: Tensor = tokenizer(prompt, return_tensors="pt").input_ids
    if not ids.numel():
        raise UserError("the prompt has no tokens", where="--prompt", fix="give another text")
    return ids


def check_logits(checkpoint: Path, hf_dir: Path, dtype: torch.dtype, ids: Tensor) -> Agreement:
    """Compare the logits of every token of a prompt; takes 12 bytes of memory per parameter.

    Args:
        checkpoint: with a run's tensor names (see pieces.py).
        hf_dir: with weights.
        dtype: both models' weights are rounded to it, so that a conversion to it counts as exact.
        ids: of the prompt, see `prompt_ids`.

    Raises:
        RunError: the logits differ, or the checkpoint does not hold the model.
    """
    with single_process() as parallel:
        ids = ids.to(parallel.device)
        logits = _policy_logits(checkpoint, hf_dir, hf_config_in(hf_dir), dtype, ids, parallel)
    agreement = agreement_of(logits, _transformers_logits(hf_dir, dtype, ids))
    if not agreement.holds:
        raise RunError(f"{checkpoint} and {hf_dir} are different models: {agreement}; the tolerance is {TOLERANCE:.0e}")
    return agreement


def agreement_of(logits: Tensor, expected: Tensor) -> Agreement:
    """Compare two models' logits, [b, t, V]."""
    return Agreement(
        difference=float((logits - expected).abs().max()),
        scale=float(expected.abs().max()),
        same_top=int((logits.argmax(-1) == expected.argmax(-1)).sum()),
        tokens=logits.shape[:-1].numel(),
    )


def _policy_logits(
    checkpoint: Path, hf_dir: Path, hf_config: HFConfig, dtype: torch.dtype, ids: Tensor, parallel: Parallel
) -> Tensor:
    """Logits [b, t, V] of the checkpoint, without the padded vocabulary."""
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

    def keep(hidden: Tensor, _batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return hidden.sum(), {"logits": policy.head.logits(hidden)[..., : policy.vocab_size].float()}

    return run_schedule(policy, [batch], keep, forward_only=True)[0]["logits"]


@torch.no_grad()
def _transformers_logits(hf_dir: Path, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Logits [b, t, V] of the directory."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype)
    logits: Tensor = model.float().to(ids.device).eval()(ids).logits
    return logits
