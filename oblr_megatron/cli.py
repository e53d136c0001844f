"""The `oblr-megatron` command: train, eval, convert, serve, quantize, plan, doctor, study, report. Imports no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from oblr_megatron.checkpoint.convert_command import add_arguments as add_convert_arguments
from oblr_megatron.doctor import add_arguments as add_doctor_arguments
from oblr_megatron.dryrun.dry_run_command import add_arguments as add_dry_run_arguments
from oblr_megatron.dryrun.dry_run_command import dry_run
from oblr_megatron.engine.serve_command import add_arguments as add_serve_arguments
from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.evaluation.eval_command import add_arguments as add_eval_arguments
from oblr_megatron.planner.plan_command import add_arguments as add_plan_arguments
from oblr_megatron.quantize.quantize_command import add_arguments as add_quantize_arguments
from oblr_megatron.runtime.command_line import add_run_arguments, guarded, parse, run_overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script; returns the exit status."""
    parser = _parser()
    options = parse(parser, arguments)
    return guarded(lambda: options.function(options))


def _parser() -> argparse.ArgumentParser:
    description = "RL post-training of Qwen3 (OBLR-PO) on megatron-core, with vLLM rollouts"
    parser = argparse.ArgumentParser(prog="oblr-megatron", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train from a TOML config")
    add_run_arguments(train)
    train.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="ranks on this machine, started by torchrun"
    )
    train.add_argument("--master-port", type=int, metavar="PORT", help="rendezvous port; a free one by default")
    add_dry_run_arguments(train)
    train.set_defaults(function=_train)

    add_eval_arguments(commands.add_parser("eval", help="measure the accuracy of a model on held-out sets"))
    add_convert_arguments(commands.add_parser("convert", help="convert between Hugging Face models and checkpoints"))
    add_serve_arguments(commands.add_parser("serve", help="start a vLLM API server for rollout.servers"))
    add_quantize_arguments(commands.add_parser("quantize", help="write an FP8 copy of a Hugging Face model for vLLM"))
    add_plan_arguments(commands.add_parser("plan", help="list the layouts that fit, by predicted step time"))
    _add_study_arguments(commands.add_parser("study", help="run experiments on the algorithm with tiny models"))
    add_doctor_arguments(commands.add_parser("doctor", help="show what is installed and what a run uses because of it"))

    report = commands.add_parser("report", help="write one self-contained HTML file about a run")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(function=_report)
    return parser


def _add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the subcommands from the `studies` package, which lies next to this one and may be missing."""
    try:
        from studies.study_command import add_arguments
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("studies"):
            raise
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.set_defaults(function=_no_studies)
    else:
        add_arguments(parser)


def _no_studies(options: argparse.Namespace) -> int:
    raise UserError(
        "the studies package cannot be imported",
        where="oblr-megatron study",
        fix="run `pip install -e . --no-deps` in the repository",
    )


def _train(options: argparse.Namespace) -> int:
    from oblr_megatron.checks.layout import check_port
    from oblr_megatron.config import load_config

    overrides = run_overrides(options)
    config = load_config(options.config, overrides)
    if options.dry_run:
        return dry_run(
            config, nnodes=options.nnodes, per_node=options.nproc_per_node, gpu_memory_gb=options.gpu_memory_gb
        )
    if options.nnodes > 1 or options.gpu_memory_gb is not None:
        raise UserError(
            "--nnodes and --gpu-memory-gb need --dry-run",
            where="command line",
            fix="start a run on several nodes with the scripts in slurm/",
        )
    if options.nproc_per_node < 1:
        raise UserError(f"--nproc-per-node {options.nproc_per_node} is below 1", fix="give 1 or more")
    if options.nproc_per_node == 1:
        from oblr_megatron.train import run_training

        return run_training(config)
    from oblr_megatron.preflight import preflight

    preflight(config, options.nproc_per_node)  # before torchrun, so that a mistake starts no process
    check_devices(options.nproc_per_node)
    rendezvous = ["--standalone"]
    if options.master_port is not None:
        check_port(options.master_port)
        rendezvous = ["--master-port", str(options.master_port)]
    launcher = [sys.executable, "-m", "oblr_megatron.runtime.launch", "--nproc-per-node", str(options.nproc_per_node)]
    script = ["-m", "oblr_megatron.train", str(options.config), *overrides]
    return os.execv(sys.executable, [*launcher, *rendezvous, *script])


def check_devices(ranks: int) -> None:
    """Refuse more ranks than GPUs; a machine without GPUs takes any number.

    Raises:
        UserError: names both numbers.
    """
    import torch

    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and ranks > devices:
        raise UserError(f"{ranks} ranks on {devices} GPUs", where="--nproc-per-node", fix=f"give {devices} or fewer")


def _report(options: argparse.Namespace) -> int:
    from oblr_megatron.observe.report import write_report

    print(write_report(options.run_dir))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
