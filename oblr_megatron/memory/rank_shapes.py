"""Widths, parameters and tokens on one rank, from the model's config.json and the layout. Imports no torch.

sizes = RankSizes.of(hf_config, config, stage=0)        # a rank of the first pipeline stage
sizes.dense_parameters, sizes.expert_parameters         # elements of its weights
sizes.tokens(rows=1, length=1024).count                 # its tokens of a microbatch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.config import Config
from oblr_megatron.families import OF_MLP, family_of, head_dim
from oblr_megatron.padding import Padding, padded_vocab_size, padding_of
from oblr_megatron.types import widens_logits

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Tokens:
    """A microbatch on one rank. Example, TP2 with sequence parallelism: Tokens(rows=2, length=64, split=64)."""

    rows: int  # b
    length: int  # t of each row; 1 / cp of the padded sequence
    split: int  # tokens of norms and residuals: b * t, divided by tp with sequence parallelism

    @property
    def count(self) -> int:
        """b * t."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class RankSizes:
    """One rank of a pipeline stage; all widths are those of its shards.

    Example, Qwen3-0.6B on TP2, first of two stages:
        RankSizes(hidden=1024, query=1024, kv=512, heads=8, groups=4, head_dim=128, ffn=1536, layers=14, ...)
    """

    hidden: int
    query: int  # heads * head_dim
    kv: int  # groups * head_dim
    heads: int
    groups: int
    head_dim: int
    head_norms: int  # weights of a layer's q and k norms
    qkv: int  # kept outputs of the joint projection: more than query + 2 kv if ranks share a group
    qkv_weight: int  # outputs of this rank's part of the projection
    qkv_bias: int  # elements of this rank's part of its bias
    ffn: int  # of a dense layer; 0 with experts
    layers: int  # of the stage, all chunks together
    columns: int  # of the padded vocabulary
    experts: int  # on all ranks; 0 in a dense model
    local_experts: int
    top_k: int
    expert_ffn: int
    tp: int
    cp: int
    etp: int
    sequence_parallel: bool
    tied: bool
    is_first: bool  # holds the embedding
    is_last: bool  # holds the output layer
    only_stage: bool
    element: int  # bytes of a weight and of an activation
    wide: int  # bytes of an element of main_grad and of fp32 computations (8 in float64 runs)
    logit: int  # bytes of an output layer's product
    fused: bool  # the gated unit keeps only its input and its output
    masked: bool  # attention to earlier chunks needs masks; flash attention, in half precision on GPUs, does not
    transformer_engine: bool
    padding: Padding
    adapter_rank: int  # of model.lora; 0: all weights are trained
    adapted: tuple[str, ...]  # matrices with adapters

    @classmethod
    def of(
        cls,
        hf_config: Mapping[str, Any],
        config: Config,
        stage: int,
        *,
        on_gpu: bool = False,
        transformer_engine: bool = False,
    ) -> RankSizes:
        """The sizes of a rank of pipeline stage `stage`; `checks.layout.check_layout` must have accepted the layout."""
        parallel, hf = config.parallel, hf_config
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        etp = parallel.expert_tensor_parallel_size or tp
        heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
        width, family = head_dim(hf), family_of(hf)
        experts = num_experts(hf)
        outputs = (heads + 2 * groups) * width
        vocabulary = padded_vocab_size(hf["vocab_size"], config.model.make_vocab_size_divisible_by, tp)
        element = ELEMENT_BYTES[config.model.dtype]
        return cls(
            hidden=hf["hidden_size"],
            query=heads * width // tp,
            kv=max(1, groups // tp) * width,
            heads=heads // tp,
            groups=max(1, groups // tp),
            head_dim=width,
            head_norms=2 * width if family.qk_norms else 0,
            qkv=outputs if groups < tp else outputs // tp,
            qkv_weight=outputs // tp,
            qkv_bias=outputs // tp if family.qkv_bias else 0,
            ffn=0 if experts else hf["intermediate_size"] // tp,
            layers=parallel.layers_of_stage(hf["num_hidden_layers"], stage),
            columns=vocabulary // tp,
            experts=experts,
            local_experts=experts // parallel.expert_model_parallel_size,
            top_k=hf["num_experts_per_tok"] if experts else 0,
            expert_ffn=hf["moe_intermediate_size"] // etp if experts else 0,
            tp=tp,
            cp=parallel.context_parallel_size,
            etp=etp,
            sequence_parallel=parallel.sequence_parallel,
            tied=bool(hf.get("tie_word_embeddings", False)),
            is_first=stage == 0,
            is_last=stage == pp - 1,
            only_stage=pp == 1,
            element=element,
            wide=max(element, 4),
            logit=4 if widens_logits(config.model.head_dtype, config.model.dtype, on_gpu=on_gpu) else element,
            fused=on_gpu or not (experts or config.model.batch_invariant),
            masked=not on_gpu or element > 2,
            transformer_engine=transformer_engine,
            padding=padding_of(config.model, parallel, transformer_engine=transformer_engine),
            adapter_rank=config.model.lora.rank,
            adapted=config.model.lora.targets if config.model.lora.rank else (),
        )

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """(outputs, inputs, count) of the stage's linear layers without experts."""
        shapes = [(self.qkv_weight, self.hidden, self.layers), (self.hidden, self.query, self.layers)]
        if self.ffn:
            shapes += [(2 * self.ffn, self.hidden, self.layers), (self.hidden, self.ffn, self.layers)]
        if self.is_last:
            shapes.append((self.columns, self.hidden, 1))
        return shapes

    @property
    def dense_parameters(self) -> int:
        """Elements of all weights but experts. The first and last stage both hold a tied embedding."""
        linear = sum(outputs * inputs * count for outputs, inputs, count in self.matrices)
        vectors = 2 * self.hidden + self.head_norms + self.qkv_bias
        norms = self.layers * vectors + (self.hidden if self.is_last else 0)
        router = self.layers * self.experts * self.hidden
        own_embedding = self.is_first and not (self.tied and self.only_stage)
        return linear + norms + router + (self.columns * self.hidden if own_embedding else 0)

    @property
    def expert_parameters(self) -> int:
        """Elements of this rank's experts."""
        return self.layers * self.local_experts * 3 * self.hidden * self.expert_ffn

    @property
    def adapter_parameters(self) -> int:
        """Elements of all adapters."""
        return sum(self._adapters)

    @property
    def adapted_matrices(self) -> list[tuple[int, int, bool]]:
        """(outputs, inputs, whether every expert has one) of a layer's matrices with adapters."""
        inner, of_experts = self.expert_ffn or self.ffn, self.experts > 0
        shapes = {
            "q_proj": (self.query, self.hidden, False),
            "k_proj": (self.kv, self.hidden, False),
            "v_proj": (self.kv, self.hidden, False),
            "o_proj": (self.hidden, self.query, False),
            "gate_proj": (inner, self.hidden, of_experts),
            "up_proj": (inner, self.hidden, of_experts),
            "down_proj": (self.hidden, inner, of_experts),
        }
        return [shapes[target] for target in self.adapted]

    @property
    def _adapters(self) -> tuple[int, int]:
        """Elements of the adapters outside experts, and of experts.

        Of a matrix [p, d] an A [rank, d] and a B [p, rank]. Outside experts one of the two is cut over ranks.
        """
        one, dense, experts = self.layers * self.adapter_rank, 0, 0
        for outputs, inputs, of_experts in self.adapted_matrices:
            if of_experts:
                experts += outputs + inputs
            else:
                dense += outputs + inputs
        return one * dense, one * self.local_experts * experts

    @property
    def parameters(self) -> int:
        """Elements of all weights of this rank without adapters."""
        return self.dense_parameters + self.expert_parameters

    @property
    def trained(self) -> tuple[int, int]:
        """Elements of the weights with a gradient and optimizer state: outside experts, and of experts."""
        return self._adapters if self.adapter_rank else (self.dense_parameters, self.expert_parameters)

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices that Transformer Engine multiplies in FP8."""
        head = self.columns * self.hidden if self.is_last else 0
        linear = sum(outputs * inputs * count for outputs, inputs, count in self.matrices)
        return linear - head + self.expert_parameters

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest trained weight."""
        if self.adapter_rank:
            return self.adapter_rank * max(self.hidden, self.query, self.ffn, self.expert_ffn)
        sizes = [outputs * inputs for outputs, inputs, _ in self.matrices]
        sizes += [self.columns * self.hidden] if self.is_first else []
        return max([*sizes, 2 * self.hidden * self.expert_ffn])

    def tokens(self, rows: int, length: int) -> Tokens:
        """A microbatch of `rows` samples of `length` tokens, padded and split for the layout."""
        local = self.padding.rounded(length) // self.cp
        split = rows * local // (self.tp if self.sequence_parallel else 1)
        return Tokens(rows, local, split)

    def adapted_tokens(self, tokens: Tokens) -> int:
        """Tokens that a layer's adapters process, of all matrices together."""
        of_mlp = sum(target in OF_MLP for target in self.adapted)
        of_experts = self.routed(tokens) if self.experts else tokens.count
        return (len(self.adapted) - of_mlp) * tokens.count + of_mlp * of_experts

    def routed(self, tokens: Tokens) -> int:
        """Tokens of a microbatch that this rank's experts process, with tokens spread evenly over experts."""
        return tokens.split * self.etp * self.top_k
