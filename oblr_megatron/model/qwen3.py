"""A Qwen3 policy on megatron-core's GPTModel, built from a Hugging Face config.

    hf_config = Qwen3Config.from_pretrained(path)
    policy = build_policy(hf_config, config.model, parallel)      # weights are NaN until loaded
    load_hf_weights(policy, path)

With CUDA and Transformer Engine the layers are Transformer Engine's; otherwise megatron-core's own ("local") with the
norm and core attention of `attention.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import Qwen3Config

from oblr_megatron.checks import check_model
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model.attention import RMSNorm, SdpaAttention
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.taps import Tap, install

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class Policy:
    """This rank's part of the model, inside megatron-core's data-parallel wrapper (which holds `main_grad`).

    `chunks` has one element: the interleaved pipeline schedule is not used.
    """

    chunks: list[DistributedDataParallel]
    transformer_config: TransformerConfig
    hf_config: Qwen3Config
    parallel: Parallel
    vocab_size: int  # of the tokenizer's embedding, without padding
    padded_vocab_size: int  # a multiple of make_vocab_size_divisible_by * tp_size
    tap: Tap  # where weight gradients are made

    @property
    def module(self) -> GPTModel:
        """The bare model."""
        return self.chunks[0].module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their global Megatron names: the layer number counts over all pipeline stages.

        Example: "decoder.layers.27.mlp.linear_fc1.weight" for layer 13 of the second of two stages of 14.
        """
        for name, parameter in self.module.named_parameters():
            yield self._global_name(name), parameter

    def zero_grad(self) -> None:
        """Set every `main_grad` to zero, before a new gradient is accumulated."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def _global_name(self, name: str) -> str:
        prefix = "decoder.layers."
        if not name.startswith(prefix):
            return name
        local, rest = name.removeprefix(prefix).split(".", 1)
        return f"{prefix}{self.module.decoder.layers[int(local)].layer_number - 1}.{rest}"


def build_policy(hf_config: Qwen3Config, config: ModelConfig, parallel: Parallel) -> Policy:
    """Build this rank's part of the model; its weights are NaN until `load_hf_weights` fills them.

    Raises:
        UserError: the layout does not divide the model, or the model has a feature that is not supported.
    """
    check_model(hf_config.to_dict(), _layout(parallel), where=str(config.path))
    transformer_config = transformer_config_of(hf_config, config, parallel)
    padded = padded_vocab_size(hf_config.vocab_size, config.make_vocab_size_divisible_by, parallel.tp_size)
    model = build_model(hf_config, transformer_config, config, parallel, padded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=transformer_config.params_dtype == torch.bfloat16, overlap_grad_reduce=False
    )
    chunk = DistributedDataParallel(transformer_config, ddp_config, model)
    tap = Tap()
    install(model, tap)
    return Policy([chunk], transformer_config, hf_config, parallel, hf_config.vocab_size, padded, tap)


def build_model(
    hf_config: Qwen3Config,
    transformer_config: TransformerConfig,
    config: ModelConfig,
    parallel: Parallel,
    padded_vocab: int,
) -> GPTModel:
    """The bare GPTModel of this rank's pipeline stage."""
    return GPTModel(
        config=transformer_config,
        transformer_layer_spec=_block_spec(transformer_config, config, parallel),
        vocab_size=padded_vocab,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel.is_first_stage,
        post_process=parallel.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=cast(dict[str, Any], hf_config.rope_parameters)["rope_theta"],
    )


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """The vocabulary with its padding, e.g. (151936, 128, 2) -> 152064."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def transformer_config_of(hf_config: Qwen3Config, config: ModelConfig, parallel: Parallel) -> TransformerConfig:
    """Megatron's configuration of a Hugging Face Qwen3."""
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=hf_config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        sequence_parallel=parallel.sequence_parallel,
        **_precision(DTYPES[config.dtype]),
        **_kernels(parallel.device),
        # Nothing may divide the loss: run_schedule's loss function returns (loss, 1, metrics).
        calculate_per_token_loss=True,
        # Microbatches differ in length, so pipeline stages tell each other the shape first.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # unused, but checked against variable_seq_lengths
        batch_p2p_comm=False,
        # With an initialisation that does nothing, megatron-core still marks each weight with how it is split.
        perform_initialization=True,
        use_cpu_initialization=False,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
    )


def _layout(parallel: Parallel) -> ParallelConfig:
    return ParallelConfig(tensor_model_parallel_size=parallel.tp_size, pipeline_model_parallel_size=parallel.pp_size)


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    return {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}


def _kernels(device: torch.device) -> dict[str, Any]:
    """Fused kernels need CUDA: without it megatron-core would compile them with a C++ compiler, or fail."""
    fused = device.type == "cuda"
    return {
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


def _leave_as_is(weight: Tensor) -> None:
    """Weights are loaded, never drawn."""


def _block_spec(
    transformer_config: TransformerConfig, config: ModelConfig, parallel: Parallel
) -> ModuleSpec | TransformerBlockSubmodules:
    if parallel.device.type == "cuda" and importlib.util.find_spec("transformer_engine"):
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.attention == "sdpa":
        attention.core_attention = SdpaAttention
    layers = get_num_layers_to_build(transformer_config)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
