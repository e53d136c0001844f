"""vLLM's options for an engine. Imports no vllm."""

from __future__ import annotations

from typing import Any

from oblr_megatron.engine.adapter import slot_options
from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.engine.routes import WORKER
from oblr_megatron.extension import extension


def vllm_arguments(spec: EngineSpec, backend: str) -> dict[str, Any]:
    """The fields of vLLM's `EngineArgs` that differ from its defaults; `backend` is that of weight transfers."""
    on_gpu = spec.device == "cuda"
    options: dict[str, Any] = {
        "model": str(spec.model),
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "logprobs_mode": "processed_logprobs",  # those of the distribution that is sampled from, temperature applied
        "max_logprobs": -1,  # requests say how many
        "weight_transfer_config": {"backend": backend},
    }
    if spec.widens_logits:
        options["hf_overrides"] = {"head_dtype": "float32"}
    if spec.speculation != "none":
        drafting = extension("rollout.speculation").vllm_options
        options |= drafting(spec.speculation, spec.speculation_below, spec.max_num_seqs)
    if spec.lora is not None:
        options |= slot_options(spec.lora)
    if spec.routes:
        options |= {"enable_return_routed_experts": True} | ({} if on_gpu else {"worker_cls": WORKER})
    if not on_gpu:
        drafts = options.get("speculative_config", {}).get("num_speculative_tokens", 0)
        drafted = spec.max_num_seqs * (1 + drafts) if spec.lora is not None else 0  # vLLM asks it of adapters only
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(spec.cpu_step_tokens, drafted)}
        return options | {"enforce_eager": True, "kv_cache_memory_bytes": spec.kv_cache_bytes, **spec.vllm}
    if spec.sleep_mode:
        options["enable_sleep_mode"] = True
    if spec.vllm_quantization is not None:
        options["quantization"] = spec.vllm_quantization
        options["quantization_config"] = {"ignore": ["*.mlp.gate"]}  # rounded routers would choose other experts
    return options | {
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "tensor_parallel_size": spec.tensor_parallel_size,
        **spec.vllm,  # names none of the others: checks/vllm_options.py
    }
