"""The `oblr-megatron` command: init, train, eval, convert, serve, quantize, plan, study, doctor, status, report.

Imports no torch at load, and none before the arguments, the config and the named files are checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.checkpoint.convert_command import add_arguments as add_convert_arguments
from oblr_megatron.engine.serve_command import add_arguments as add_serve_arguments
from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.evaluation.eval_command import add_arguments as add_eval_arguments
from oblr_megatron.extension import extension
from oblr_megatron.preflight.doctor import add_arguments as add_doctor_arguments
from oblr_megatron.preflight.dry_run_command import add_arguments as add_dry_run_arguments
from oblr_megatron.preflight.dry_run_command import dry_run, dry_run_elsewhere
from oblr_megatron.preflight.init_command import add_arguments as add_init_arguments
from oblr_megatron.runtime.command_line import (
    Parser,
    add_run_arguments,
    count,
    guarded,
    parse,
    port_number,
    run_overrides,
)
from oblr_megatron.runtime.garbage import no_collection
from oblr_megatron.runtime.processes import python_module

if TYPE_CHECKING:
    from oblr_megatron.config import Config

OPTIONAL = {
    "quantize": "write an FP8 copy of a Hugging Face model for vLLM",
    "plan": "list the layouts that fit, by predicted step time",
    "study": "run experiments on the algorithm with tiny models",
}
"""Commands of `extras/` and `studies/`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script; returns the exit status."""

    def command() -> int:
        options = parse(make_parser(), arguments)
        return int(options.function(options))

    return guarded(command)


def make_parser() -> Parser:
    """The parser of all commands; each sets `function`."""
    description = "RL post-training of Qwen3, Qwen2.5 and Llama 3 (OBLR-PO) on megatron-core, with vLLM rollouts"
    parser = Parser(prog="oblr-megatron", description=description)
    parser.add_argument("--version", action=_Version, help="print the versions of this package and its engines")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    add_init_arguments(commands.add_parser("init", help="write a first config for a model directory and a data file"))
    train = commands.add_parser("train", help="train from a TOML config")
    add_run_arguments(train)
    train.add_argument(
        "--nproc-per-node", type=count, default=1, metavar="N", help="ranks on this machine (default: %(default)s)"
    )
    train.add_argument("--master-port", type=port_number, metavar="PORT", help="rendezvous port; a free one by default")
    add_dry_run_arguments(train)
    train.set_defaults(function=_train)

    add_eval_arguments(commands.add_parser("eval", help="measure the accuracy of a model on held-out sets"))
    add_convert_arguments(commands.add_parser("convert", help="convert between Hugging Face models and checkpoints"))
    what = "start a rollout server, for runs with rollout.servers"
    other = "`vllm serve RUN_DIR/hf`, on CPUs `python -m vllm.entrypoints.openai.api_server --model RUN_DIR/hf`"
    limits = f"It answers no completions and no chat; for those start {other}."
    add_serve_arguments(commands.add_parser("serve", help=what, description=f"{what}. {limits}"))
    for name, purpose in OPTIONAL.items():
        _add_optional_arguments(f"oblr-megatron {name}", commands.add_parser(name, help=purpose))
    add_doctor_arguments(commands.add_parser("doctor", help="show packages and hardware, and what a run uses of them"))

    status = commands.add_parser("status", help="print the state and the step of a run")
    status.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run")
    status.set_defaults(function=_status)
    report = commands.add_parser("report", help="write one self-contained HTML file about a run")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not")
    report.set_defaults(function=_report)
    return parser


class _Version(argparse.Action):
    """Prints the installed versions from their metadata, without importing the packages."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from oblr_megatron.checks.packages import installed

        for name, version in installed().items():
            if name in ("oblr-megatron", "megatron-core", "vllm", "torch"):
                print(f"{name} {version or 'not installed'}")
        parser.exit()


def _add_optional_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Accept the arguments of an optional command. If its folder is missing, the command ends with that error."""
    try:
        extension(command)(parser)
    except UserError as error:
        missing = error

        def refuse(_: argparse.Namespace) -> int:
            raise missing

        parser.prefix_chars = "\0"  # take options as arguments too: the error is that the command is missing
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.set_defaults(function=refuse)


def _train(options: argparse.Namespace) -> int:
    from oblr_megatron.config import load_config
    from oblr_megatron.observe.status import finished

    ranks, elsewhere = options.nproc_per_node, options.nnodes is not None or options.gpu_memory_gb is not None
    if elsewhere and not options.dry_run:
        raise UserError(
            "--nnodes and --gpu-memory-gb need --dry-run",
            where="command line",
            fix="start a run on several nodes with the scripts in slurm/",
        )
    overrides = run_overrides(options)
    config = load_config(options.config, overrides)
    if options.dry_run and elsewhere:
        return dry_run_elsewhere(config, options.nnodes or 1, ranks, options.gpu_memory_gb)
    if not options.dry_run and finished(config):
        return EXIT_OK
    _check_first(config, ranks, options.master_port)
    check_devices(ranks)
    if options.dry_run:
        return dry_run(config, ranks)
    if ranks == 1:
        with no_collection():
            from oblr_megatron.step_loop import run_training

        return run_training(config)
    from oblr_megatron.preflight.inputs import preflight

    preflight(config, ranks)  # before torchrun, so that a mistake starts no process
    port = options.master_port
    rendezvous = ["--standalone"] if port is None else ["--master-port", str(port)]
    launcher = [*python_module("oblr_megatron.runtime.launch"), "--nproc-per-node", str(ranks)]
    script = ["-m", "oblr_megatron.step_loop", str(options.config), *overrides]
    return os.execv(sys.executable, [*launcher, *rendezvous, *script])


def _check_first(config: Config, ranks: int, port: int | None) -> None:
    """Run the checks that need neither torch nor rows, so that common mistakes end at once; `preflight` repeats them.

    Raises:
        UserError: the first problem.
    """
    from oblr_megatron.checkpoint.hf_dir import check_hf_dir
    from oblr_megatron.checks.layout import check_port
    from oblr_megatron.checks.run_dir import check_run_dir
    from oblr_megatron.preflight.checklist import Proposed, check
    from oblr_megatron.runtime.run_lock import check_unlocked

    if port is not None:
        check_port(port)
    check_run_dir(config.run_dir, holds_run=config.checkpoint.resume != "none")
    check_unlocked(config.run_dir)
    model = check_hf_dir(config.model.path)
    check(Proposed(config, model.config, ranks, ranks, model=model), "layout", "here", "owner")


def check_devices(ranks: int) -> None:
    """Refuse more ranks than GPUs; a machine without GPUs takes any number.

    Raises:
        UserError: names both numbers.
    """
    import torch

    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and ranks > devices:
        fix = f"give {devices} or fewer, or set the environment variable CUDA_VISIBLE_DEVICES to '' to use the CPU"
        raise UserError(f"{ranks} ranks on {devices} GPUs", where="--nproc-per-node", fix=fix)


def _status(options: argparse.Namespace) -> int:
    from oblr_megatron.observe.status import STATUS_FILE, read_status
    from oblr_megatron.runtime.run_lock import holder

    _, owner = holder(options.run_dir)
    if owner is not None and not (options.run_dir / STATUS_FILE).exists():
        print(f"starting: {owner}")
        return EXIT_OK
    status = read_status(options.run_dir)
    if owner is not None and owner.pid != status.pid and status.state != "running":
        print(f"starting: {owner}; the attempt before: {status}")  # a resumed run that waits for its engines
    else:
        print(status)
    return EXIT_OK


def _report(options: argparse.Namespace) -> int:
    from oblr_megatron.observe.report import write_report

    try:
        print(write_report(options.run_dir))
    except OSError as error:
        fix = "make the directory writable, or copy the run"
        raise UserError(f"cannot write the report: {error.strerror}", where=str(options.run_dir), fix=fix) from error
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
