"""A policy on megatron-core's GPTModel, built from a Hugging Face config.

    hf_config = AutoConfig.from_pretrained(path)      # a family in families.py
    policy = build_policy(hf_config, config.model, parallel, config.parallel)      # weights are NaN until loaded
    load_hf_weights(policy, path)

The layers are Transformer Engine's if CUDA and Transformer Engine are available. Otherwise they are megatron-core's
"local" layers with the norm and core attention of `attention.py`.
"""

from __future__ import annotations

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

from oblr_megatron.checks.layout import check_model
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model import moe
from oblr_megatron.model.cpu.attention import RMSNorm, SdpaAttention
from oblr_megatron.model.cpu.operations import SwiGLU
from oblr_megatron.model.lm_head import LMHead, install_head
from oblr_megatron.model.lora.adapters import attach, is_adapter, read_inputs
from oblr_megatron.model.megatron_versions import mlp_submodules
from oblr_megatron.model.numerics import Numerics, numerics_of
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.precision import uses_transformer_engine
from oblr_megatron.model.tapped import TappedModel, unwrapped
from oblr_megatron.model.taps import Tap, install
from oblr_megatron.model.te_taps import install_te
from oblr_megatron.model.transformer_config import HFConfig, transformer_config_of
from oblr_megatron.padding import padded_vocab_size, padding_of
from oblr_megatron.types import TokenRows, widens_logits


@dataclass(slots=True)
class Policy(TappedModel):
    """This rank's part of the model."""

    hf_config: HFConfig
    vocab_size: int  # without padding
    padded_vocab_size: int  # a multiple of make_vocab_size_divisible_by * tp_size
    lm_head: LMHead | None  # on the last pipeline stage

    @property
    def head(self) -> LMHead:
        """The output layer, which a loss function calls with the model's output."""
        assert self.lm_head is not None, "only the last pipeline stage has the output layer"
        return self.lm_head

    def no_loss(self, output: Tensor, batch: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Also of the output layer's weight: with `parallel.overlap_grad_reduce` a sum waits for every gradient."""
        return self.head(output, batch).logprobs.sum(), {}  # of no token

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by global Megatron name: the layer number counts over all pipeline stages and chunks.

        Example: "decoder.layers.27.mlp.linear_fc1.weight" for layer 13 of the second of two stages of 14.
        """
        for chunk in self.chunks:
            for name, parameter in chunk.module.named_parameters():
                yield self._global_name(chunk.module, name), parameter

    def base_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own parameters, without those of adapters."""
        return ((name, parameter) for name, parameter in self.named_parameters() if not is_adapter(name))

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that have a `main_grad`."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def _global_name(self, module: GPTModel, name: str) -> str:
        prefix = "decoder.layers."
        if not name.startswith(prefix):
            return name
        local, rest = name.removeprefix(prefix).split(".", 1)
        name = f"{prefix}{module.decoder.layers[int(local)].layer_number - 1}.{rest}"
        experts = self.transformer_config.num_moe_experts or 0
        return moe.with_global_expert(name, experts // self.parallel.ep_size * self.parallel.ep_rank)


def build_policy(
    hf_config: HFConfig, config: ModelConfig, parallel: Parallel, options: ParallelConfig | None = None
) -> Policy:
    """Build this rank's part of the model; its weights are NaN until `load_hf_weights` fills them.

    Args:
        hf_config: the model's architecture.
        config: the section [model].
        parallel: the layout.
        options: packing, recomputation and overlap; defaults if not given.

    Raises:
        UserError: the layout does not divide the model, or the model has an unsupported feature.
    """
    sizes = {
        "tensor_model_parallel_size": parallel.tp_size,
        "pipeline_model_parallel_size": parallel.pp_size,
        "virtual_pipeline_model_parallel_size": parallel.vp_size if parallel.vp_size > 1 else None,
        "context_parallel_size": parallel.cp_size,
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": parallel.etp_size,
        "sequence_parallel": parallel.sequence_parallel,
    }
    options = (options or ParallelConfig()).model_copy(update=sizes)
    check_model(hf_config.to_dict(), options, where=str(config.path))
    transformer_config = transformer_config_of(hf_config, config, parallel, options)
    padded = padded_vocab_size(hf_config.vocab_size, config.make_vocab_size_divisible_by, parallel.tp_size)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=transformer_config.params_dtype == torch.bfloat16,
        use_distributed_optimizer=options.use_distributed_optimizer,
        overlap_grad_reduce=options.overlap_grad_reduce,
    )
    chunks, tap = [], Tap(numerics_of(hf_config, config).operations)
    for index in range(parallel.vp_size):
        model = build_model(hf_config, transformer_config, config, parallel, padded, index)
        if config.lora.rank:
            attach(model, config.lora)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        chunks.append(DistributedDataParallel(transformer_config, ddp_config, model))
        if options.overlap_grad_reduce:
            continue
        splits = moe.splits_of(model, parallel, tap)
        install(model, tap, splits)
        if uses_transformer_engine(config, parallel):
            install_te(model, tap, transformer_config, splits)
    if options.overlap_grad_reduce:  # megatron-core skips the reduction until the last microbatch
        syncs = [chunk.no_sync for chunk in chunks]
        transformer_config.no_sync_func = syncs if len(chunks) > 1 else syncs[0]
    padding = padding_of(config, options, transformer_engine=uses_transformer_engine(config, parallel))
    last = unwrapped(chunks[-1])
    wider = widens_logits(config.head_dtype, config.dtype, on_gpu=parallel.device.type == "cuda")
    dtype = torch.float32 if wider else transformer_config.params_dtype
    head = install_head(last, tap, parallel, hf_config.vocab_size, dtype) if last.post_process else None
    return Policy(chunks, transformer_config, parallel, tap, padding, hf_config, hf_config.vocab_size, padded, head)


def build_model(
    hf_config: HFConfig,
    transformer_config: TransformerConfig,
    config: ModelConfig,
    parallel: Parallel,
    padded_vocab: int,
    chunk: int = 0,
) -> GPTModel:
    """The unwrapped GPTModel of one chunk of this rank's pipeline stage."""
    interleaved, numerics = parallel.vp_size > 1, numerics_of(hf_config, config)
    rope = cast(dict[str, Any], hf_config.rope_parameters)
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_block_spec(hf_config, transformer_config, config, parallel, numerics, chunk),
        vocab_size=padded_vocab,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel.is_first_stage and chunk == 0,
        post_process=parallel.is_last_stage and chunk == parallel.vp_size - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none" if numerics.attention else "rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope.get("rope_type") == "llama3",
        rope_scaling_factor=rope.get("factor", 1.0),
        vp_stage=chunk if interleaved else None,
    )
    moe.mark_experts(model)
    return model


def _block_spec(
    hf_config: HFConfig,
    transformer_config: TransformerConfig,
    config: ModelConfig,
    parallel: Parallel,
    numerics: Numerics,
    chunk: int,
) -> ModuleSpec | TransformerBlockSubmodules:
    experts = transformer_config.num_moe_experts
    if uses_transformer_engine(config, parallel):
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=transformer_config.qk_layernorm
        )
        moe.set_router(layer, hf_config, config)
        if config.lora.rank:
            read_inputs(layer, dense=experts is None)
        return layer
    qk_norms = transformer_config.qk_layernorm
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=qk_norms, normalization="RMSNorm")
    moe.set_router(layer, hf_config, config)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if experts:
        # Transformer Engine's spec fuses this norm in dense layers only. A mixture's keeps its name in checkpoints.
        names = layer.submodules.sharded_state_dict_keys_map
        layer.submodules.sharded_state_dict_keys_map = {k: v for k, v in names.items() if k != "pre_mlp_layernorm."}
    attention = layer.submodules.self_attention.submodules
    if transformer_config.use_te_activation_func:
        mlp_submodules(layer).activation_func = SwiGLU
    if qk_norms:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = numerics.attention or SdpaAttention
    layers = get_num_layers_to_build(transformer_config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
