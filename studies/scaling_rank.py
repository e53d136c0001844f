"""Run one rank of `study scaling`: real megatron-core over gloo, one case after another in the same processes.

    python -m oblr_megatron.runtime.launch --standalone --nproc-per-node 2 -m studies.scaling_rank \\
        OUT.json tp2 pp2 --memory

Rank 0 writes OUT.json: per case, the seconds of every step's phases and the fullest rank's memory. Samples are random
tokens of equal length, passed to the trainer's own gradient and optimizer; nothing is sampled, pushed or logged. The
router balances tokens over experts by force, as in Megatron-Bridge's benchmarks, since random weights favour a few.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3MoeConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.timing import PhaseTimer
from oblr_megatron.types import Sample, Scored
from studies.scaling_cases import PROMPT_TOKENS, Case, case_named
from tools.live_bytes import LiveBytes, biases_uncounted

if TYPE_CHECKING:
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.policy import Policy

WARM_UP = 1  # uncounted steps; the first one creates the optimizer's state


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the given cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("cases", nargs="+", type=case_named, help="names of cases")
    parser.add_argument("--steps", type=int, default=3, help="steps to time")
    parser.add_argument("--memory", action="store_true", help="count the memory of one more step")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [measure(case, options.steps, memory=options.memory) for case in options.cases]
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, steps: int, *, memory: bool) -> dict[str, Any]:
    """Measure one case: {"name":, "gradient": [s], "optimizer": [s], "memory": bytes}, on every rank.

    Times are this rank's wall-clock times. Memory is the peak of live tensors during a step, on the fullest rank.
    """
    parallel = initialize(case.config().parallel)
    live = LiveBytes()
    found: dict[str, Any] = {"name": case.name}
    with biases_uncounted():
        with live if memory else nullcontext():
            trainer = Trainer(case, parallel)
            for _ in range(WARM_UP):
                trainer.step()
        if memory:
            live.peak = live.now
            with live:
                trainer.step()
            found["memory"] = largest(live.peak)
        taken = [trainer.step() for _ in range(steps)]
    del trainer
    shutdown(keep_process_group=True)
    return found | {phase: [seconds[phase] for seconds in taken] for phase in ("gradient", "optimizer")}


class Trainer:
    """A model in a case's layout, with samples.

    Args:
        case: model, layout and batch.
        parallel: the initialised layout.
    """

    def __init__(self, case: Case, parallel: Parallel) -> None:
        config = case.config()
        policy = build_policy(model_of(case), config.model, parallel, config.parallel)
        fill(policy)
        policy.transformer_config.moe_router_force_load_balancing = case.experts > 0
        self._optimizer = PolicyOptimizer(policy, config.optimizer)
        samples = random_samples(case)
        rewards = torch.rand(case.prompts, config.group_size, generator=torch.Generator().manual_seed(0)).double()
        lengths = torch.tensor([sample.length for sample in samples]).view_as(rewards)
        self._step = whole_step(Batch([], samples, Scored(rewards, lengths, 0)))
        self._advantage = AdvantageRule(self._step.scored, config)
        self._timer = PhaseTimer()
        self._gradient = StepGradient(policy, config, timer=self._timer)

    def step(self) -> dict[str, float]:
        """One update; returns the seconds of gradient (including norms) and optimizer."""
        dist.barrier()
        self._gradient.begin(1).add(self._step, self._advantage)
        (stats,) = self._gradient.updates()
        with self._timer("optimizer"):
            self._optimizer.clip(stats.sq_norm)
            self._optimizer.step(1e-6)
        seconds = self._timer.finish_step()
        gradient = seconds.get("timing_s/gradnorm", 0.0) + seconds["timing_s/gradient"]
        return {"gradient": gradient, "optimizer": seconds["timing_s/optimizer"]}


def largest(num_bytes: int) -> int:
    """The maximum over all ranks."""
    shared = torch.tensor(num_bytes)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


def model_of(case: Case) -> Qwen3Config | Qwen3MoeConfig:
    """The model's transformers config."""
    return Qwen3MoeConfig(**case.hf_config()) if case.experts else Qwen3Config(**case.hf_config())


def fill(policy: Policy) -> None:
    """Small random weights, equal on all replicas; norm weights are 1."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                parameter.normal_(std=0.02, generator=generator)


def random_samples(case: Case) -> list[Sample]:
    """Samples of exactly `tokens` tokens, the same on every rank."""
    count, vocabulary = case.prompts * case.group_size, case.hf_config()["vocab_size"]
    ids = torch.randint(vocabulary, (count, case.tokens), generator=torch.Generator().manual_seed(0)).tolist()
    response = case.tokens - PROMPT_TOKENS
    return [
        Sample(
            n // case.group_size,
            tuple(row[:PROMPT_TOKENS]),
            tuple(row[PROMPT_TOKENS:]),
            (-1.0,) * response,
            "",
            "length",
            0,
        )
        for n, row in enumerate(ids)
    ]


if __name__ == "__main__":
    main()
