"""Checks of FP8, Transformer Engine and quantised engines against the rest of a configuration. Imports no torch.

`precision_problems` compares fields; `check_sizes` needs the model. `checks/machine.py` checks GPUs and packages.
Sources: megatron-core 0.16.1 (`TransformerConfig.__post_init__`, `fp8_utils`) and Transformer Engine 2.9 to 2.11.
docs/precision.md has the rules as a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import Problem, UserError
from oblr_megatron.families import head_dim
from oblr_megatron.padding import FP8_TOKENS

if TYPE_CHECKING:
    from oblr_megatron.config import Config


def precision_problems(config: Config) -> Iterator[Problem]:
    """Contradicting fields, with the fix."""
    model = config.model
    if model.transformer_impl == "transformer_engine" and model.dtype == "float64":
        what = 'transformer_impl "transformer_engine" does not support dtype "float64"'
        yield what, 'set model.transformer_impl to "local"'
    if model.fp8 != "none":
        yield from _fp8(config)
    if config.rollout.quantization != "none" and config.rollout.replay is None:
        yield from _quantized_rollout(config)
    if config.rollout.replay is None and not config.rollout.only:
        yield from _rounded_cache(config)


def check_sizes(hf_config: Mapping[str, Any], config: Config) -> None:
    """Refuse a model with shards that FP8 kernels do not support.

    Args:
        hf_config: the model's config.json, checked against the layout.
        config: the run.

    Raises:
        UserError: names the size.
    """
    for what, fix in _size_problems(hf_config, config):
        raise UserError(what, where=str(config.model.path), fix=fix)


def _fp8(config: Config) -> Iterator[Problem]:
    """FP8 is Transformer Engine's, for weights in bfloat16."""
    model = config.model
    if model.dtype != "bfloat16":
        yield f'fp8 "{model.fp8}" with dtype "{model.dtype}"', 'set model.dtype to "bfloat16"'
    if model.transformer_impl == "local":
        what = f'fp8 "{model.fp8}" with transformer_impl "local": only Transformer Engine has FP8 products'
        yield what, 'set model.transformer_impl to "auto"'


def _rounded_cache(config: Config) -> Iterator[Problem]:
    """Keys and values in fewer bits change the engine's log-probs."""
    rollout = config.rollout
    kind = rollout.vllm.get("kv_cache_dtype", "auto")
    if kind not in ("auto", "float32", "bfloat16", "float16") and rollout.importance_sampling == "none":
        what = f'rollout.vllm.kv_cache_dtype {kind!r} with importance_sampling "none": its log-probs are not exact'
        yield what, 'set rollout.importance_sampling to "token" or "sequence"'


def _quantized_rollout(config: Config) -> Iterator[Problem]:
    """An FP8 engine rounds the pushed weights, so it samples from a policy that differs from the trainer's."""
    rollout, option = config.rollout, f'quantization "{config.rollout.quantization}"'
    if config.engine_dtype != "bfloat16":
        what = f"{option} of weights pushed in {config.engine_dtype}: vLLM rounds from bfloat16"
        yield what, 'set rollout.dtype to "bfloat16"'
    if config.weights.verify:
        what = f"weights.verify with {option}: the engine does not keep the pushed bytes"
        yield what, "set weights.verify to false"
    if rollout.importance_sampling == "none" and not rollout.only:
        what = f"{option} with importance_sampling \"none\": the engine's policy differs from the trainer's"
        yield what, 'set rollout.importance_sampling to "token" or "sequence"'


def _fp8_widths(hf_config: Mapping[str, Any], config: Config) -> dict[str, int]:
    """Dimensions of the layers' matrices on one rank; empty without FP8."""
    if config.model.fp8 == "none":
        return {}
    tp = config.parallel.tensor_model_parallel_size
    head = head_dim(hf_config)
    queries = hf_config["num_attention_heads"] * head
    widths = {
        "hidden_size": hf_config["hidden_size"],
        "heads x head_dim": queries // tp,
        "queries, keys and values": (queries + 2 * hf_config["num_key_value_heads"] * head) // tp,
    }
    if "num_experts_per_tok" in hf_config:
        expert_tp = config.parallel.expert_tensor_parallel_size or tp
        return widths | {"moe_intermediate_size": hf_config["moe_intermediate_size"] // expert_tp}
    return widths | {"intermediate_size": hf_config["intermediate_size"] // tp}


def _size_problems(hf_config: Mapping[str, Any], config: Config) -> Iterator[Problem]:
    """Widths of FP8 products, and layers that stay in bf16."""
    model, parallel = config.model, config.parallel
    for name, width in _fp8_widths(hf_config, config).items():
        multiple = FP8_TOKENS[model.fp8_recipe]
        if width % multiple:
            yield (
                f"{name} {width} on each rank is not a multiple of {multiple}, as FP8 products need",
                'lower parallel.tensor_model_parallel_size, or set model.fp8 to "none"',
            )
    if model.fp8 != "none":
        of_stage = parallel.layers_of_stage(hf_config["num_hidden_layers"], 0)
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(model, name) > of_stage:
                what = f"{name} {getattr(model, name)} is more than the {of_stage} layers of a pipeline stage"
                yield what, f"set model.{name} to {of_stage} or fewer"
