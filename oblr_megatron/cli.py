"""The `oblr-megatron` command: train, eval, convert, serve, quantize, plan, doctor, study, report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from oblr_megatron.checkpoint.command import add_arguments as add_convert_arguments
from oblr_megatron.doctor import add_arguments as add_doctor_arguments
from oblr_megatron.dryrun.command import add_arguments as add_dry_run_arguments
from oblr_megatron.dryrun.command import dry_run
from oblr_megatron.errors import EXIT_OK, EXIT_RUN, EXIT_USER, RunError, UserError
from oblr_megatron.evaluation.command import add_arguments as add_eval_arguments
from oblr_megatron.planner.command import add_arguments as add_plan_arguments
from oblr_megatron.quantize.command import add_arguments as add_quantize_arguments
from oblr_megatron.rollout.serve import add_arguments as add_serve_arguments
from oblr_megatron.study.command import add_arguments as add_study_arguments

# torch.distributed has no exception of its own for it; the rank that was lost says more than this one can
PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = _parser()
    options = parse(parser, arguments)
    return guarded(lambda: options.function(options))


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with `overrides` on both sides of an option: argparse leaves over those that follow one."""
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def guarded(command: Callable[[], int]) -> int:
    """Run a command; a user's mistake ends in one line and status 2, a failed run in one line and status 1."""
    try:
        return command()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the ranks of a node find the same mistake; one says so
            print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except RunError as error:
        print(f"error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return EXIT_RUN
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in PEER_LOST):
            raise
        reason = str(error).splitlines()[0].split(". ")[0]
        print(f"error: rank {os.environ.get('RANK', '0')}: lost another rank: {reason}", file=sys.stderr)
        return EXIT_RUN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oblr-megatron", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train from a TOML config")
    add_run_arguments(train)
    train.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="ranks on this machine, started by torchrun"
    )
    train.add_argument("--master-port", type=int, metavar="PORT", help="rendezvous port; a free one by default")
    add_dry_run_arguments(train)
    train.set_defaults(function=_train)

    add_eval_arguments(commands.add_parser("eval", help="accuracies of a Hugging Face model on any number of sets"))
    add_convert_arguments(commands.add_parser("convert", help="between Hugging Face directories and checkpoints"))
    add_serve_arguments(commands.add_parser("serve", help="an API server for rollout.servers: stock vLLM, guarded"))

    add_quantize_arguments(commands.add_parser("quantize", help="an FP8 copy of a Hugging Face model, for vLLM"))

    add_plan_arguments(commands.add_parser("plan", help="layouts that fit a model and GPUs, by predicted step time"))

    add_study_arguments(commands.add_parser("study", help="experiments about the algorithm, on models of minutes"))

    add_doctor_arguments(commands.add_parser("doctor", help="what is installed, what is used because of it"))

    report = commands.add_parser("report", help="one self-contained HTML file about a run")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(function=_report)
    return parser


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which run it is, for the launcher and for each of its ranks."""
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of single keys")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest whole checkpoint of run_dir, if there is one"
    )
    samples = parser.add_mutually_exclusive_group()
    parser.add_argument(
        "--save-rollouts", action="store_true", help="write every step's samples and rewards to RUN_DIR/rollouts"
    )
    samples.add_argument("--replay", type=Path, metavar="DIR", help="train from the saved samples in DIR, without vLLM")
    samples.add_argument(
        "--rollout-only", action="store_true", help="sample, judge and save num_steps batches, and train nothing"
    )


def run_overrides(options: argparse.Namespace) -> list[str]:
    """The overrides, with the flags as what they stand for."""
    overrides = list(options.overrides)
    if options.save_rollouts:
        overrides.append("rollout.save=true")
    if options.resume:
        overrides.append("checkpoint.resume=newest")
    if options.rollout_only:
        overrides.append("rollout.only=true")
    if options.replay is not None:
        overrides.append(f"rollout.replay={json.dumps(str(options.replay))}")
    return overrides


def _train(options: argparse.Namespace) -> int:
    from oblr_megatron.checks import check_port
    from oblr_megatron.config import load_config

    overrides = run_overrides(options)
    config = load_config(options.config, overrides)
    if options.dry_run:
        return dry_run(
            config,
            nnodes=options.nnodes,
            per_node=options.nproc_per_node,
            gpu_memory_gb=options.gpu_memory_gb,
        )
    if options.nnodes > 1 or options.gpu_memory_gb is not None:
        raise UserError(
            "--nnodes and --gpu-memory-gb go with --dry-run alone",
            where="command line",
            mend="start a run of several nodes by slurm/",
        )
    if options.nproc_per_node < 1:
        raise UserError(f"--nproc-per-node {options.nproc_per_node} is not a number of ranks", mend="give 1 or more")
    if options.nproc_per_node == 1:
        from oblr_megatron.train import run_training

        return run_training(config)
    from oblr_megatron.preflight import preflight

    preflight(config, options.nproc_per_node)  # before torchrun, so that a mistake starts nothing
    check_devices(options.nproc_per_node)
    rendezvous = ["--standalone"]
    if options.master_port is not None:
        check_port(options.master_port)
        rendezvous = ["--master-port", str(options.master_port)]
    launcher = [sys.executable, "-m", "oblr_megatron.launch", "--nproc-per-node", str(options.nproc_per_node)]
    script = ["-m", "oblr_megatron.train", str(options.config), *overrides]
    return os.execv(sys.executable, [*launcher, *rendezvous, *script])


def check_devices(ranks: int) -> None:
    """Refuse more ranks than this machine has GPUs; a CPU takes any number.

    Raises:
        UserError: naming both numbers.
    """
    import torch

    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and ranks > devices:
        raise UserError(f"{ranks} ranks on {devices} GPUs", where="--nproc-per-node", mend=f"give {devices} or fewer")


def _report(options: argparse.Namespace) -> int:
    from oblr_megatron.report import write_report

    print(write_report(options.run_dir))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
