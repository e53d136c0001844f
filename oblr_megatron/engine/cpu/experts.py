"""Experts of a mixture in a CPU engine, computed from Hugging Face's layout.

vLLM's own CPU kernels repack each layer's experts at load time. A later weight update in Hugging Face's layout would be
read as packed, without an error. The experts here read the plain layout. They are slower than vLLM's kernels on a large
mixture, and support every shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class UnpackedExperts(CPUUnquantizedExperts):
    """y = sum_e p_e W2_e (silu(W1_e x) * W3_e x) over a token's experts, computed one expert at a time."""

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the plain layout."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        *_: object,
        apply_router_weight_on_input: bool = False,
        **__: object,
    ) -> None:
        """Fill the output [t, hidden].

        Args:
            output: y, overwritten.
            hidden_states: x [t, hidden].
            w1: gate and up of this rank's experts, [e, 2 * ffn, hidden].
            w2: down, [e, hidden, ffn].
            topk_weights: p of each token's experts [t, k].
            topk_ids: numbers of those experts [t, k].
            activation: SiLU.
            global_num_experts: unused.
            expert_map: from an expert's number to its number on this rank, -1 if it is elsewhere; None if all are here.
            apply_router_weight_on_input: False for Qwen3.
        """
        assert not apply_router_weight_on_input, "Qwen3 applies the router weight to the output of an expert"
        local = topk_ids if expert_map is None else expert_map[topk_ids]
        output.zero_()
        for expert in local.unique().tolist():
            if expert < 0:
                continue
            token, place = (local == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
            product = functional.linear(functional.silu(gate) * up, w2[expert])
            output.index_add_(0, token, (product * topk_weights[token, place, None]).to(output.dtype))
