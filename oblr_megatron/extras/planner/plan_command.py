"""`oblr-megatron plan`: layouts ranked by predicted step time, or a fit to measured runs. Imports no torch."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.runtime.command_line import amount, count

TABLE_WIDTH = 150
OVERLAPS = ("stream", "one_step")
DTYPES = ("bfloat16", "float32")  # the first is the default
PROMPTS, GROUP_SIZE = 128, 8  # defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a published name (Qwen3-8B) or a directory with a config.json")
    what.add_argument("--calibrate", nargs="+", type=Path, metavar="RUN_DIR", help="fit constants to finished runs")
    parser.add_argument("--gpus", type=count, metavar="N", help="GPUs on all nodes together")
    parser.add_argument("--gpu-memory-gb", type=amount, metavar="X", help="memory of a GPU (default: that of --gpu)")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="GPUs of a node (default: those of --gpu's)")
    parser.add_argument("--sequence-length", type=count, metavar="L", help="longest prompt and response together")
    parser.add_argument("--gpu", default="h100", help="h100, h200, a100, b200, ... (default: %(default)s)")
    parser.add_argument("--prompts", type=count, help=f"prompts per step, Q (default: {PROMPTS})")
    parser.add_argument("--group-size", type=count, help=f"responses per prompt, G (default: {GROUP_SIZE})")
    parser.add_argument("--prompt-tokens", type=count, metavar="N", help="longest prompt (default: an eighth of L)")
    parser.add_argument("--mean-response-tokens", type=count, metavar="N", help="mean (default: half the longest)")
    parser.add_argument(
        "--speculation-acceptance",
        type=_chance,
        default=0.0,
        metavar="P",
        help="chance that a draft token is right while the longest response is sampled (default: no speculation)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help=f"weights (default: {DTYPES[0]})")
    parser.add_argument(
        "--overlap", choices=OVERLAPS, help="engines on GPUs of their own, with this rollout.overlap (docs/overlap.md)"
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="read constants from a file of --calibrate")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG",
        help="take all settings but the given ones from this config.toml or config.json",
    )
    parser.add_argument("--top", type=count, default=10, metavar="K", help="layouts to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    parser.add_argument("--write", type=Path, metavar="FILE.toml", help="new file for the sections of the best layout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file of --calibrate; must not exist")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Search and print the layouts, or calibrate.

    Raises:
        UserError: an option is missing or out of bounds, or the file to write exists; nothing was searched.
    """
    if options.calibrate:
        return _calibrate(options)
    if options.out:
        raise UserError("--out is the file of --calibrate", where="plan --model", fix="use --write, or redirect --json")
    if options.write:
        _check_new(options.write, "--write")
    request = request_of(options)  # before torch is imported
    from oblr_megatron.extras.planner.search import best_split, search
    from oblr_megatron.extras.planner.table import as_json, summary, table, write_toml

    if options.overlap:
        result, request = best_split(request, options.overlap)
    else:
        result = search(request)
    plans = result.plans[: options.top]
    if options.write:
        write_toml(plans[0], request, options.write)
    if options.json:
        print(as_json(plans, result, request))
        return EXIT_OK
    from rich.console import Console

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # a narrower table loses columns
    console.print(table(plans, request))
    console.print(summary(result))
    if options.write:
        console.print(f"wrote the config sections of the first layout to {options.write}")
    return EXIT_OK


def request_of(options: argparse.Namespace) -> Any:
    """The checked request.

    Raises:
        UserError: an option is missing or out of bounds.
    """
    from oblr_megatron.checkpoint.hf_dir import model_config
    from oblr_megatron.extras.planner.constants import Constants, PlannerMachine, read_constants
    from oblr_megatron.extras.planner.setting import Request
    from oblr_megatron.observe.performance.hardware import device_named

    _check(options)
    device = device_named(options.gpu)
    given = {"memory_gb": options.gpu_memory_gb, "gpus_per_node": options.gpus_per_node}
    device = replace(device, **{name: value for name, value in given.items() if value})
    constants = read_constants(options.calibration) if options.calibration else Constants()
    run_table = _table(options)
    response = run_table["rollout"]["max_response_tokens"]
    if options.mean_response_tokens and options.mean_response_tokens > response:
        what = f"--mean-response-tokens {options.mean_response_tokens} is above the longest response, {response}"
        raise UserError(what, where="command line", fix="lower it, or raise --sequence-length")
    return Request(
        model=options.model,
        hf_config=model_config(options.model),
        gpus=options.gpus,
        machine=PlannerMachine(device, constants),
        mean_response_tokens=options.mean_response_tokens or max(1, response // 2),
        table=run_table,
        speculation_acceptance=options.speculation_acceptance,
    )


def _check_new(file: Path, option: str) -> None:
    """Refuse a file that cannot be made, before a search of minutes. Directories on the way to it will be made.

    Raises:
        UserError: something has this name, or no file can be written there.
    """
    if os.path.lexists(file):
        reason = "the file exists" if not file.is_dir() else "it is a directory"
    else:
        nearest = next(parent for parent in file.absolute().parents if os.path.exists(parent))
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return
        reason = f"{nearest} is not a directory that can be written"
    raise UserError(f"cannot write {option}: {reason}", where=str(file), fix="name a new file in a writable directory")


def _chance(text: str) -> float:
    """An option's type: a probability below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def _check(options: argparse.Namespace) -> None:
    lengths = {} if options.config else {"sequence_length": "--sequence-length 8192"}
    for name, example in {"gpus": "--gpus 64", **lengths}.items():
        if getattr(options, name) is None:
            raise UserError(f"{example.split()[0]} is missing", where="plan", fix=f"add it, e.g. {example}")
    prompt = options.prompt_tokens
    if prompt is not None and options.sequence_length is not None and prompt >= options.sequence_length:
        raise UserError(
            f"--prompt-tokens {prompt} leaves no response within --sequence-length {options.sequence_length}",
            where="plan",
            fix="lower the first or raise the second",
        )


def _table(options: argparse.Namespace) -> dict[str, Any]:
    """The run to lay out, as a table: from --config with the given sizes, or of the given sizes."""
    from oblr_megatron.extras.planner.setting import base_table

    if options.config is None:
        return base_table(
            model=options.model,
            prompts=options.prompts or PROMPTS,
            group_size=options.group_size or GROUP_SIZE,
            prompt_tokens=options.prompt_tokens or max(1, options.sequence_length // 8),
            sequence_length=options.sequence_length,
            dtype=options.dtype or DTYPES[0],
        )
    from oblr_megatron.config.run import parse_config, read_table

    settings = read_table(options.config)
    config = parse_config(settings, str(options.config))
    rollout = config.rollout
    if rollout.overlap != "none" or rollout.servers or rollout.replay is not None:
        what = "the config has rollout.overlap, servers or replay, and the planner divides the GPUs itself"
        fix = "remove these keys, and ask for engines on GPUs of their own with --overlap"
        raise UserError(what, where=str(options.config), fix=fix)
    prompt, longest = options.prompt_tokens or config.data.max_prompt_tokens, options.sequence_length
    if longest is not None and longest <= prompt:
        what = f"--sequence-length {longest} leaves no response after {prompt} tokens of prompt"
        raise UserError(what, where="plan", fix="raise it, or lower --prompt-tokens")
    response = longest - prompt if longest else config.rollout.max_response_tokens
    return settings | {
        "num_prompts": options.prompts or config.num_prompts,
        "group_size": options.group_size or config.group_size,
        "data": settings["data"] | {"max_prompt_tokens": prompt},
        "rollout": settings.get("rollout", {}) | {"max_response_tokens": response},
        "model": settings["model"] | {"path": options.model, "dtype": options.dtype or config.model.dtype},
    }


def _calibrate(options: argparse.Namespace) -> int:
    from oblr_megatron.extras.planner.calibration import calibrate

    if options.out is None:
        raise UserError("--out is missing", where="plan --calibrate", fix="name the file to write")
    if options.write or options.json:
        raise UserError("--write and --json are of layouts", where="plan --calibrate", fix="leave them out")
    _check_new(options.out, "--out")
    print(calibrate(options.calibrate, options.gpu, options.out))
    return EXIT_OK
