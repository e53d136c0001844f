"""The pairs A, B of a model's layers; see the folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from oblr_megatron.model.lora.linear import ReplicatedLinear

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from oblr_megatron.config.lora import LoraConfig
    from oblr_megatron.model.policy import Policy

CHILD = "lora"
"""Name of the adapters inside an attention or MLP module."""
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
        self, inputs: int, outputs: int, rank: int, scale: float, config: TransformerConfig, base: Any, *, rows: bool
    ) -> None:
        """Args:
        inputs, outputs: of the whole matrix.
        rank, scale: of the adapter; scale is alpha / rank.
        config: of the model.
        base: the adapted layer.
        rows: whether tensor-parallel ranks share the matrix by rows (else by columns).
        """
        super().__init__(config)
        device = base.weight.device
        options: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": True}
        self.A: Any
        self.B: Any
        self.scale = scale
        if rows:
            self.A = ReplicatedLinear(inputs, rank, config, device)
            self.B = ColumnParallelLinear(rank, outputs, init_method=_later, gather_output=False, **options)
        else:
            self.A = RowParallelLinear(inputs, rank, init_method=_later, input_is_parallel=True, **options)
            self.B = ReplicatedLinear(rank, outputs, config, device)

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
    """One adapted linear layer. Example, q and v of two KV groups: Site(layer, (q, None, v), (64, 32, 32), groups=2)"""

    layer: Any
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
        weight = self.layer.weight.detach()
        added = [
            weight.new_zeros(weight.shape[1], rows) if pair is None else pair.product().t()
            for pair, rows in zip(self.pairs, self.rows, strict=True)
        ]
        return (weight + self._joined(added).t()).to(weight.dtype)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """[..., rows of each part] -> [..., all rows in the layer's order]."""
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], dim=-1).flatten(-2)


class Adapters(MegatronModule):
    """The pairs of an attention or MLP module, by Hugging Face's names of their matrices."""

    def __init__(self, module: SelfAttention | MLP, lora: LoraConfig, config: TransformerConfig) -> None:
        super().__init__(config)
        self.active = True
        self.sites: list[Site] = []
        for layer_name, parts in PARTS.items():
            layer: Any = getattr(module, layer_name, None)
            if layer is None or not set(parts) & set(lora.targets):
                continue
            sizes, rows = _sizes(layer_name, layer, config), layer_name in ("linear_qkv", "linear_fc1")
            pairs: list[Pair | None] = []
            for part, (outputs, inputs) in zip(parts, sizes, strict=True):
                pair = None
                if part in lora.targets:
                    pair = Pair(inputs, outputs, lora.rank, lora.alpha / lora.rank, config, layer, rows=rows)
                    self.add_module(part, pair)
                pairs.append(pair)
            tp = config.tensor_model_parallel_size if rows else 1
            groups = cast(int, config.num_query_groups) // tp if layer_name == "linear_qkv" else 1
            site = Site(layer, tuple(pairs), tuple(outputs // tp for outputs, _ in sizes), groups)
            self.sites.append(site)
            layer.register_forward_hook(partial(_add, self, site))


def attach(model: GPTModel, lora: LoraConfig) -> None:
    """Freeze a model chunk and add adapters to its layers; `initialize` sets their values."""
    config = model.config
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, (SelfAttention, MLP)):
            adapters = Adapters(module, lora, config)
            if adapters.sites:
                module.add_module(CHILD, adapters)
    if config.recompute_granularity == "full" and model.pre_process:
        # Recomputed layers have gradients of their weights only if their input has one.
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


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
    return {site.layer.weight: site for adapters in adapters_of(policy) for site in adapters.sites}


def _add(adapters: Adapters, site: Site, _layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of an adapted layer, which returns (output, bias)."""
    if not adapters.active:
        return output
    product, bias = output
    return product + site.output(inputs[0]), bias


def _sizes(layer_name: str, layer: Any, config: TransformerConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of each whole matrix in a layer."""
    hidden, heads, width = config.hidden_size, config.num_attention_heads, cast(int, config.kv_channels)
    groups, ffn = cast(int, config.num_query_groups), cast(int, config.ffn_hidden_size)
    return {
        "linear_qkv": [(heads * width, hidden), (groups * width, hidden), (groups * width, hidden)],
        "linear_proj": [(hidden, heads * width)],
        "linear_fc1": [(ffn, hidden), (ffn, hidden)],
        "linear_fc2": [(hidden, ffn)],
    }[layer_name]


def _later(weight: Tensor) -> None:
    """No values: `initialize` sets them."""
