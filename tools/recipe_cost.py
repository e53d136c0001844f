"""What a recipe should cost on H100s, by arithmetic: memory of a rank, seconds of a step's parts. Nothing is run.

    python tools/recipe_cost.py examples/math_qwen3_8b/config.toml --size 8B --gpus 8 --response-tokens 1000

Memory is the package's own estimate of a rank (the line that a run prints when it starts). Time is FLOPs and bytes over
what an H100 reaches; the assumptions are the constants below, and no GPU has confirmed them:

    training  = the model's FLOPs (performance/flops.py; 4/3 of them with full recomputation), times what the norms
                cost, over all GPUs; the launch of kernels, which small models wait for, is left out
    sampling  = the longer of: all tokens at the rate of full engines; the longest response alone
                a decode step of an engine reads its weights and the keys and values of its sequences once
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from oblr_megatron.config import Config, load_config
from oblr_megatron.formatting import duration, size
from oblr_megatron.memory.rank_shapes import ELEMENT_BYTES
from oblr_megatron.memory.select_mode import ModeChoice, resolve
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.flops import total_parameters, training_flops
from oblr_megatron.observe.performance.hardware import device_named

ROOT = Path(__file__).resolve().parent.parent
GPU_BYTES = 75 * 2**30  # what a rank may take of 80 GB
GPU = device_named("h100")
TRAINING_FLOPS = 0.4 * GPU.bf16_tflops * 1e12  # the share of its rate that training usually reaches
READ_BYTES_S = 0.6 * GPU.memory_gb_s * 1e9  # the share of its memory bandwidth that decoding reaches


@dataclass(frozen=True, slots=True)
class Cost:
    """A step's estimate. Example: Cost(sampling_s=34.1, training_s=19.5)."""

    sampling_s: float
    training_s: float

    @property
    def step_s(self) -> float:
        """Both, one after the other."""
        return self.sampling_s + self.training_s


def cost(
    model: dict[str, Any], config: Config, norm_cost: float, *, gpus: int, prompt_tokens: int, tokens: int
) -> Cost:
    """A step's time.

    Args:
        model: its config.json.
        config: the run.
        norm_cost: of the norms, as a factor of a plain step's time.
        gpus: that train and sample in turn.
        prompt_tokens: of a usual prompt.
        tokens: of a usual response.
    """
    samples = config.num_prompts * config.group_size
    recomputed = 4 / 3 if config.parallel.recompute_granularity == "full" else 1
    work = recomputed * training_flops(model, [prompt_tokens + tokens] * samples) * norm_cost
    training = work / (gpus * TRAINING_FLOPS)
    sampling = _sampling_s(model, config, samples, gpus, prompt_tokens, tokens)
    return Cost(sampling, training)


def _sampling_s(model: dict[str, Any], config: Config, samples: int, gpus: int, prompt: int, tokens: int) -> float:
    width = config.rollout.tensor_parallel_size
    engines = gpus // width
    together = min(samples // engines, config.rollout.max_num_seqs)
    element = ELEMENT_BYTES["bfloat16"]
    weights = element * total_parameters(model) / width
    a_token = 2 * element * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] / width
    full = (weights + together * (prompt + tokens / 2) * a_token) / READ_BYTES_S
    alone = weights / READ_BYTES_S
    return max(samples * tokens / engines / together * full, config.rollout.max_response_tokens * alone)


def print_table(config: Config, choice: ModeChoice, found: Cost, gpus: int) -> None:
    """What it comes to."""
    steps = config.num_steps
    table = Table("what", "estimate", title="by arithmetic, not measured: a lower bound without pushes and evaluations")
    for name, num_bytes in choice.estimate.rows():
        if num_bytes:
            table.add_row(f"memory: {name}", size(num_bytes))
    table.add_row("memory of the fullest rank", f"{size(choice.estimate.total)} ({choice.mode})")
    table.add_row("sampling a step", duration(found.sampling_s))
    table.add_row("norms and gradient a step", duration(found.training_s))
    table.add_row(f"{steps} steps", duration(steps * found.step_s))
    table.add_row("GPU hours", f"{steps * found.step_s * gpus / 3600:.1f}")
    Console(width=100).print(table)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="a recipe's memory and time on H100s, by arithmetic")
    parser.add_argument("config", type=Path)
    parser.add_argument("--size", required=True, help="of the model: 0.6B, 1.7B, 4B, 8B, 14B, 32B")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=150, help="of a usual prompt")
    parser.add_argument("--response-tokens", type=int, default=1000, help="of a usual response: an assumption")
    options = parser.parse_args()
    model = published(options.size)
    config = load_config(options.config)
    choice = resolve(model, config, options.gpus, free_bytes=GPU_BYTES, on_gpu=True, transformer_engine=True)
    found = cost(
        model,
        config,
        choice.cost,
        gpus=options.gpus,
        prompt_tokens=options.prompt_tokens,
        tokens=options.response_tokens,
    )
    print_table(config, choice, found, options.gpus)


if __name__ == "__main__":
    main()
