"""`oblr-megatron plan`: layouts that fit, ranked by predicted step time; or constants fitted to measured runs."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from oblr_megatron.errors import EXIT_OK, UserError

TABLE_WIDTH = 150
DTYPES = ("bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a published name (Qwen3-8B), or a directory with a config.json")
    what.add_argument("--calibrate", nargs="+", type=Path, metavar="RUN_DIR", help="fit constants to finished runs")
    parser.add_argument("--gpus", type=int, help="GPUs of the run, all nodes together")
    parser.add_argument("--gpu-memory-gb", type=float, metavar="X", help="memory of one; by default --gpu's")
    parser.add_argument("--sequence-length", type=int, metavar="L", help="longest prompt and response together")
    parser.add_argument("--gpu", default="h100", help="h100, h200, a100, b200, ... (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=128, help="a step, Q (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="responses a prompt, G (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="longest prompt (default: an eighth of L)")
    parser.add_argument("--mean-response-tokens", type=int, metavar="N", help="(default: half of the longest response)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the weights (default: %(default)s)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="constants that --calibrate wrote")
    parser.add_argument("--config", type=Path, metavar="CONFIG.toml", help="take the rest of the run from it")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="layouts to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    parser.add_argument("--write", type=Path, metavar="FILE.toml", help="the best layout's sections of a config")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --calibrate writes")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Search and show, or calibrate."""
    if options.calibrate:
        return _calibrate(options)
    from oblr_megatron.planner.search import search
    from oblr_megatron.planner.table import as_json, summary, table, write_toml

    request = request_of(options)
    found = search(request)
    plans = found.plans[: options.top]
    if options.write:
        write_toml(plans[0], request, options.write)
    if options.json:
        print(as_json(plans, found, request))
        return EXIT_OK
    from rich.console import Console

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # a narrower table loses columns
    console.print(table(plans, request))
    console.print(summary(found))
    if options.write:
        console.print(f"wrote the first layout's sections to {options.write}")
    return EXIT_OK


def request_of(options: argparse.Namespace) -> Any:
    """What is asked, checked.

    Raises:
        UserError: an option is missing, or out of bounds.
    """
    from oblr_megatron.model.published import model_config
    from oblr_megatron.observe.performance.hardware import device_named
    from oblr_megatron.planner.constants import Constants, Machine, read_constants
    from oblr_megatron.planner.request import Request

    _check(options)
    device = device_named(options.gpu)
    if options.gpu_memory_gb:
        device = replace(device, memory_gb=options.gpu_memory_gb)
    constants = read_constants(options.calibration) if options.calibration else Constants()
    run_table = _table(options)
    prompt = run_table["data"]["max_prompt_tokens"]
    response = run_table["rollout"]["max_response_tokens"]
    return Request(
        model=options.model,
        hf_config=model_config(options.model),
        gpus=options.gpus,
        memory_bytes=device.memory_bytes,
        machine=Machine(device, constants),
        prompt_tokens=prompt,
        mean_response_tokens=min(response, options.mean_response_tokens or max(1, response // 2)),
        table=run_table,
    )


def _check(options: argparse.Namespace) -> None:
    wanted = ("gpus",) if options.config else ("gpus", "sequence_length")
    for name in wanted:
        if getattr(options, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing", where="plan", fix="give it, e.g. --gpus 64")
    for name in ("gpus", "gpu_memory_gb", "sequence_length", "prompts", "group_size", "prompt_tokens", "top"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} is too small", where="plan", fix="give 1 or more")
    prompt = options.prompt_tokens
    if prompt is not None and options.sequence_length is not None and prompt >= options.sequence_length:
        raise UserError(
            f"--prompt-tokens {prompt} leaves nothing of --sequence-length {options.sequence_length}",
            where="plan",
            fix="lower the first or raise the second",
        )


def _table(options: argparse.Namespace) -> dict[str, Any]:
    """The run that layouts are put into: the config's, or one of the sizes given."""
    from oblr_megatron.planner.request import base_table

    if options.config is None:
        return base_table(
            model=options.model,
            prompts=options.prompts,
            group_size=options.group_size,
            prompt_tokens=options.prompt_tokens or max(1, options.sequence_length // 8),
            sequence_length=options.sequence_length,
            dtype=options.dtype,
        )
    from oblr_megatron.config import load_config

    load_config(options.config)  # says what is wrong with it
    found: dict[str, Any] = tomllib.loads(options.config.read_text(encoding="utf-8"))
    config = load_config(options.config).model_dump(mode="json")
    sizes = {"num_prompts": config["num_prompts"], "group_size": config["group_size"]}
    data = found["data"] | {"max_prompt_tokens": config["data"]["max_prompt_tokens"]}
    longest = options.sequence_length
    response = longest - data["max_prompt_tokens"] if longest else config["rollout"]["max_response_tokens"]
    rollout = found.get("rollout", {}) | {"max_response_tokens": response}
    return found | sizes | {"data": data, "rollout": rollout, "model": found["model"] | {"path": options.model}}


def _calibrate(options: argparse.Namespace) -> int:
    from oblr_megatron.planner.calibration import calibrate

    if options.out is None:
        raise UserError("--out is missing", where="plan --calibrate", fix="name the file to write")
    print(calibrate(options.calibrate, options.gpu, options.out))
    return EXIT_OK
