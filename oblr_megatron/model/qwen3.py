"""A Qwen3 policy on megatron-core's GPTModel, built from a Hugging Face config.

    hf_config = AutoConfig.from_pretrained(path)      # of a Qwen3 or a Qwen3-MoE
    policy = build_policy(hf_config, config.model, parallel, config.parallel)      # weights are NaN until loaded
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
from transformers import Qwen3Config, Qwen3MoeConfig

from oblr_megatron.checks import check_attention, check_model
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model import moe
from oblr_megatron.model.attention import RMSNorm, SdpaAttention
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.taps import Tap, install
from oblr_megatron.model.te_taps import install_te
from oblr_megatron.weights.names import with_global_expert

HFConfig = Qwen3Config | Qwen3MoeConfig
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class Policy:
    """This rank's part of the model, inside megatron-core's data-parallel wrapper (which holds `main_grad`).

    `chunks` are its stretches of layers, from first to last: one, or vp_size of them under the interleaved schedule.
    Chunk c of pipeline stage s is number c * pp_size + s of the model's stretches.
    """

    chunks: list[DistributedDataParallel]
    transformer_config: TransformerConfig
    hf_config: HFConfig
    parallel: Parallel
    vocab_size: int  # of the tokenizer's embedding, without padding
    padded_vocab_size: int  # a multiple of make_vocab_size_divisible_by * tp_size
    tap: Tap  # where weight gradients are made

    @property
    def module(self) -> GPTModel:
        """The bare model of a rank that has one chunk."""
        assert len(self.chunks) == 1, f"this rank has {len(self.chunks)} model chunks"
        return self.chunks[0].module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their global Megatron names: the layer number counts over all pipeline stages and chunks.

        Example: "decoder.layers.27.mlp.linear_fc1.weight" for layer 13 of the second of two stages of 14.
        """
        for chunk in self.chunks:
            for name, parameter in chunk.module.named_parameters():
                yield self._global_name(chunk.module, name), parameter

    def zero_grad(self) -> None:
        """Set every `main_grad` to zero, before a new gradient is accumulated."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def _global_name(self, module: GPTModel, name: str) -> str:
        prefix = "decoder.layers."
        if not name.startswith(prefix):
            return name
        local, rest = name.removeprefix(prefix).split(".", 1)
        name = f"{prefix}{module.decoder.layers[int(local)].layer_number - 1}.{rest}"
        experts = self.transformer_config.num_moe_experts or 0
        return with_global_expert(name, experts // self.parallel.ep_size * self.parallel.ep_rank)


def build_policy(
    hf_config: HFConfig, config: ModelConfig, parallel: Parallel, options: ParallelConfig | None = None
) -> Policy:
    """Build this rank's part of the model; its weights are NaN until `load_hf_weights` fills them.

    Args:
        hf_config: the model.
        config: how its weights are held.
        parallel: the layout.
        options: what else the run's configuration says of the layout: packing, recomputation. Defaults without them.

    Raises:
        UserError: the layout does not divide the model, or the model has a feature that is not supported.
    """
    options = _with_sizes(options or ParallelConfig(), parallel)
    check_model(hf_config.to_dict(), options, where=str(config.path))
    check_attention(config.attention, options)
    transformer_config = transformer_config_of(hf_config, config, parallel, options)
    padded = padded_vocab_size(hf_config.vocab_size, config.make_vocab_size_divisible_by, parallel.tp_size)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=transformer_config.params_dtype == torch.bfloat16, overlap_grad_reduce=False
    )
    chunks, tap = [], Tap()
    for index in range(parallel.vp_size):
        model = build_model(hf_config, transformer_config, config, parallel, padded, index)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        chunks.append(DistributedDataParallel(transformer_config, ddp_config, model))
        install(model, tap, moe.splits_of(model, parallel))
        if _transformer_engine(parallel):
            install_te(model, tap, transformer_config, moe.grouped_splits_of(model, parallel))
    return Policy(chunks, transformer_config, hf_config, parallel, hf_config.vocab_size, padded, tap)


def build_model(
    hf_config: HFConfig,
    transformer_config: TransformerConfig,
    config: ModelConfig,
    parallel: Parallel,
    padded_vocab: int,
    chunk: int = 0,
) -> GPTModel:
    """The bare GPTModel of one chunk of this rank's pipeline stage."""
    interleaved = parallel.vp_size > 1
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_block_spec(hf_config, transformer_config, config, parallel, chunk),
        vocab_size=padded_vocab,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel.is_first_stage and chunk == 0,
        post_process=parallel.is_last_stage and chunk == parallel.vp_size - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=cast(dict[str, Any], hf_config.rope_parameters)["rope_theta"],
        vp_stage=chunk if interleaved else None,
    )
    moe.mark_experts(model)
    return model


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """The vocabulary with its padding, e.g. (151936, 128, 2) -> 152064."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def transformer_config_of(
    hf_config: HFConfig, config: ModelConfig, parallel: Parallel, options: ParallelConfig | None = None
) -> TransformerConfig:
    """Megatron's configuration of a Hugging Face Qwen3; arguments as of `build_policy`."""
    options = _with_sizes(options or ParallelConfig(), parallel)
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
        virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.cp_size,
        cp_comm_type="p2p",  # of Transformer Engine's attention; ours gathers keys and values
        sequence_parallel=parallel.sequence_parallel,
        **_recompute(options),
        **_precision(DTYPES[config.dtype]),
        **_kernels(parallel.device),
        **moe.moe_fields(hf_config, parallel, DTYPES[config.dtype], transformer_engine=_transformer_engine(parallel)),
        # Nothing may divide the loss: run_schedule's loss function returns (loss, 1, metrics).
        calculate_per_token_loss=True,
        # Microbatches differ in length, so pipeline stages tell each other the shape first.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # checked against variable_seq_lengths in dense models, too
        batch_p2p_comm=False,
        # Interleaved, activations and gradients go in separate exchanges: with two stages both have the same peer, and
        # in one exchange the shapes of the two would be taken for one another.
        overlap_p2p_comm=parallel.vp_size > 1,
        # With an initialisation that does nothing, megatron-core still marks each weight with how it is split.
        perform_initialization=True,
        use_cpu_initialization=False,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
    )


def _with_sizes(options: ParallelConfig, parallel: Parallel) -> ParallelConfig:
    """The options, with the sizes that the layout has."""
    sizes = {
        "tensor_model_parallel_size": parallel.tp_size,
        "pipeline_model_parallel_size": parallel.pp_size,
        "virtual_pipeline_model_parallel_size": parallel.vp_size if parallel.vp_size > 1 else None,
        "context_parallel_size": parallel.cp_size,
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": parallel.etp_size,
        "sequence_parallel": parallel.sequence_parallel,
    }
    return options.model_copy(update=sizes)


def _recompute(options: ParallelConfig) -> dict[str, Any]:
    """Which activations are computed again in backward; "selective" means megatron-core's default, core attention."""
    if options.recompute_granularity != "full":
        return {"recompute_granularity": None if options.recompute_granularity == "none" else "selective"}
    return {
        "recompute_granularity": "full",
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
    }


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


def _transformer_engine(parallel: Parallel) -> bool:
    return parallel.device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def _block_spec(
    hf_config: HFConfig, transformer_config: TransformerConfig, config: ModelConfig, parallel: Parallel, chunk: int
) -> ModuleSpec | TransformerBlockSubmodules:
    experts = transformer_config.num_moe_experts
    if _transformer_engine(parallel):
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=True
        )
        moe.set_router(layer, hf_config)
        return layer
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=True, normalization="RMSNorm")
    moe.set_router(layer, hf_config)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.attention == "sdpa":
        attention.core_attention = SdpaAttention
    layers = get_num_layers_to_build(transformer_config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
