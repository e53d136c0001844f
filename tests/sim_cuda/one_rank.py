"""Run in a process with the simulated device: memory of one rank of the Qwen3-8B preset, without the other ranks.

    SIM_CUDA_LIMIT=1000000 python -m tests.sim_cuda.one_rank TP CP

The process group communicates nothing. Prints estimate / measured of the peak and between steps, and the allocations on
devices that belong to other ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

RANK, WORLD = 3, 8
os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(RANK), "LOCAL_WORLD_SIZE": str(WORLD)}

import sim_cuda  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from oblr_megatron.algo.advantage import AdvantageRule  # noqa: E402
from oblr_megatron.config import load_config  # noqa: E402
from oblr_megatron.gradient.step_gradient import StepGradient  # noqa: E402
from oblr_megatron.memory.training import estimate_stage  # noqa: E402
from oblr_megatron.model.optimizer import PolicyOptimizer  # noqa: E402
from oblr_megatron.model.parallel import initialize, select_device  # noqa: E402
from oblr_megatron.model.policy import build_policy  # noqa: E402
from oblr_megatron.model.published import published  # noqa: E402
from oblr_megatron.model.transformer_config import hf_config_of  # noqa: E402
from oblr_megatron.rollout.dynamic_sampling import Batch  # noqa: E402
from oblr_megatron.rollout.waves import whole_step  # noqa: E402
from oblr_megatron.types import Sample, Scored  # noqa: E402

PROMPTS, VALUE = 2, 0.01


def main(tp: str, cp: str) -> None:
    """Two steps of the preset's sizes with two prompts."""
    options = [
        f"num_prompts={PROMPTS}",
        f"algo.snr.num_folds={PROMPTS}",
        "algo.baseline=pooled",
        "gradnorm.mode=inline",
    ]
    options += [
        "parallel.pipeline_model_parallel_size=1",
        f"parallel.tensor_model_parallel_size={tp}",
        f"parallel.context_parallel_size={cp}",
    ]
    config = load_config(Path("slurm/configs/qwen3_8b.toml"), [*options, "model.transformer_impl=local"])
    values = published("Qwen3-8B")
    select_device()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    parallel = initialize(config.parallel)
    policy = build_policy(hf_config_of(values), config.model, parallel, config.parallel)
    for _, parameter in policy.named_parameters():
        parameter.detach().fill_(VALUE)
    optimizer, gradient = PolicyOptimizer(policy, config.optimizer), StepGradient(policy, config)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    count = PROMPTS * config.group_size
    ids = tuple(range(2, 2 + prompt)), tuple(range(2, 2 + response))
    samples = [Sample(n // config.group_size, *ids, (-1.0,) * response, "", "length", 0) for n in range(count)]
    rewards = torch.linspace(-1, 1, count, dtype=torch.float64).view(PROMPTS, -1)
    batch = Batch([], samples, Scored(rewards, torch.full(rewards.shape, response), 0))
    for step in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        gradient.begin(step).add(whole_step(batch), AdvantageRule(batch.scored, config))
        for stats in gradient.updates():
            optimizer.clip(stats.sq_norm)
            optimizer.step(1e-6)
        gradient.release()
    found = estimate_stage(
        values, config, WORLD, parallel.pp_rank, on_gpu=True, transformer_engine=False, fixed_bytes=0
    )
    others = sum(sim_cuda.device.allocations(index) for index in range(WORLD) if index != RANK)
    ratios = {
        "peak": found.total / torch.cuda.max_memory_allocated(),
        "between steps": found.between_steps / torch.cuda.memory_allocated(),
        "other devices": others,
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main(*sys.argv[1:])
