"""Models and samples of the gradient-norm benchmark: layers with Qwen3's sizes, random weights and responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.config import Config, parse_config
from oblr_megatron.types import Sample, Scored

VOCAB, PROMPT_TOKENS = 2048, 16  # a small vocabulary, so that layers dominate the output head


class Shape(NamedTuple):
    """Sizes of a layer."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "tiny": Shape(128, 256, 4, 2, 32),
    "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128),
    "qwen3-8b": Shape(4096, 12288, 32, 8, 128),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table: a model, and a step's responses to one prompt.

    Example: Cell(shape="qwen3-0.6b", layers=2, tokens=512, samples=4)
    """

    shape: str
    layers: int
    tokens: int  # T, per response
    samples: int  # G
    dtype: str = "float32"
    layers_of: str = "auto"  # model.transformer_impl
    lora: int = 0  # rank of the adapters; 0: all weights are trained

    @property
    def parameters(self) -> int:
        """P, parameters of the whole model."""
        hidden, ffn, heads, kv_heads, size = SHAPES[self.shape]
        attention = 2 * hidden * size * (heads + kv_heads) + 2 * size
        return 2 * VOCAB * hidden + hidden + self.layers * (attention + 3 * hidden * ffn + 2 * hidden)

    def hf_config(self) -> Qwen3Config:
        """The model's config. The head is untied, since Opacus refuses tied parameters."""
        shape = SHAPES[self.shape]
        return Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=self.tokens + PROMPT_TOKENS,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=False,
        )

    def config(
        self, baseline: str, gradnorm: dict[str, Any], *, alone: bool = False, norm_power: float = 0.0
    ) -> Config:
        """Config with one fold, one rank, and one sample per microbatch, as with a cluster's token budgets.

        The responses are those to one prompt, or `alone` those to a prompt each.
        """
        table = {
            "run_dir": "unused",
            "num_prompts": self.samples if alone else 1,
            "group_size": 1 if alone else self.samples,
            "model": {
                "path": "unused",
                "dtype": self.dtype,
                "transformer_impl": self.layers_of,
                "lora": {"rank": self.lora},
            },
            "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
            "algo": {"baseline": baseline, "norm_power": norm_power, "snr": {"num_folds": 1}},
            "gradnorm": gradnorm,
            "rollout": {"importance_sampling": "none", "max_response_tokens": self.tokens},
            "parallel": {"micro_batch_tokens": 1},
        }
        return parse_config(table)

    def random_samples(self) -> list[Sample]:
        """G responses of exactly T random tokens to prompts of equal length."""
        generator = torch.Generator().manual_seed(1)
        draws = torch.randint(VOCAB, (self.samples, PROMPT_TOKENS + self.tokens), generator=generator).tolist()
        return [
            Sample(0, tuple(row[:PROMPT_TOKENS]), tuple(row[PROMPT_TOKENS:]), (-1.0,) * self.tokens, "", "length", 0)
            for row in draws
        ]

    def coefficients(self, config: Config, norms_sq: Tensor) -> Tensor:
        """Coefficients of the samples with squared norms [G]: [G] fp64, all nonzero."""
        return AdvantageRule(self.scored(), config)([0], norms_sq.cpu()[None])[0]

    def scored(self, *, alone: bool = False) -> Scored:
        """Rewards 1, 0, 1, 0, ... of the only prompt, or `alone` of a prompt each."""
        shape = (self.samples, 1) if alone else (1, self.samples)
        rewards = (torch.arange(self.samples) % 2 == 0).to(torch.float64).view(shape)
        return Scored(rewards, torch.full(shape, self.tokens), 0)


@torch.no_grad()
def randomize(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Small random weights; norm weights are 1."""
    torch.manual_seed(0)
    for name, parameter in named:
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
