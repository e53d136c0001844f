"""Estimate a recipe's cost on H100s by arithmetic: memory of a rank, seconds of a step. Runs nothing.

    python tools/recipe_cost.py examples/math_qwen3_8b/config.toml --size 8B --gpus 8 --response-tokens 1000

Memory is the package's estimate of a rank (the line that a run prints at its start). Time is FLOPs and bytes divided by
the rates that an H100 is assumed to reach, see the constants below. No GPU has confirmed them.

    training  = the model's FLOPs (observe/performance/flops.py; 4/3 of them with full recomputation) x the cost factor
                of the norms / all GPUs; kernel launches, which dominate in small models, are not counted
    sampling  = the longer of: all tokens at the rate of full engines; one response of maximal length
                a decode step of an engine reads its weights and the KV cache of its sequences once
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from oblr_megatron.checks.layout import check_layout
from oblr_megatron.config import Config, load_config
from oblr_megatron.errors import EXIT_OK
from oblr_megatron.families import head_dim
from oblr_megatron.formatting import duration, size
from oblr_megatron.memory.rank_shapes import ELEMENT_BYTES
from oblr_megatron.memory.select_mode import ModeChoice, resolve
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.flops import total_parameters, training_flops
from oblr_megatron.observe.performance.hardware import device_named
from oblr_megatron.runtime.command_line import Parser, count, guarded

ROOT = Path(__file__).resolve().parent.parent
GPU_BYTES = 75 * 2**30  # memory available to a rank, of 80 GB
GPU = device_named("h100")
TRAINING_FLOPS = 0.4 * GPU.bf16_tflops * 1e12  # training is assumed to reach 40% of the peak rate
READ_BYTES_S = 0.6 * GPU.memory_gb_s * 1e9  # decoding is assumed to reach 60% of the memory bandwidth


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimated seconds of a step. Example: Cost(sampling_s=34.1, training_s=19.5)."""

    sampling_s: float
    training_s: float

    @property
    def step_s(self) -> float:
        """Sampling and training, one after the other."""
        return self.sampling_s + self.training_s


def cost(
    model: dict[str, Any], config: Config, norm_cost: float, *, gpus: int, prompt_tokens: int, tokens: int
) -> Cost:
    """Estimate a step's time.

    Args:
        model: the model's config.json.
        config: the run's config.
        norm_cost: time of a step with norms / time of a plain step.
        gpus: number of GPUs that train and sample in turn.
        prompt_tokens: typical prompt length.
        tokens: typical response length.
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
    together = min(max(1, samples // engines), config.rollout.max_num_seqs)
    element = ELEMENT_BYTES["bfloat16"]
    weights = element * total_parameters(model) / width
    a_token = 2 * element * model["num_hidden_layers"] * model["num_key_value_heads"] * head_dim(model) / width
    full = (weights + together * (prompt + tokens / 2) * a_token) / READ_BYTES_S
    alone = weights / READ_BYTES_S
    return max(samples * tokens / engines / together * full, config.rollout.max_response_tokens * alone)


def print_table(config: Config, choice: ModeChoice, found: Cost, gpus: int) -> None:
    """Print the estimates."""
    steps = config.num_steps
    table = Table("what", "estimate", title="estimated, not measured: a lower bound without pushes and evaluations")
    for name, num_bytes in choice.estimate.rows():
        if num_bytes:
            table.add_row(f"memory: {name}", size(num_bytes))
    table.add_row("memory of the fullest rank", f"{size(choice.estimate.total)} ({choice.mode})")
    table.add_row("sampling a step", duration(found.sampling_s))
    table.add_row("norms and gradient a step", duration(found.training_s))
    table.add_row(f"{steps} steps", duration(steps * found.step_s))
    table.add_row("GPU hours", f"{steps * found.step_s * gpus / 3600:.1f}")
    Console(width=100).print(table)


def main() -> int:
    """Estimate a recipe and print the table; a mistake ends in one line."""
    return guarded(estimate)


def estimate() -> int:
    """Estimate the recipe that the command line names.

    Raises:
        UserError: no model has this size, or the recipe does not run on so many GPUs.
    """
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--size", required=True, help="a size of Qwen3 (8B, 30B-A3B), or a name (Llama-3.1-8B)")
    parser.add_argument("--gpus", type=count, default=8)
    parser.add_argument("--prompt-tokens", type=count, default=150, help="typical prompt length")
    parser.add_argument("--response-tokens", type=count, default=1000, help="typical response length (an assumption)")
    options = parser.parse_args()
    model = published(options.size)
    config = load_config(options.config)
    check_layout(model, config, options.gpus)
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
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
