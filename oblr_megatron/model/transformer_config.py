"""Build megatron-core's TransformerConfig from a Hugging Face config and a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.families import family_of, head_dim
from oblr_megatron.model import moe
from oblr_megatron.model.numerics import numerics_of
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.precision import DTYPES, precision_fields, uses_transformer_engine

HFConfig = PreTrainedConfig
"""A transformers configuration of a model in `families.FAMILIES`."""

COMPILED_FORMS = 64
"""Most compiled forms of one function. Microbatches differ in length and in rows, the first layer's input has other
strides, and passes run with and without gradients: up to 48 forms of megatron-core's residual addition."""


def hf_config_of(values: Mapping[str, Any]) -> HFConfig:
    """The transformers configuration of a config.json.

    Raises:
        UserError: the architecture is not supported.
    """
    return CONFIG_MAPPING[family_of(values).model_type].from_dict(dict(values))


def transformer_config_of(
    hf_config: HFConfig, config: ModelConfig, parallel: Parallel, options: ParallelConfig | None = None
) -> TransformerConfig:
    """The TransformerConfig of a Hugging Face config; arguments as in `policy.build_policy`."""
    options = options or ParallelConfig()
    by_transformer_engine = uses_transformer_engine(config, parallel)
    values = hf_config.to_dict()
    family = family_of(values)
    numerics = numerics_of(hf_config, config)
    own_swiglu = parallel.device.type == "cpu" and not (num_experts(values) or numerics.fields)
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(values),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=family.qk_norms,
        add_qkv_bias=family.qkv_bias,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        virtual_pipeline_model_parallel_size=parallel.vp_size if parallel.vp_size > 1 else None,
        account_for_embedding_in_pipeline_split=options.account_for_embedding_and_loss,
        account_for_loss_in_pipeline_split=options.account_for_embedding_and_loss,
        context_parallel_size=parallel.cp_size,
        cp_comm_type="p2p",  # for Transformer Engine's attention; SdpaAttention gathers keys and values
        sequence_parallel=parallel.sequence_parallel,
        gradient_accumulation_fusion=False,
        **_recompute(options),
        **{"activation_func": nn.functional.silu, **numerics.fields},
        **precision_fields(config, transformer_engine=by_transformer_engine),
        **_kernels(parallel.device, transformer_engine=by_transformer_engine),
        use_te_activation_func=own_swiglu,  # that of cpu/operations.py, not Transformer Engine's
        **moe.moe_fields(hf_config, parallel, DTYPES[config.dtype], transformer_engine=by_transformer_engine),
        # megatron-core must not divide the loss: run_schedule's loss function returns (loss, 1, metrics).
        calculate_per_token_loss=True,
        # Microbatches differ in length, so that pipeline stages exchange shapes first.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # megatron-core checks it with variable_seq_lengths, even if dense
        batch_p2p_comm=False,
        # The interleaved schedule sends activations and gradients separately. With two stages both have the same peer,
        # and a single exchange would confuse their shapes.
        overlap_p2p_comm=parallel.vp_size > 1,
        # megatron-core marks how each weight is split only during initialisation, so initialise with a no-op.
        perform_initialization=True,
        use_cpu_initialization=False,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
    )


def _recompute(options: ParallelConfig) -> dict[str, Any]:
    """The fields that select which activations backward recomputes."""
    if options.recompute_granularity == "none":
        return {}
    if options.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(options.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
    }


def _kernels(device: torch.device, *, transformer_engine: bool) -> dict[str, Any]:
    """Fused kernels only with CUDA: otherwise megatron-core would compile them with a C++ compiler, or fail.

    megatron-core compiles them with torch.compile. Past its limit of 8 forms, torch would run a function uncompiled,
    with more memory and only a warning (seen on an H200). Processes that compile for torch would be ended by the signal
    that asks a job to save, and the rank would wait for them for ever; so it compiles by itself.

    megatron-core's own rotary embedding of packed samples waits for the GPU, for q and for k in each layer. Transformer
    Engine's kernel does not (not yet run on a GPU).
    """
    fused = device.type == "cuda"
    if fused:
        _set_in_all_threads(torch._dynamo.config, "recompile_limit", COMPILED_FORMS)
        _set_in_all_threads(torch._inductor.config, "compile_threads", 1)
    return {
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": transformer_engine,
        "persist_layer_norm": False,
    }


def _set_in_all_threads(config: Any, name: str, value: int) -> None:
    """Change the default of a setting of torch's compiler.

    An assigned value would hold in one thread (torch 2.13). A backward pass on a GPU, with its recomputation, runs in
    another one.
    """
    config._config[name].default = value


def _leave_as_is(weight: Tensor) -> None:
    """Do not initialise: the weights are loaded later."""
