"""The options of `oblr-megatron quantize`, and all checks that need no model weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.checks.packages import installed_version
from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.runtime.command_line import count

if TYPE_CHECKING:
    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.extras.quantize.pipeline import QuantizeTask

MODELOPT = "0.47"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("source", type=Path, metavar="SRC", help="Hugging Face directory")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write; absent or empty")
    parser.add_argument("--format", default="fp8", choices=["fp8"], help="format of the weights (default: %(default)s)")
    parser.add_argument(
        "--calibration", metavar="[NAME=]PATH", help="calibration rows; by default the config's data.train"
    )
    parser.add_argument("--num-samples", type=count, default=512, metavar="N", help="number of calibration rows")
    parser.add_argument(
        "--max-tokens", type=count, metavar="L", help="skip longer rows; by default data.max_prompt_tokens"
    )
    parser.add_argument(
        "--accuracy", nargs="+", default=[], metavar="[NAME=]PATH", help="sets to answer before and after"
    )
    parser.add_argument(
        "--accuracy-engine",
        choices=["auto", "vllm", "transformers"],
        default="auto",
        help="engine for --accuracy; auto: vLLM on a GPU with FP8",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file or config.json of a run: template, reward, sampling"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of config keys")
    parser.set_defaults(function=quantize)


def quantize(options: argparse.Namespace) -> int:
    """Write DST and print the report.

    Raises:
        UserError: wrong arguments, model or data; nothing was written.
        RunError: calibration, writing or answering failed; nothing was written.
    """
    from oblr_megatron.checkpoint.hf_dir import check_hf_dir
    from oblr_megatron.checkpoint.store import check_absent

    if options.calibration is None and options.config is None:
        raise UserError("no calibration rows", where="--calibration", fix="give a data set, or a run's --config")
    source = check_hf_dir(options.source)
    check_absent(options.target)
    _check_modelopt()
    task = _check_data(options, source)
    from rich.console import Console

    from oblr_megatron.extras.quantize.pipeline import run

    Console().print(run(task).table())
    return EXIT_OK


def _check_modelopt() -> None:
    """Check that nvidia-modelopt is installed in the version that fp8.py supports."""
    installed = installed_version("nvidia-modelopt")
    if installed is None or not installed.startswith(f"{MODELOPT}."):
        state = "not installed" if installed is None else f"version {installed}"
        raise UserError(f"nvidia-modelopt is {state}", fix=f'pip install "nvidia-modelopt=={MODELOPT}.*"')


def _check_data(options: argparse.Namespace, source: HFDir) -> QuantizeTask:
    from oblr_megatron.checkpoint.store import check_space
    from oblr_megatron.checks.lengths import check_positions
    from oblr_megatron.config import with_own_scores
    from oblr_megatron.data.sources import named_source
    from oblr_megatron.environments.registry import check_environment
    from oblr_megatron.evaluation.setup import check_engine, config_of, load_sets, named_sets, warn_of_golds
    from oblr_megatron.extras.quantize.accuracy import vllm_computes_fp8
    from oblr_megatron.extras.quantize.calibration import read_rows
    from oblr_megatron.extras.quantize.pipeline import QuantizeTask
    from oblr_megatron.rewards.registry import check_reward, check_rows

    calibration = named_source(options.calibration)[1] if options.calibration else None
    config = config_of(options, source, {"data.train": calibration.path} if calibration else {})
    check_positions(config, source.config)
    changes: dict[str, object] = {} if calibration is None else {"train": (calibration,)}
    if options.max_tokens is not None:
        changes["max_prompt_tokens"] = options.max_tokens
    tokenizer = source.tokenizer()
    rows = read_rows(config.data.model_copy(update=changes), tokenizer, options.num_samples)
    sources = named_sets(options.accuracy, "--accuracy")
    if sources:
        config = with_own_scores(config, sources.values())
        check_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
        check_rows(config.reward, sources.values())
    sets = load_sets(sources, config, tokenizer)
    warn_of_golds(sets, config, tokenizer)
    check_space(options.target.parent, source.num_bytes)
    engine = options.accuracy_engine
    if engine == "auto":
        engine = "vllm" if vllm_computes_fp8() else "transformers"
    if sets and engine == "transformers" and config.rollout.environment.function:
        what = "transformers plays no episodes of rollout.environment"
        raise UserError(what, where="--accuracy", fix="add --accuracy-engine vllm, or leave out --accuracy")
    if sets and engine == "vllm":
        check_environment(config)
        check_engine(config, source)
    return QuantizeTask(source, options.target, options.format, rows, config, tokenizer, sets, engine)
