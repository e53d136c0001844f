"""The table [rollout.vllm]: options that go to vLLM unchanged, and those that it may not name.

Imports no torch and no vllm. The names and types that vLLM knows are read from the source of its `EngineArgs`.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.errors import UserError
from oblr_megatron.extension import extension

_REASONS: dict[str, str] = {
    "is set by rollout.dtype": "dtype",
    "does nothing, because each request has its own, from the key seed": "seed",
    "is set by data.max_prompt_tokens, rollout.max_response_tokens and evaluate.max_response_tokens": "max_model_len",
    "is set by rollout.max_num_seqs": "max_num_seqs",
    "is set by rollout.gpu_memory_utilization": "gpu_memory_utilization",
    "is set by rollout.kv_cache_gib on a CPU, rollout.gpu_memory_utilization on GPUs": "kv_cache_memory_bytes",
    "is set by rollout.tensor_parallel_size": "tensor_parallel_size",
    "is set by rollout.sleep_level": "enable_sleep_mode",
    "is set by model.head_dtype": "hf_overrides",
    "is set by rollout.quantization": "quantization quantization_config allow_deprecated_quantization",
    "is set by rollout.speculation": "speculative_config spec_method spec_model spec_tokens scheduler_cls",
    "is set by model.moe_routing_replay": "enable_return_routed_experts aux_output_config",
    "the trainer needs log-probs of the distribution that is sampled from": "logprobs_mode",
    "a run asks for as many log-probs as it needs": "max_logprobs",
    "pushes choose their transport": "weight_transfer_config",
    "it carries our own settings": "additional_config",
    "pushes and read-back need our worker": "worker_cls worker_extension_cls",
    "the engine runs the model of model.path, which pushes replace": """
        model model_weights served_model_name tokenizer tokenizer_mode skip_tokenizer_init tokenizer_revision revision
        code_revision hf_config_path config_format model_class_overrides model_impl load_format
        trust_remote_code runner convert""",
    "adapters come by pushes, into one slot": """
        enable_lora max_loras max_lora_rank lora_target_modules lora_dtype default_mm_loras fully_sharded_loras
        max_cpu_loras enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras max_lora_cls_labels""",
    "weights are pushed to the workers of rollout.tensor_parallel_size, on one node": """
        distributed_executor_backend device_ids nnodes node_rank master_addr master_port pipeline_parallel_size
        prefill_context_parallel_size decode_context_parallel_size data_parallel_size data_parallel_rank
        data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
        enable_elastic_ep""",
    "experts or layers would move away from where pushes put them": """
        enable_expert_parallel enable_eplb expert_placement_strategy""",
    "it changes what is sampled, and the trainer's log-probs would be of another distribution": """
        logits_processors watermark_config diffusion_config generation_config override_generation_config""",
    "a push would not reach weights that vLLM keeps in host memory": """
        offload_backend offload_group_size offload_num_in_group offload_prefetch_step offload_params cpu_offload_gb
        cpu_offload_params""",
    "keys and values kept outside the engine would outlive a push of new weights": """
        kv_transfer_config kv_events_config kv_offloading_size kv_offloading_backend""",
}
"""Why [rollout.vllm] may not have some names, or the option of ours that sets them -> these names."""

OWNED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Name -> reason."""

_WHOLE_PROMPT = "a CPU engine must take a whole prompt in one step"
OWNED_ON_CPU: dict[str, str] = {
    "enforce_eager": "engines on a CPU compile nothing",
    "enable_chunked_prefill": "a prompt in two steps rewinds a generator, which a CPU generator cannot do",
    "max_num_batched_tokens": _WHOLE_PROMPT,
    "max_num_scheduled_tokens": _WHOLE_PROMPT,
    "long_prefill_token_threshold": _WHOLE_PROMPT,
    "use_fp64_gumbel": "rollout.speculation counts the draws of a CPU engine's own noise",
}

CACHE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
"""Bytes of a number in the KV cache by `kv_cache_dtype`."""

FP8_CACHE_FLAGS = (frozenset({"amx_tile"}), frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}))
"""Either of these sets is enough for vLLM's FP8 cache on a CPU (`cpu_attn._get_attn_isa` of vLLM 0.32)."""


@cache
def known_options() -> dict[str, ast.expr]:
    """Name -> type of vLLM's engine options; empty where vLLM is not installed."""
    folder = _vllm()
    if folder is None:
        return {}
    tree = ast.parse((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    (fields,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    known = {
        node.target.id: node.annotation
        for node in fields.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name: kind for name, kind in known.items() if not name.startswith("_")}


def _vllm() -> Path | None:
    spec = find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _literal(alias: str) -> ast.expr | None:
    """The `Literal` that a module of vLLM's configs gives this name; None for a class and other kinds of types."""
    for file in sorted((_vllm() or Path()).glob("config/*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body if f"\n{alias}" in text else ():
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == alias and isinstance(node, ast.Assign | ast.AnnAssign):
                return node.value
    return None


_BUILT_IN: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "set": (list,),
    "dict": (dict,),
}
"""Type of an option -> types of its values in a config."""


def _accepts(kind: ast.expr | None, value: Any) -> bool:
    """Whether a type of vLLM's options takes a value of a config. A type that is not read here takes any value."""
    accepted = True
    match kind:
        case ast.BinOp(left=left, right=right):  # a union
            accepted = _accepts(left, value) or _accepts(right, value)
        case ast.Constant(value=None):
            accepted = False
        case ast.Name(id=name) if name in _BUILT_IN:
            accepted = isinstance(value, _BUILT_IN[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Name(id=alias):
            accepted = _accepts(_literal(alias), value)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=members)):
            accepted = any(not isinstance(each, ast.Constant) or each.value == value for each in members)
        case ast.Subscript(value=ast.Name(id="list"), slice=item) if isinstance(value, list):
            accepted = all(_accepts(item, each) for each in value)
        case ast.Subscript(value=outer):
            accepted = _accepts(outer, value)
    return accepted


def _described(kind: ast.expr) -> str:
    """What an option can be set to. Examples: "a value of type int | None", "one of 'auto', 'bfloat16'"."""
    if isinstance(kind, ast.Name) and kind.id not in _BUILT_IN:
        kind = _literal(kind.id) or kind
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Literal":
        return f"one of {ast.unparse(kind.slice).strip('()')}"
    return f"a value of type {ast.unparse(kind)}"


def check_vllm_options(options: Mapping[str, Any], *, on_gpu: bool, where: str = "config: rollout.vllm") -> None:
    """Refuse options that are ours, and names, types and choices that the installed vLLM does not have.

    What is inside a table, and what values mean together, vLLM itself checks when an engine starts.

    Args:
        options: name -> value.
        on_gpu: whether the engines run on GPUs.
        where: for the message.

    Raises:
        UserError: names the option.
    """
    owned, known = OWNED if on_gpu else OWNED | OWNED_ON_CPU, known_options() if options else {}
    for name, value in options.items():
        if name in owned:
            fix = "leave it out" if "set by" not in owned[name] else "leave it out, and use our option"
            raise UserError(f"{name} cannot be passed on: {owned[name]}", where=where, fix=fix)
        if known and name not in known:
            close = difflib.get_close_matches(name, known.keys() - owned.keys(), 1)
            fix = f"write {close[0]}" if close else "see vLLM's EngineArgs for the names"
            raise UserError(f"the installed vLLM has no engine option {name!r}", where=where, fix=fix)
        if value is not None and not _accepts(known.get(name), value):
            what = f"the installed vLLM takes no {name} = {value!r}"
            raise UserError(what, where=where, fix=f"set it to {_described(known[name])}")


def check_processor(options: Mapping[str, Any], *, on_gpu: bool, where: str = "config: rollout.vllm") -> None:
    """Refuse an FP8 cache on a processor for which vLLM has no kernel: its engine would end while it starts.

    Args:
        options: name -> value.
        on_gpu: whether the engines run on GPUs, which have the kernel.
        where: for the message.

    Raises:
        UserError: names the option.
    """
    value = str(options.get("kv_cache_dtype", ""))
    if not on_gpu and value.startswith("fp8") and not has_fp8_cache():
        what = f'kv_cache_dtype "{value}" on a CPU needs AVX-512 or AMX, which this processor does not have'
        raise UserError(what, where=where, fix="leave it out, or use another machine")


def cache_bytes(options: Mapping[str, Any], element: int) -> int:
    """Bytes of a number in an engine's KV cache: `element`, as of its weights, unless `kv_cache_dtype` names a size."""
    return CACHE_BYTES.get(str(options.get("kv_cache_dtype", "")), element)


def has_fp8_cache() -> bool:
    """Whether vLLM has a kernel for an FP8 cache on this machine's processor."""
    return any(needed <= processor_flags() for needed in FP8_CACHE_FLAGS)


def processor_flags() -> frozenset[str]:
    """Instruction sets of this machine's processor by the kernel's names; empty where it does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def check_speculation(method: str, where: str) -> None:
    """Refuse a method of speculation if its parts are not installed.

    Raises:
        UserError: names what is missing.
    """
    if method != "none":
        extension("rollout.speculation").check_installed(method, where)


def check_routes(
    hf_config: Mapping[str, Any], options: Mapping[str, Any], speculation: str, *, on_gpu: bool, where: str
) -> None:
    """Refuse engines that could not return routes (model.moe_routing_replay).

    Args:
        hf_config: the model's config.json.
        options: further options of vLLM's engine.
        speculation: rollout.speculation, or that of a server.
        on_gpu: whether the engine runs on GPUs.
        where: for the message.

    Raises:
        UserError: names the option.
    """
    replay = "routing replay (model.moe_routing_replay)"
    if not num_experts(hf_config):
        raise UserError(f"{replay} needs a mixture of experts", where=where, fix="leave it out for a dense model")
    if options.get("enable_prefix_caching") is False:
        what = f"{replay} needs vLLM's prefix caching, which keeps the experts of a cached prefix"
        raise UserError(what, where=where, fix="remove enable_prefix_caching=false from the options for vLLM")
    if on_gpu and speculation == "suffix":
        what = f'{replay} needs vLLM\'s second model runner, which has no speculation "suffix"'
        raise UserError(what, where=where, fix='use speculation "ngram" or "none"')


def serve_words(options: Mapping[str, Any]) -> list[str]:
    """The options on the command line of `oblr-megatron serve`.

    Example: {"block_size": 16} -> ["--vllm", "block_size=16"]
    """
    return [word for name, value in options.items() for word in ("--vllm", f"{name}={toml_value(value)}")]


def toml_value(value: object) -> str:
    """A value as inline TOML. Example: {"a": [True]} -> '{"a" = [true]}'"""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {toml_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(toml_value(one) for one in value)}]"
    return json.dumps(value)
