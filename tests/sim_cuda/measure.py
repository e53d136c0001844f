"""Run in a process with the simulated device: the waits of steps, as JSON.

    python -m tests.sim_cuda.measure '{"NAME": {"mode": MODE, "tied": false, "options": ["section.key=value", ..]}, ..}'

One sample a microbatch, unless the options say otherwise. Prints {NAME: [[[[kind, place, count], ..], ..], ..], ..}:
for each rank the waits of steps with 2 layers and 4 prompts, with 4 layers, and with 8 prompts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import sim_cuda
import torch
import torch.distributed as dist

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.parallel import initialize, rank_from_environment, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.types import Sample, Scored
from tests.tiny import VOCAB, tiny_config

GROUP = 2
STEPS = ((2, 4), (4, 4), (2, 8))  # layers, prompts
MODES = {"plain": ["algo.baseline=rloo"], "inline": ["algo.baseline=pooled", "gradnorm.mode=inline"]} | {
    mode: ["algo.baseline=optimal", f"gradnorm.mode={mode}"] for mode in ("stash", "bookkeep", "two_pass")
}


def config_of(mode: str, prompts: int, options: Sequence[str]) -> Config:
    """A run's config."""
    table: dict[str, Any] = {
        "run_dir": "unused",
        "num_prompts": prompts,
        "group_size": GROUP,
        "model": {"path": "unused", "dtype": "bfloat16", "transformer_impl": "local"},
        "data": {"train": "unused"},
        "algo": {"snr": {"num_folds": 2}},
        "parallel": {"micro_batch_tokens": 1},
        "checkpoint": {"every_steps": 0},
    }
    return parse_config(table, overrides=[*MODES[mode], *options])


def batch_of(prompts: int) -> Batch:
    """Samples of different lengths, with repeated tokens."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for n in range(prompts * GROUP):
        prompt, response = 4 + n % 3, 9 + n % 5
        ids = torch.randint(2, VOCAB // 2, (prompt + response,), generator=generator).tolist()
        samples.append(Sample(n // GROUP, tuple(ids[:prompt]), tuple(ids[prompt:]), (-4.0,) * response, "", "stop", 0))
    rewards = torch.arange(len(samples), dtype=torch.float64).remainder(2).view(prompts, GROUP)
    lengths = torch.tensor([sample.length for sample in samples]).view(prompts, GROUP)
    return Batch([], samples, Scored(rewards, lengths, 0))


def waits(*, mode: str, layers: int, prompts: int, options: Sequence[str] = (), tied: bool = False) -> list[list[Any]]:
    """[kind, place, count] of all waits of this rank in a step's gradient, the second one."""
    config, batch = config_of(mode, prompts, options), batch_of(prompts)
    parallel = initialize(config.parallel)
    hf_config = tiny_config(num_hidden_layers=layers, tie_word_embeddings=tied)
    policy = build_policy(hf_config, config.model, parallel, config.parallel)
    for _, parameter in policy.named_parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    gradient = StepGradient(policy, config)
    for step in (1, 2):
        sim_cuda.waits.clear()
        gradient.begin(step).add(whole_step(batch), AdvantageRule(batch.scored, config))
        assert len(list(gradient.updates())) == 1
    found = [[*key, count] for key, count in sorted(sim_cuda.waits.items())]
    shutdown(keep_process_group=True)
    return found


def main(cases: str) -> None:
    """Print the waits of all cases, on the first rank."""
    rank, world_size = rank_from_environment()
    rows = {
        name: [waits(layers=layers, prompts=prompts, **case) for layers, prompts in STEPS]
        for name, case in json.loads(cases).items()
    }
    ranks: list[Any] = [None] * world_size
    dist.all_gather_object(ranks, rows)
    if rank == 0:
        print(json.dumps({name: [one[name] for one in ranks] for name in rows}))
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
