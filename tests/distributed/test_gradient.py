"""The policy-gradient pass in folds: g, ||g||^2 and the folds' norms are the oracle's in every layout.

fp64, relative 1e-10. Not covered: importance ratios other than 1, the optimizer's step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import parse_config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.policy import build_policy
from oblr_megatron.norms.oracle import oracle_gradient, oracle_logprobs
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.types import Sample, Scored
from tests.distributed.launch import layout, run_ranks
from tests.tiny import VOCAB, make_hf_dir

NUM_PROMPTS, GROUP, FOLDS = 4, 3, 4
LAYOUTS = {  # world size -> (tp, pp, sp)
    1: [(1, 1, False)],
    2: [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False)],
    4: [(2, 2, True), (1, 2, False), (2, 1, False), (1, 1, False)],
}


def make_samples() -> list[Sample]:
    """Responses of several lengths, one of them empty; the log-probs are not used."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for n in range(NUM_PROMPTS * GROUP):
        prompt, response = 3 + n % 4, (5 * n) % 9
        ids = torch.randint(2, VOCAB, (prompt + response,), generator=generator).tolist()
        samples.append(
            Sample(n // GROUP, tuple(ids[:prompt]), tuple(ids[prompt:]), (-1.0,) * response, "", "length", 0)
        )
    return samples


def coefficients() -> torch.Tensor:
    """The samples of one prompt have 0: the pass leaves them out, but they stay in their fold."""
    values = torch.linspace(-1, 2, NUM_PROMPTS * GROUP, dtype=torch.float64)
    values[GROUP : 2 * GROUP] = 0
    return values


def on_ranks(path: str, cases: list[tuple[int, int, bool]]) -> list[dict[str, float]]:
    """The metrics of each layout, on every rank."""
    found = []
    for tp, pp, sp in cases:
        table = {
            "run_dir": "unused",
            "num_prompts": NUM_PROMPTS,
            "group_size": GROUP,
            "model": {"path": path, "dtype": "float64"},
            "data": {"train": "unused"},
            "algo": {"baseline": "none", "token_scale": 1, "snr": {"num_folds": FOLDS}},
            "rollout": {"importance_sampling": "none", "temperature": 0.7},
            "gradnorm": {"mode": "two_pass"},
            "parallel": {"micro_batch_tokens": 24},
        }
        config = parse_config(table)
        with layout(tp=tp, pp=pp, sp=sp) as parallel:
            policy = build_policy(Qwen3Config.from_pretrained(path), config.model, parallel)
            load_hf_weights(policy, Path(path))
            step = StepGradient(policy, config).begin(1)
            rewards = NUM_PROMPTS * GROUP * coefficients().view(NUM_PROMPTS, GROUP)  # c = r / (Q G)
            scored = Scored(rewards, torch.tensor([s.length for s in make_samples()]).view_as(rewards), 0)
            step.add(whole_step(Batch([], make_samples(), scored)), AdvantageRule(scored, config))
            (stats,) = step.updates()
            found.append(
                {"loss": stats.loss, "B": stats.sq_norm, "M": stats.fold_sq_norm_mean, "tokens": stats.num_tokens}
            )
    return found


def expected(path: str) -> dict[str, float]:
    """The same metrics by the oracle: one autograd call a sample, folds summed by hand."""
    config = Qwen3Config.from_pretrained(path)
    weights = {name: tensor.double() for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    samples, values = make_samples(), coefficients()
    folds = [{name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(FOLDS)]
    loss, tokens = 0.0, 0
    for n, (sample, value) in enumerate(zip(samples, values.tolist(), strict=True)):
        if value == 0:
            continue
        fold = folds[n // GROUP * FOLDS // NUM_PROMPTS]
        for name, grad in oracle_gradient(weights, config, sample, 0.7).items():
            fold[name] -= value * grad
        loss -= value * float(oracle_logprobs(weights, config, sample, 0.7).sum())
        tokens += sample.length
    total = {name: sum(fold[name] for fold in folds) for name in weights}
    return {
        "loss": loss,
        "B": sum(float(grad.square().sum()) for grad in total.values()),
        "M": FOLDS * sum(float(grad.square().sum()) for fold in folds for grad in fold.values()),
        "tokens": tokens,
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_folds_and_gradient_norm(tmp_path: Path, world_size: int, tied: bool) -> None:
    path = str(make_hf_dir(tmp_path / "model", tied=tied, seed=5))
    wanted = expected(path)
    for rank, found in enumerate(run_ranks(on_ranks, world_size, path, LAYOUTS[world_size])):
        for case, metrics in zip(LAYOUTS[world_size], found, strict=True):
            assert metrics == pytest.approx(wanted, rel=1e-10), f"rank {rank}, tp pp sp = {case}"
