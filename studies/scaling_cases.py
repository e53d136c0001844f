"""The cases that `study scaling` measures: layouts of one small model, then model sizes at one layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oblr_megatron.config import Config, parse_config
from oblr_megatron.memory.training import estimate

PROMPT_TOKENS = 16
SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "recompute": "recompute_granularity",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One case. Example: Case("tp2 sp", ranks=2, layout={"tp": 2, "sp": True}, mode="bookkeep")."""

    name: str
    ranks: int
    layout: dict[str, Any] = field(default_factory=dict)  # keys as in SHORT
    mode: str = "two_pass"
    rows: int = 4  # samples per microbatch
    hidden: int = 256
    experts: int = 0
    tokens: int = 128  # per sample
    prompts: int = 4  # Q
    folds: int = 4
    group_size: int = 4

    def hf_config(self) -> dict[str, Any]:
        """A four-layer Qwen3, or a mixture of experts with the same number of active weights."""
        mixture = {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": self.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 3 * self.hidden // 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        dense = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        return {
            "vocab_size": 2048,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": 4,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": self.hidden // 64,
            "head_dim": 32,
            "max_position_embeddings": self.tokens,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **(mixture if self.experts else dense),
        }

    def config(self) -> Config:
        """Config of the run."""
        layout = {SHORT[name]: value for name, value in self.layout.items()}
        return parse_config(
            {
                "run_dir": "unused",
                "num_prompts": self.prompts,
                "group_size": self.group_size,
                "model": {"path": "unused"},
                "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
                "algo": {"baseline": "optimal", "snr": {"num_folds": self.folds}},
                "rollout": {"max_response_tokens": self.tokens - PROMPT_TOKENS},
                "gradnorm": {"mode": self.mode},
                "checkpoint": {"every_steps": 0},
                "parallel": {"micro_batch_tokens": self.rows * self.tokens, **layout},
            }
        )

    def estimated_bytes(self) -> int:
        """The planner's estimate of a rank's tensors, without the process itself."""
        return estimate(self.hf_config(), self.config(), self.ranks, fixed_bytes=0).total


CASES: tuple[Case, ...] = (
    Case("one rank", 1),
    Case("one rank, one a microbatch", 1, rows=1),
    Case("one rank, bookkeep", 1, mode="bookkeep"),
    Case("one rank, stash", 1, mode="stash"),
    Case("one rank, full recompute", 1, {"recompute": "full"}),
    Case("experts", 1, experts=4),
    Case("hidden 128", 1, hidden=128),
    Case("hidden 384", 1, hidden=384),
    Case("tp2", 2, {"tp": 2}),
    Case("tp2 sp", 2, {"tp": 2, "sp": True}),
    Case("pp2", 2, {"pp": 2}),
    Case("cp2", 2, {"cp": 2}),
    Case("dp2", 2),
    Case("dp2, bookkeep", 2, mode="bookkeep"),
    Case("ep2", 2, {"ep": 2}, experts=4, folds=2),  # each rank has a prompt of each fold
    Case("tp4 sp", 4, {"tp": 4, "sp": True}),
    Case("tp2 pp2", 4, {"tp": 2, "pp": 2}),
    Case("pp4, one a microbatch", 4, {"pp": 4}, rows=1),
    Case("tp2 cp2", 4, {"tp": 2, "cp": 2}),
    Case("dp4", 4),
    Case("dp2 tp2, bookkeep", 4, {"tp": 2}, mode="bookkeep"),
)
"""Ranks share the machine's cores if there are more ranks than cores."""


def case_named(name: str) -> Case:
    """The case of this name.

    Raises:
        ValueError: no case has this name.
    """
    found = {case.name: case for case in CASES}.get(name)
    if found is None:
        raise ValueError(f"no case is called {name!r}")
    return found
