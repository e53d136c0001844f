"""What the planner says that `rollout.overlap` is worth, for each preset on 8, 64 and 1,024 H100s.

    python tools/bench/overlap_plan.py --json run/bench/overlap_plan.json     minutes
    python tools/bench/overlap_plan.py --models 0.6B --gpus 8                 seconds

A step has 256 x 4 responses, and 4,096 x 4 on 1,024 GPUs, with the preset's longest response and half of that on
average. "none" shares all GPUs between trainer and engines, with `optimizer.offload` where that is faster or fits at
all. The others divide the GPUs at the best place that the planner tries. A dash: nothing fits. Predictions, not
measurements; docs/planner.md lists what they leave out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from record import publish

from oblr_megatron.config import load_config
from oblr_megatron.errors import UserError
from oblr_megatron.extras.planner.constants import Machine
from oblr_megatron.extras.planner.search import Found, best_split, search
from oblr_megatron.extras.planner.setting import Request, base_table
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.hardware import device_named

ROOT = Path(__file__).resolve().parents[2]
GPUS = {8: 256, 64: 256, 1024: 4096}
"""Prompts of a step by GPUs."""
MODELS = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")


@dataclass(frozen=True, slots=True)
class Row:
    """One preset on so many GPUs.

    Example: Row(model="Qwen3-8B", gpus=64, none_s=90.9, offload="none", stream_s=85.2, one_step_s=85.1,
        engines="56, 56", ratio=0.94)
    """

    model: str
    gpus: int
    none_s: float | str
    offload: str  # optimizer.offload of that step
    stream_s: float | str
    one_step_s: float | str
    engines: str  # GPUs that only sample, with stream and with one_step
    ratio: float | str  # of stream to none


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, metavar="SIZE")
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS), choices=GPUS)
    options = parser.parse_args(arguments)
    publish([row(model, gpus) for model in options.models for gpus in options.gpus], "overlap_plan", options.json)


def row(size: str, gpus: int) -> Row:
    """The fastest step in each mode."""
    asked = request(size, gpus)
    found: dict[str, tuple[float | str, str]] = {}
    for mode in ("none", "stream", "one_step"):
        try:
            plans, choice = shared(asked) if mode == "none" else divided(asked, mode)
        except UserError:
            found[mode] = "-", "-"
            continue
        found[mode] = seconds(plans), choice
    none, stream = found["none"][0], found["stream"][0]
    ratio = stream / none if isinstance(none, float) and isinstance(stream, float) else "-"
    engines = ", ".join(found[mode][1] for mode in ("stream", "one_step"))
    return Row(f"Qwen3-{size}", gpus, *found["none"], stream, found["one_step"][0], engines, ratio)


def shared(asked: Request) -> tuple[Found, str]:
    """The fastest plans with engines on the trainer's GPUs, and optimizer.offload of these plans.

    Raises:
        UserError: nothing fits, also with the optimizer's state in host memory.
    """
    choices: list[tuple[Found, str]] = []
    refusal: UserError | None = None
    for offload in ("none", "sampling"):
        table = {**asked.table, "optimizer": {**asked.table.get("optimizer", {}), "offload": offload}}
        try:
            choices.append((search(replace(asked, table=table)), offload))
        except UserError as error:
            refusal = error
    if refusal is not None and not choices:
        raise refusal
    return min(choices, key=lambda choice: seconds(choice[0]))


def divided(asked: Request, mode: str) -> tuple[Found, str]:
    """The fastest plans with engines on GPUs of their own, and how many these are.

    Raises:
        UserError: nothing fits.
    """
    plans, used = best_split(asked, mode)
    return plans, str(used.engine_gpus)


def request(size: str, gpus: int) -> Request:
    """The preset's lengths on so many H100s."""
    preset = load_config(ROOT / "slurm" / "configs" / f"qwen3_{size.lower().replace('-', '_')}.toml")
    prompt, response = preset.data.max_prompt_tokens, preset.rollout.max_response_tokens
    name = f"Qwen3-{size}"
    table = base_table(
        model=name,
        prompts=GPUS[gpus],
        group_size=4,
        prompt_tokens=prompt,
        sequence_length=prompt + response,
        dtype="bfloat16",
    )
    return Request(name, published(name), gpus, Machine(device_named("h100")), response // 2, table)


def seconds(found: Found) -> float:
    """Of the fastest plan's step."""
    return found.plans[0].prediction.seconds


if __name__ == "__main__":
    main()
