"""Steps of the package equal those of examples/single_file.py, from the same weights and samples, in fp64 at 1e-8.

The file shares no code with the package: norms, advantages, gradient, folds, rate and Adam are written twice. Not
covered: sampling, reading the model from a Hugging Face directory (test_train.py).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import Qwen3Config

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.schedule import build_schedule
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import parse_config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.types import Sample, Scored
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import layout, run_ranks

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS, GROUP, FOLDS, STEPS = 4, 4, 2, 3
LAYOUTS = {1: [(1, 1, False)], 4: [(2, 2, True), (2, 1, False)]}  # world size -> (tp, pp, sp)

Drawn = tuple[list[int], list[int], list[float]]


def single_file() -> ModuleType:
    """examples/single_file.py as a module."""
    spec = importlib.util.spec_from_file_location("single_file", ROOT / "examples" / "single_file.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def draw(step: int) -> tuple[list[Drawn], torch.Tensor]:
    """Responses of one to four tokens with log-probs near those of a fresh model, and rewards [Q, G]."""
    generator = torch.Generator().manual_seed(step)
    drawn: list[Drawn] = []
    for n in range(NUM_PROMPTS * GROUP):
        length = 1 + n % 4
        prompt = torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(100 * step + n // GROUP)).tolist()
        response = torch.randint(0, 13, (length,), generator=generator).tolist()
        drawn.append((prompt, response, (-2.6 + 0.8 * torch.rand(length, generator=generator)).tolist()))
    rewards = torch.randint(0, 2, (NUM_PROMPTS, GROUP), generator=generator).double()
    rewards[0] = 1.0  # one group of equal rewards
    return drawn, rewards


def by_the_file() -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Initial weights, the metrics of every step, final weights."""
    file = single_file()
    model = file.build_model(torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = file.Settings(num_prompts=NUM_PROMPTS, group_size=GROUP, num_folds=FOLDS, warmup_steps=1, horizon=5.0)
    optimizer = torch.optim.Adam(model.parameters(), betas=settings.betas, eps=settings.eps)
    rate, metrics = file.LearningRate(settings), []
    for step in range(STEPS):
        drawn, rewards = draw(step)
        result = file.oblr_po_step(model, optimizer, rate, step, drawn, rewards, settings)
        scalars = torch.tensor([result.sq_norm, result.fold_sq_norm, result.lr], dtype=torch.float64)
        metrics.append({"norms": result.norms, "advantages": result.advantages, "B, M, lr": scalars})
    return before, metrics, model.state_dict()


def by_the_package(path: str, mode: str, cases: list[tuple[int, int, bool]]) -> list[tuple[list[dict], dict]]:
    """The same from the package, for each layout, on every rank."""
    table = {
        "run_dir": "unused",
        "num_prompts": NUM_PROMPTS,
        "group_size": GROUP,
        "model": {"path": path, "dtype": "float64"},
        "data": {"train": "unused"},
        "rollout": {"max_response_tokens": 4},  # the file's MAX_RESPONSE
        "algo": {
            "baseline": "optimal",
            "schedule": "snr",
            "snr": {"num_folds": FOLDS, "warmup_steps": 1, "horizon": 5.0},
        },
        "optimizer": {"lr": 2e-3},
        "parallel": {"micro_batch_tokens": 24},
        "gradnorm": {"mode": mode},
    }
    config, outcomes = parse_config(table), []
    for tp, pp, sp in cases:
        with layout(tp=tp, pp=pp, sp=sp) as parallel:
            policy = build_policy(Qwen3Config.from_pretrained(path), config.model, parallel)
            load_hf_weights(policy, Path(path))
            optimizer = PolicyOptimizer(policy, config.optimizer)
            schedule = build_schedule(config.algo, config.optimizer, num_steps=STEPS, num_prompts=NUM_PROMPTS)
            gradients, metrics = StepGradient(policy, config), []
            for step in range(STEPS):
                drawn, rewards = draw(step)
                samples = [
                    Sample(n // GROUP, tuple(prompt), tuple(response), tuple(logprobs), "", "stop", step)
                    for n, (prompt, response, logprobs) in enumerate(drawn)
                ]
                lengths = torch.tensor([len(sample.response_ids) for sample in samples]).view_as(rewards)
                scored = Scored(rewards, lengths, 0)
                gradients.begin(step + 1).add(whole_step(Batch([], samples, scored)), AdvantageRule(scored, config))
                (stats,), norms = gradients.updates(), gradients.norms_sq
                values = advantages("optimal", rewards, norms, lengths)
                lr = schedule.rate(step)
                optimizer.clip(stats.sq_norm)
                optimizer.step(lr)
                schedule.observe(stats)
                scalars = torch.tensor([stats.sq_norm, stats.fold_sq_norm_mean, lr], dtype=torch.float64)
                metrics.append({"norms": norms, "advantages": values, "B, M, lr": scalars})
            outcomes.append((metrics, {name: value.clone() for name, value in MegatronWeights(policy)}))
    return outcomes


@pytest.mark.parametrize("mode", ["two_pass", "bookkeep", "stash"])
def test_steps_equal_the_single_file(tmp_path: Path, mode: str) -> None:
    before, wanted, after = by_the_file()
    model = single_file().build_model(torch.float64)
    model.load_state_dict(before)
    model.save_pretrained(tmp_path)
    for world_size, cases in LAYOUTS.items():
        for rank, outcomes in enumerate(run_ranks(by_the_package, world_size, str(tmp_path), mode, cases)):
            for case, (metrics, weights) in zip(cases, outcomes, strict=True):
                place = f"world size {world_size}, rank {rank}, tp pp sp = {case}"
                for step in range(STEPS):
                    for name, value in wanted[step].items():
                        close = torch.allclose(metrics[step][name], value, rtol=1e-8, atol=1e-12)
                        assert close, f"{place}, step {step}, {name}: {metrics[step][name]} is not {value}"
                for name, value in weights.items():
                    difference = float((value - after[name]).abs().max())
                    assert difference <= 1e-8, f"{place}, {name}: off by {difference}"
