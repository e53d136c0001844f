"""Predicted seconds of one microbatch on one rank of a pipeline stage, by term. Imports no torch.

Each method is the formula of its term. Symbols: n tokens of the rank's part of a microbatch; x bytes per element;
h hidden size. The factor 2.5 of attention's backward pass is FlashAttention-2's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oblr_megatron.memory.rank_shapes import RankSizes, Tokens

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.extras.planner.constants import PlannerMachine
    from oblr_megatron.extras.planner.exchange import Links

Terms = dict[str, float]
"""Seconds by purpose."""

BACKWARD = {
    "products": 2.0,
    "adapters": 2.0,
    "attention": 2.5,
    "elementwise": 2.0,
    "host": 2.0,
    "tensor": 1.5,
    "context": 2.0,
    "experts": 2.0,
}
"""Backward over forward seconds. With adapters the other matrices have no gradient of their own: 1.0 for products."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank of one pipeline stage."""

    sizes: RankSizes
    config: Config
    links: Links
    machine: PlannerMachine

    def forward(self, tokens: Tokens) -> Terms:
        """Seconds of a microbatch's forward pass, output layer and loss included."""
        return added(self.layers(tokens), self.head(tokens))

    def layers(self, tokens: Tokens) -> Terms:
        """Seconds of the forward pass through the stage's layers."""
        sizes, links = self.sizes, self.links
        matrices = sizes.matrices[: -1 if sizes.is_last else None]  # without the output layer
        products = sum(self.product(tokens.count, p, d) * count for p, d, count in matrices)
        products += sizes.layers * self._experts(tokens)
        hidden = sizes.hidden * tokens.count * sizes.element
        return {
            "products": products,
            "adapters": sizes.layers * self._adapters(tokens),
            "attention": sizes.layers * self._attention(tokens),
            "elementwise": sizes.layers * self._moved(self.elementwise_bytes(tokens)),
            "host": sizes.layers * self.machine.constants.layer_s,
            # attention and a dense MLP gather and scatter; `_routing` has the experts' own
            "tensor": sizes.layers * (2 if sizes.experts else 4) * links.tensor(hidden),
            "context": sizes.layers * links.ring(2 * sizes.kv * tokens.count * sizes.element * sizes.cp),
            "experts": sizes.layers * self._routing(tokens),
        }

    def head(self, tokens: Tokens) -> Terms:
        """Seconds of embedding, output layer and loss, if the stage has them."""
        sizes = self.sizes
        hidden = sizes.hidden * tokens.count * sizes.element
        tensor = self.links.tensor(hidden) * (int(sizes.is_first) * 2 + int(sizes.is_last))
        if not sizes.is_last:
            return {"tensor": tensor}
        loss = 3 * tokens.count * sizes.columns * sizes.wide
        return {
            "products": self.product(tokens.count, sizes.columns, sizes.hidden, head=True),
            "elementwise": self._moved(loss),
            "tensor": tensor + 6 * self.links.tensor(tokens.count * sizes.wide),  # 3 all-reduces of a number per token
        }

    def backward(self, tokens: Tokens) -> Terms:
        """Seconds of a microbatch's backward pass, with recomputation."""
        parallel = self.config.parallel
        factors = BACKWARD | ({} if parallel.sequence_parallel else {"tensor": 1.0})
        factors |= {"products": 1.0} if self.sizes.adapter_rank else {}
        terms = {name: factors[name] * seconds for name, seconds in self.forward(tokens).items()}
        if parallel.recompute_granularity == "full":
            share = 1.0
            if parallel.recompute_method == "block":
                share = min(1.0, parallel.recompute_num_layers / self.sizes.layers)
            return added(terms, {name: share * seconds for name, seconds in self.layers(tokens).items()})
        if parallel.recompute_granularity == "selective":
            return added(terms, *(self._module(name, tokens) for name in parallel.recompute_modules))
        return terms

    def _module(self, name: str, tokens: Tokens) -> Terms:
        """Seconds of the forward pass through the layers' modules of a name in parallel.recompute_modules."""
        sizes, elements = self.sizes, self._elements(tokens)
        moved = elements.get(name, 0.0) + (elements["moe_act"] if name == "moe" else 0.0)
        terms = {"elementwise": self._moved(self._bytes(moved))}
        match name:
            case "core_attn":
                terms["attention"] = self._attention(tokens)
            case "mlp":
                shapes = (2 * sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn)
                terms["products"] = sum(self.product(tokens.count, *shape) for shape in shapes)
            case "moe":
                terms |= {"products": self._experts(tokens), "experts": self._routing(tokens)}
        return {key: sizes.layers * seconds for key, seconds in terms.items()}

    def product(self, count: float, outputs: int, inputs: int, *, head: bool = False) -> float:
        """Seconds of a matrix product with a shard [outputs, inputs]."""
        constants, narrow = self.machine.constants, min(outputs, inputs)
        efficiency = count / (count + constants.half_tokens) * narrow / (narrow + constants.half_width)
        return 2.0 * count * outputs * inputs / (self._peak(head) * max(efficiency, 1e-9))

    def elementwise_bytes(self, tokens: Tokens) -> float:
        """Bytes that a layer's forward pass moves besides products, if fused kernels write and read each tensor once.

        Elements: 8 n' h (two norms, two residuals), 4 n (q + 2 kv) (norms of q and k, rotary embedding), 3 n f (gated
        unit), with n' = n / tp with sequence parallelism. Each token routed to an expert adds 4 h for both ways.
        """
        return self._bytes(sum(self._elements(tokens).values()))

    def _elements(self, tokens: Tokens) -> dict[str, float]:
        """Elements of `elementwise_bytes` by part of a layer; parts of parallel.recompute_modules have its names."""
        sizes = self.sizes
        routed = sizes.routed(tokens) if sizes.experts else 0
        return {
            "layernorm": 4 * tokens.split * sizes.hidden,
            "residual": 4 * tokens.split * sizes.hidden,
            "qkv": 4 * tokens.count * sizes.qkv,
            "mlp": 3 * tokens.count * sizes.ffn,
            "moe": 4 * routed * sizes.hidden,
            "moe_act": 3 * routed * sizes.expert_ffn,
        }

    def _bytes(self, elements: float) -> float:
        return float(elements * self.sizes.element) * self.machine.constants.passes

    def _peak(self, head: bool = False) -> float:
        """FLOP/s of large products; the output layer stays in bf16 under FP8."""
        device, constants = self.machine.device, self.machine.constants
        if self.config.model.fp8 != "none" and not head and device.fp8_tflops is not None:
            return device.fp8_tflops * 1e12 * constants.product_fp8
        return device.bf16_tflops * 1e12 * constants.product

    def _moved(self, num_bytes: float) -> float:
        return num_bytes / (self.machine.device.memory_gb_s * 1e9 * self.machine.constants.memory)

    def _experts(self, tokens: Tokens) -> float:
        """Seconds of the products of a layer's experts, with tokens spread evenly, and of its router."""
        sizes = self.sizes
        if not sizes.experts:
            return 0.0
        each = sizes.routed(tokens) / sizes.local_experts
        expert = self.product(each, 2 * sizes.expert_ffn, sizes.hidden) + self.product(
            each, sizes.hidden, sizes.expert_ffn
        )
        return sizes.local_experts * expert + self.product(tokens.split, sizes.experts, sizes.hidden, head=True)

    def _adapters(self, tokens: Tokens) -> float:
        """Seconds of a layer's adapters: x A^T [n, rank], that times B^T [n, p], and its addition to the output."""
        sizes, seconds = self.sizes, 0.0
        for outputs, inputs, of_experts in sizes.adapted_matrices:
            times = sizes.local_experts if of_experts else 1
            count = sizes.routed(tokens) / times if of_experts else tokens.count
            inner = self.product(count, sizes.adapter_rank, inputs) + self.product(count, outputs, sizes.adapter_rank)
            seconds += times * (inner + self._moved(3 * count * outputs * sizes.element))
        return seconds

    def _attention(self, tokens: Tokens) -> float:
        """Seconds of causal attention: half of all pairs of tokens, divided over the context-parallel ranks."""
        sizes, whole = self.sizes, tokens.length * self.sizes.cp
        flops = 4.0 * tokens.rows * sizes.query * whole * (whole + 1) / 2 / sizes.cp
        return flops / (self.machine.device.bf16_tflops * 1e12 * self.machine.constants.attention)

    def _routing(self, tokens: Tokens) -> float:
        sizes = self.sizes
        if not sizes.experts:
            return 0.0
        sent = tokens.split * sizes.top_k * sizes.hidden * sizes.element
        shared = sizes.routed(tokens) * sizes.hidden * sizes.element
        exchanged = self.links.expert(sent) + self.links.expert_tensor(shared)
        return 2 * exchanged + self.machine.constants.mixture_s


def added(*terms: Terms) -> Terms:
    """Sum terms by name."""
    return {name: sum(part.get(name, 0.0) for part in terms) for part in terms for name in part}


def scaled(terms: Terms, factor: float) -> Terms:
    """Multiply every term by a factor."""
    return {name: factor * seconds for name, seconds in terms.items()}


def device_seconds(terms: Terms, machine: PlannerMachine) -> Terms:
    """Count launch time only where it exceeds the other terms, because a GPU's host runs ahead."""
    if not machine.on_gpu:
        return terms
    rest = sum(seconds for name, seconds in terms.items() if name != "host")
    return terms | {"host": max(0.0, terms.get("host", 0.0) - rest)}
