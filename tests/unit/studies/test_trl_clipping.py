"""On the same completions, the gradient of a batch's second update is TRL's: GRPO, DAPO, Dr. GRPO, GSPO and CISPO.

TRL takes two updates on one generation (num_iterations 2): the first moves the policy, the second has clipped ratios.
The package's gradient is taken at TRL's weights of that moment, from the package's own log-probs before the first
update. Relative difference 2e-6 in fp32. Not covered: mini-batches (tests/distributed/test_updates.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("trl") is None:
    pytest.skip("TRL, the peer, is not installed", allow_module_level=True)
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback

from oblr_megatron.algo.baseline import STD_EPS, advantages
from oblr_megatron.algo.clipping import clipped_ratios
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig
from studies.policy import Drawn
from studies.start import load
from studies.trl_trainer import open_trainer
from tests.unit.studies.test_trl import (
    TASK,
    TEMPERATURE,
    TRL_STD_EPS,
    G,
    Q,
    arguments_of,
    rewards,
    rows,
    samples,
    start,
)

__all__ = ["rewards", "rows", "samples", "start"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # TRL's options, the package's
    "grpo": ({"loss_type": "grpo", "epsilon": 0.2}, {"aggregation": "sample_mean", "clip_low": 0.2, "clip_high": 0.2}),
    "dapo": (
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
        {"aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28},
    ),
    "dr_grpo, dual clip": (
        {"loss_type": "dr_grpo", "epsilon": 0.1, "delta": 1.15},
        {"token_scale": TASK.max_response_tokens, "clip_low": 0.1, "clip_high": 0.1, "clip_dual": 1.15},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.07},
        {"aggregation": "sample_mean", "ratio": "sequence", "clip_low": 0.05, "clip_high": 0.07},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},  # TRL's bound is that of the ratio itself
        {"aggregation": "token_mean", "surrogate": "cispo", "clip_high": 0.1},
    ),
}


class Watch(TrainerCallback):
    """Keeps weights and gradient of every update."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        parameters = list(model.parameters())
        vectors = [parameters, [parameter.grad for parameter in parameters]]
        self.seen.append(tuple(torch.cat([part.detach().flatten() for part in vector]) for vector in vectors))


def trl_updates(start: Path, samples: list[Drawn], rewards: Tensor, directory: Path, own: dict[str, Any]) -> Watch:
    """Two updates of TRL on these samples."""
    optimizer = OptimizerConfig(lr=3e-3, clip_grad=0.0)
    arguments = arguments_of("grpo", optimizer, directory, num_steps=2, num_iterations=2, **own)
    watch, found = Watch(), iter(rewards.flatten().tolist())
    built = open_trainer(
        "grpo",
        arguments,
        Qwen3ForCausalLM.from_pretrained(start / "model", dtype=torch.float32),
        AutoTokenizer.from_pretrained(start / "model"),
        [row.question for row in TASK.rows()[0][:Q]],
        lambda n, tokens: next(found),
        [watch],
    )
    built._generate_single_turn = lambda *_: ([list(each.tokens) for each in samples], None)
    built.train()
    return watch


@pytest.mark.parametrize("case", CASES)
def test_the_second_updates_gradient_is_trls(
    case: str, start: Path, samples: list[Drawn], rewards: Tensor, tmp_path: Path
) -> None:
    theirs, ours = CASES[case]
    watch = trl_updates(start, samples, rewards, tmp_path, theirs)
    (first, _), (weights, gradient) = watch.seen
    policy, algo = load(start, TASK, temperature=TEMPERATURE), AlgoConfig(baseline="grpo", **ours)
    torch.testing.assert_close(policy.vector(), first, rtol=0, atol=0)
    lengths = torch.tensor([len(each.tokens) for each in samples])
    with torch.no_grad():
        old, _ = policy.logprobs(samples)
        policy.assign(weights)
        new, _ = policy.logprobs(samples)
    values = advantages("grpo", rewards, torch.ones(Q, G), lengths.view(Q, G))
    std = rewards.double().std(-1, keepdim=True)
    values = (values * (std + STD_EPS) / (std + TRL_STD_EPS)).flatten()
    scale = algo.token_scale or 1.0
    coefficients = sample_coefficients(values, lengths, Q, G, algo.aggregation, scale)
    mask = torch.arange(old.shape[1]) < lengths[:, None]
    spread = coefficients[:, None].expand(mask.shape)
    found = clipped_ratios(new, old, mask, spread, algo)
    assert 0.02 < float((found.clipped | found.beyond_dual).sum() / mask.sum()) < 0.8
    assert bool(found.beyond_dual.any()) == (algo.clip_dual is not None)
    want = policy.gradient(samples, spread * found.weights)
    assert float((gradient + want).norm() / want.norm()) < 2e-6
