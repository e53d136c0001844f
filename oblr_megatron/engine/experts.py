"""A mixture's experts in a CPU engine, computed from the weights as they are loaded and pushed.

vLLM's own kernels for a CPU take each layer's experts in a layout of theirs, into which it brings them once, at load
time. A weight update in Hugging Face's layout would then be taken for that layout, and no error raised. These read the
plain layout. They are slower than the kernels on a large mixture; no shape is excluded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class UnpackedExperts(CPUUnquantizedExperts):
    """sum_e p_e W2_e (silu(W1_e x) * W3_e x) over a token's experts, one expert after another."""

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weights as they are."""

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
            output: where the result goes.
            hidden_states: x [t, hidden].
            w1: gate and up of this rank's experts, [e, 2 * ffn, hidden].
            w2: down, [e, hidden, ffn].
            topk_weights: p of each token's experts [t, k].
            topk_ids: which experts they are [t, k].
            activation: SiLU.
            global_num_experts: unused.
            expert_map: from an expert's number to its number on this rank, -1 for the others; None where all are here.
            apply_router_weight_on_input: never for a Qwen3.
        """
        assert not apply_router_weight_on_input, "a Qwen3 weighs what its experts return"
        local = topk_ids if expert_map is None else expert_map[topk_ids]
        output.zero_()
        for expert in local.unique().tolist():
            if expert < 0:
                continue
            token, place = (local == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
            found = functional.linear(functional.silu(gate) * up, w2[expert])
            output.index_add_(0, token, (found * topk_weights[token, place, None]).to(output.dtype))
