"""The pairs A, B of a model's layers; see the folder.

decoder.layers.0.self_attention.lora.q_proj.A.weight        names of their parameters
decoder.layers.0.mlp.lora.experts.7.gate_proj.A.weight
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast
from zlib import crc32

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from oblr_megatron.families import OF_MLP
from oblr_megatron.model.lora.linear import ReplicatedLinear
from oblr_megatron.model.megatron_versions import mlp_submodules

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from oblr_megatron.config.lora import LoraConfig
    from oblr_megatron.model.policy import Policy

CHILD = "lora"
"""Name of the adapters inside an attention module, an MLP or a mixture."""
PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""megatron-core's linear layers, and Hugging Face's matrices in each."""


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an A or B."""
    return f".{CHILD}." in name


class Pair(MegatronModule):
    """A and B of one matrix: x -> scale * B (A x), on this rank's rows of the output."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        rank: int,
        scale: float,
        config: TransformerConfig,
        device: torch.device,
        cut: Literal["rows", "columns", "expert"],
    ) -> None:
        """Args:
        inputs, outputs: of the whole matrix.
        rank, scale: of the adapter; scale is alpha / rank.
        config: of the model.
        device: of the matrix.
        cut: how tensor-parallel ranks share the matrix; an expert's is whole.
        """
        super().__init__(config)
        options: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": True}
        self.A: Any
        self.B: Any
        self.scale = scale
        if cut == "columns":
            self.A = RowParallelLinear(inputs, rank, init_method=_later, input_is_parallel=True, **options)
        else:
            self.A = ReplicatedLinear(inputs, rank, config, device, expert=cut == "expert")
        if cut == "rows":
            self.B = ColumnParallelLinear(rank, outputs, init_method=_later, gather_output=False, **options)
        else:
            self.B = ReplicatedLinear(rank, outputs, config, device, expert=cut == "expert")

    def forward(self, x: Tensor) -> Tensor:
        """What the adapter adds to the layer's output for its input."""
        inner, _ = self.A(x)
        return cast(Tensor, self.B(inner * self.scale)[0])

    def product(self) -> Tensor:
        """scale * B A, this rank's part of the matrix, at least in fp32."""
        wide = torch.promote_types(self.A.weight.dtype, torch.float32)
        product: Tensor = self.B.weight.detach().to(wide) @ self.A.weight.detach().to(wide)
        return product * self.scale


@dataclass(frozen=True, slots=True)
class Site:
    """One adapted matrix of a rank. Example, q and v of two KV groups: Site(weight, (q, None, v), (64, 32, 32), 2)"""

    weight: nn.Parameter
    pairs: tuple[Pair | None, ...]  # in the order of PARTS; None: not adapted
    rows: tuple[int, ...]  # of each part on this rank
    groups: int  # the layer's rows are those of group 0 of all parts, then those of group 1, ...

    def output(self, x: Tensor) -> Tensor:
        """The pairs' part of the layer's output [..., rows] for its input."""
        added = [None if pair is None else pair(x) for pair in self.pairs]
        given = next(part for part in added if part is not None)
        if len(added) == 1:
            return given
        sizes = [(*given.shape[:-1], rows) for rows in self.rows]
        parts = zip(added, sizes, strict=True)
        return self._joined([given.new_zeros(size) if part is None else part for part, size in parts])

    def merged(self) -> Tensor:
        """W + scale * B A of this rank, as a new tensor of the weight's dtype."""
        weight = self.weight.detach()
        added = [
            weight.new_zeros(weight.shape[1], rows) if pair is None else pair.product().t()
            for pair, rows in zip(self.pairs, self.rows, strict=True)
        ]
        return (weight + self._joined(added).t()).to(weight.dtype)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """[..., rows of each part] -> [..., all rows in the layer's order]."""
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], dim=-1).flatten(-2)


class Adapters(MegatronModule):
    """The pairs of an attention module, an MLP or an expert, by Hugging Face's names of their matrices."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], lora: LoraConfig, config: TransformerConfig, *, expert: bool = False
    ) -> None:
        """Args:
        weights: of this rank, by megatron-core's names of their layers.
        lora: rank, alpha and targets.
        config: of the model.
        expert: whether the weights are an expert's.
        """
        super().__init__(config)
        self.active = True
        self.sites: dict[str, Site] = {}
        tp = 1 if expert else config.tensor_model_parallel_size
        for layer, weight in weights.items():
            parts, by_rows = PARTS[layer], layer in ("linear_qkv", "linear_fc1")
            groups = cast(int, config.num_query_groups) // tp if layer == "linear_qkv" else 1
            inputs = weight.shape[1] * (1 if by_rows else tp)
            rows = [weight.shape[0] // len(parts)] * len(parts)
            if layer == "linear_qkv":
                of_keys = groups * cast(int, config.kv_channels)
                rows = [weight.shape[0] - 2 * of_keys, of_keys, of_keys]
            pairs: list[Pair | None] = []
            for part, outputs in zip(parts, rows, strict=True):
                pair = None
                if part in lora.targets:
                    whole, cut = outputs * (tp if by_rows else 1), "rows" if by_rows else "columns"
                    scale, kind = lora.alpha / lora.rank, cast(Any, "expert" if expert else cut)
                    pair = Pair(inputs, whole, lora.rank, scale, config, weight.device, kind)
                    self.add_module(part, pair)
                pairs.append(pair)
            if any(pairs):
                self.sites[layer] = Site(weight, tuple(pairs), tuple(rows), groups)


class ExpertAdapters(MegatronModule):
    """The adapters of a rank's experts in one mixture; the experts are whole."""

    def __init__(self, layer: MoELayer, lora: LoraConfig, config: TransformerConfig) -> None:
        super().__init__(config)
        held: Any = layer.experts
        self._first = layer.local_expert_indices[0]
        names, apart = ("linear_fc1", "linear_fc2"), isinstance(held, SequentialMLP)
        if apart:
            weights = [{name: getattr(expert, name).weight for name in names} for expert in held.local_experts]
        else:  # Transformer Engine's grouped layers
            numbers = range(held.num_local_experts)
            weights = [{name: getattr(getattr(held, name), f"weight{n}") for name in names} for n in numbers]
        experts = [Adapters(own, lora, config, expert=True) for own in weights]
        self.experts: Any = nn.ModuleList(experts)
        for name in experts[0].sites:
            if apart:
                for adapters, expert in zip(experts, held.local_experts, strict=True):
                    getattr(expert, name).register_forward_hook(partial(_add, adapters, name))
            else:
                getattr(held, name).register_forward_hook(partial(_add_grouped, experts, name))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As megatron-core's experts: a dimension counts the experts of all ranks."""
        state: dict[str, Any] = {}
        holders = ProcessGroupCollection.use_mpu_process_groups(["expt_dp"]).expt_dp
        for index, adapters in enumerate(self.experts):
            own, axis = f"{prefix}experts.{index}.", len(sharded_offsets)
            place = (axis, self._first + index, cast(int, self.config.num_moe_experts))
            tensors = adapters.sharded_state_dict(own, (*sharded_offsets, place), metadata)
            replace_prefix_for_sharding(tensors, own, f"{prefix}experts.")
            for tensor in tensors.values():
                tensor.replica_id = (0, 0, holders.rank())
            state |= tensors
        return state


def attach(model: GPTModel, lora: LoraConfig) -> None:
    """Freeze a model chunk and add adapters to its layers; `initialize` sets their values."""
    config = model.config
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    mixtures = [module for module in model.modules() if isinstance(module, MoELayer)]
    of_experts = {part for layer in mixtures for part in layer.modules()}
    for module in list(model.modules()):
        if isinstance(module, (SelfAttention, MLP)) and module not in of_experts:
            layers = {name: getattr(module, name) for name in PARTS if hasattr(module, name)}
            adapters = Adapters({name: layer.weight for name, layer in layers.items()}, lora, config)
            if adapters.sites:
                module.add_module(CHILD, adapters)
            for name in adapters.sites:
                layers[name].register_forward_hook(partial(_add, adapters, name))
    for layer in mixtures if set(OF_MLP) & set(lora.targets) else ():
        layer.add_module(CHILD, ExpertAdapters(layer, lora, config))
    if config.recompute_granularity and model.pre_process:
        # Recomputed layers have gradients of their weights only if their input has one.
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


def read_inputs(layer: ModuleSpec, *, dense: bool) -> None:
    """Part norms from linear layers in Transformer Engine's spec, so that an adapter has its layer's input."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer.submodules.input_layernorm = TENorm
    layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    if dense:
        layer.submodules.pre_mlp_layernorm = TENorm
        mlp_submodules(layer).linear_fc1 = TEColumnParallelLinear


def adapters_of(policy: Policy) -> list[Adapters]:
    """All adapters of this rank; none if all weights are trained."""
    return [module for chunk in policy.modules for module in chunk.modules() if isinstance(module, Adapters)]


@torch.no_grad()
def initialize(policy: Policy, seed: int) -> None:
    """A uniform within 1 / sqrt(in), as PEFT has it, and B = 0, so that nothing is added. Equal in every layout."""
    parallel = policy.parallel
    for name, parameter in policy.named_parameters():
        if not is_adapter(name):
            continue
        if name.endswith(".B.weight"):
            parameter.zero_()
            continue
        shared = getattr(parameter, "tensor_model_parallel", False)  # its columns are cut over ranks
        inputs = parameter.shape[1] * (parallel.tp_size if shared else 1)
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        whole = torch.rand(len(parameter), inputs, generator=generator, dtype=torch.float64)
        own = whole.chunk(parallel.tp_size, dim=1)[parallel.tp_rank] if shared else whole
        parameter.copy_((2 * own - 1) / math.sqrt(inputs))


@contextmanager
def switched_off(policy: Policy) -> Iterator[None]:
    """Inside, the policy is the model without its adapters."""
    adapters = adapters_of(policy)
    for one in adapters:
        one.active = False
    try:
        yield
    finally:
        for one in adapters:
            one.active = True


def sites_of(policy: Policy) -> dict[nn.Parameter, Site]:
    """Adapted weight of this rank -> its site."""
    return {site.weight: site for adapters in adapters_of(policy) for site in adapters.sites.values()}


def _add(adapters: Adapters, name: str, _layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of an adapted layer, which returns (output, bias)."""
    if not adapters.active:
        return output
    product, bias = output
    return product + adapters.sites[name].output(inputs[0]), bias


def _add_grouped(
    experts: Sequence[Adapters], name: str, _layer: nn.Module, inputs: tuple[Any, ...], output: Any
) -> Any:
    """Forward hook of a grouped layer: (tokens of all experts, number of each expert's) -> (output, bias)."""
    if not experts[0].active:
        return output
    product, bias = output
    tokens = zip(experts, inputs[0].split(inputs[1]), strict=True)
    return product + torch.cat([adapters.sites[name].output(x) for adapters, x in tokens]), bias


def _later(weight: Tensor) -> None:
    """No values: `initialize` sets them."""
