"""Options that model.batch_invariant refuses, because trainer and engine would get other bits. Imports no torch.

docs/zero_mismatch.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.errors import UserError
from oblr_megatron.families import head_dim

if TYPE_CHECKING:
    from oblr_megatron.config import Config

LONGEST = 2**13
"""A sum on a CPU is exact up to this many products. It bounds hidden size, intermediate size and sequence length."""
LARGEST_VOCAB = 2**18
SAME_BITS = ("aggregate_engine_logging", "block_size", "disable_log_stats", "enable_prefix_caching")
"""Options of [rollout.vllm] that change no log-prob."""
Refusal = tuple[str, str, str]
"""(what, the key, the fix)."""


def check_invariant(hf_config: Mapping[str, Any], config: Config, *, on_gpu: bool) -> None:
    """Refuse a run under model.batch_invariant that cannot have equal bits.

    Raises:
        UserError: names the first option.
    """
    if on_gpu:
        what = "model.batch_invariant on GPUs: trainer and engine have no common kernels there"
        raise UserError(what, where="config: model.batch_invariant", fix="set it to false, or run on a CPU")
    for what, key, fix in (*_anywhere(hf_config, config), *_on_cpu(hf_config, config)):
        raise UserError(f"model.batch_invariant with {what}", where=f"config: {key}", fix=fix)


def _anywhere(hf_config: Mapping[str, Any], config: Config) -> Iterator[Refusal]:
    model, rollout, parallel = config.model, config.rollout, config.parallel
    if model.dtype == "float64":
        yield 'dtype "float64": vLLM computes in float32 at most', "model.dtype", 'set it to "float32" or "bfloat16"'
    if rollout.dtype not in ("auto", model.dtype):
        what = f"{rollout.dtype} in the engine and {model.dtype} in the trainer"
        yield what, "rollout.dtype", 'set it to "auto"'
    if model.fp8 != "none":
        yield "fp8: its scales depend on the batch", "model.fp8", 'set it to "none"'
    if rollout.quantization != "none":
        what = "a quantised engine: its weights are not the trainer's"
        yield what, "rollout.quantization", 'set it to "none"'
    if num_experts(hf_config):
        what = "a mixture of experts: trainer and engine group its products differently"
        yield what, "model.path", "use a dense model, or set model.batch_invariant to false"
    if max(parallel.tensor_model_parallel_size, rollout.tensor_parallel_size) > 1:
        yield (
            "tensor parallelism: its ranks add up partial sums that are rounded",
            "parallel.tensor_model_parallel_size",
            "set it and rollout.tensor_parallel_size to 1; pipeline and data parallelism keep the bits",
        )
    if rollout.filters and not config.replays_support:
        what = "a filter without recorded tokens: the engine renormalises its log-probs, the trainer does not"
        fix = "set rollout.top_k to 1 to 1,024, or leave top_p, top_k and min_p out"
        yield what, f"rollout.{next(iter(rollout.filters))}", fix
    if rollout.speculation != "none":
        yield "speculation: it is not known to keep the bits", "rollout.speculation", 'set it to "none"'
    if rollout.servers:
        what = "servers: they are not started in this mode"
        yield what, "rollout.servers", "leave it out, so that the run starts its own engines"
    if rollout.overlap == "one_step":
        what = "samples that are one update old: their policy is another one"
        yield what, "rollout.overlap", 'set it to "none" or "stream"'
    if config.algo.updates_per_batch > 1:
        what = "several updates of a batch: after the first the policy is another one"
        yield what, "algo.updates_per_batch", "set it to 1"
    if others := sorted(set(rollout.vllm) - set(SAME_BITS)):
        yield f"{', '.join(others)}: it may choose other kernels", "rollout.vllm", "leave it out"


def _on_cpu(hf_config: Mapping[str, Any], config: Config) -> Iterator[Refusal]:
    if config.parallel.overlap_grad_reduce:
        yield (
            "weight gradients by autograd: on a CPU the mode needs our taps",
            "parallel.overlap_grad_reduce",
            "set it to false",
        )
    sizes = {
        "hidden_size": hf_config["hidden_size"],
        "intermediate_size": hf_config["intermediate_size"],
        "heads x head_dim": hf_config["num_attention_heads"] * head_dim(hf_config),
        "prompt and response tokens": max_model_len(config),
    }
    for name, size in sizes.items():
        if size > LONGEST:
            what = f"{name} {size} on a CPU: sums are exact up to {LONGEST}"
            yield what, "model.path", "use a smaller model or shorter samples"
    if hf_config["vocab_size"] > LARGEST_VOCAB:
        what = f"vocab_size {hf_config['vocab_size']} on a CPU: sums are exact up to {LARGEST_VOCAB}"
        yield what, "model.path", "use a model with a smaller vocabulary"
