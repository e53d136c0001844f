"""Shared parts of all commands: parser, arguments of a run, overrides, exit statuses. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from oblr_megatron.errors import EXIT_RUN, EXIT_SIGNAL, EXIT_USER, NO_SPACE, RunError, UserError
from oblr_megatron.runtime.processes import launched
from oblr_megatron.runtime.streams import outlast_readers
from oblr_megatron.runtime.temporary import own_tmpdir

PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|Connection (?:timed out|refused)|Broken pipe|No route to host"
    r"|Network is unreachable|Timed out waiting (?P<ms>\d+)ms"
)
"""Messages of a lost peer; torch.distributed has no exception class for it. The lost rank itself says more."""
ADDRESS = re.compile(r"\[(?:::ffff:)?([\da-fA-F.:]+)\]:\d+")  # in them, where gloo knows it
OWN_PACKAGES = ("oblr_megatron", "studies")
LARGEST = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, without the usage text; its subcommands are such parsers, too."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always.
        """
        raise UserError(message, where="command line", fix=f"see `{self.prog} --help`")


def count(text: str) -> int:
    """An option's type: a whole number of 1 or more.

    >>> count("8")
    8
    """
    return whole(text, 1, LARGEST)


def whole(text: str, least: int, most: int) -> int:
    """An option's value: a whole number from `least` to `most`, decimal digits only."""
    if not text.isdecimal() or not least <= int(text[:20]) <= most:
        small = most == LARGEST and not (text.isdecimal() and int(text[:20]) > most)
        bounds = f"of {least} or more" if small else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
    return int(text)


def port_number(text: str) -> int:
    """An option's type: a port."""
    return whole(text, 1, 2**16 - 1)


def amount(text: str) -> float:
    """An option's type: a number above 0, and at most LARGEST.

    >>> amount("79.5")
    79.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most {LARGEST}")
    return value


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; `overrides` may stand before and after an option (argparse alone drops the latter)."""
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        of_command = " ".join(filter(None, (parser.prog, getattr(options, "command", ""))))
        what = f"unrecognized arguments: {' '.join(rest)}"
        raise UserError(what, where="command line", fix=f"see `{of_command} --help`")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def guarded(command: Callable[[], int]) -> int:
    """Run a command. A user's mistake ends in one line and status 2, a failed run in one line and status 1.

    A missing package is a mistake too, for instance because another environment is active. So is a file without
    permission: pathlib's exists, is_file and is_dir raise where a directory may not be searched. For such a file a rank
    keeps the traceback, because its launcher has checked all paths.

    Temporary files of the command are removed at its end. Its streams are those of `outlast_readers`.
    """
    outlast_readers()
    try:
        with own_tmpdir():
            return _with_packages(command)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a node find the same mistake; one prints it
            print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt as error:
        name = _signal_of(error)
        if not launched():  # the launcher has a line of its own
            print(f"error: ended by {name}", file=sys.stderr)
        return EXIT_SIGNAL + signal.Signals[name]
    except (RuntimeError, OSError) as error:
        if isinstance(error, PermissionError) and error.filename is not None and not launched():
            fix = "give yourself access to it, or choose another path"
            print(f"error: {UserError('no permission', where=str(error.filename), fix=fix)}", file=sys.stderr)
            return EXIT_USER
        reason = reason_of(error)
        if reason is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0" or not getattr(error, "raised_on_all_ranks", False):
            rank = f"rank {os.environ.get('RANK', '0')}"
            said = "" if reason.startswith(f"{rank} ") else f"{rank}: "
            print(f"error: {said}{reason}", file=sys.stderr)
        return EXIT_RUN


def _with_packages(command: Callable[[], int]) -> int:
    try:
        return command()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", *OWN_PACKAGES):
            raise
        fix = "activate the environment of `make env`, or run pip install -e '.[cpu]' (or '.[gpu]') in a clone"
        raise UserError(f"the package {missing} is not installed", where=sys.executable, fix=fix) from error


def _signal_of(error: KeyboardInterrupt) -> str:
    """The name of the signal; Python itself raises the exception without one."""
    return str(error) or signal.SIGINT.name


def reason_of(error: BaseException) -> str | None:
    """Why a run failed, as one sentence; None for a bug, which needs its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return _signal_of(error)
    if isinstance(error, (UserError, RunError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        fix = "free space on its disk, or raise the quota"
        return f"cannot write {error.filename or 'a file'}: {error.strerror}. Fix: {fix}"
    lost = PEER_LOST.search(str(error)) if isinstance(error, RuntimeError) else None
    if lost is None:
        return _out_of_memory(error)
    if lost["ms"]:
        return f"waited {int(lost['ms']) / 1000:g} s for another rank and gave up (parallel.distributed_timeout_s)"
    address = ADDRESS.search(str(error))
    return f"lost another rank{f' at {address[1]}' if address else ''}: {lost[0]}"


def _out_of_memory(error: BaseException) -> str | None:
    """The reason, if a GPU's memory was not enough."""
    if type(error).__name__ != "OutOfMemoryError":  # torch's, which this module does not import
        return None
    fix = "end other processes on the GPU, or lower parallel.micro_batch_tokens or rollout.gpu_memory_utilization"
    return f"{str(error).splitlines()[0].rstrip('. ')}. Fix: {fix}"


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that define a run, for the launcher and for its ranks."""
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of single keys")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest complete checkpoint of run_dir; without one from checkpoint.resume, if it is set; "
        "with rollout.only after the last saved step",
    )
    samples = parser.add_mutually_exclusive_group()
    parser.add_argument(
        "--save-rollouts", action="store_true", help="write every step's samples and rewards to RUN_DIR/rollouts"
    )
    samples.add_argument("--replay", type=Path, metavar="DIR", help="train from the saved samples in DIR, without vLLM")
    samples.add_argument(
        "--rollout-only", action="store_true", help="sample, score and save num_steps batches without training"
    )


def run_overrides(options: argparse.Namespace) -> list[str]:
    """The overrides, including those that the flags stand for.

    Raises:
        UserError: with --resume, the config cannot be read, or an override is malformed.
    """
    overrides = list(options.overrides)
    if options.save_rollouts:
        overrides.append("rollout.save=true")
    if options.resume and not _names_checkpoint(options.config, overrides):
        overrides.append("checkpoint.resume=newest")
    if options.rollout_only:
        overrides.append("rollout.only=true")
    if options.replay is not None:
        path = json.dumps(str(options.replay.absolute()), ensure_ascii=False)  # TOML has no surrogates
        overrides.append(f"rollout.replay={path}")  # a plain `none` would unset it
    return overrides


def _names_checkpoint(config: Path, overrides: Sequence[str]) -> bool:
    """Whether checkpoint.resume is set already. A path must stay: job scripts pass --resume to every run.

    With a path, too, a run first looks for checkpoints of its own (checkpoint/resume.py).
    """
    from oblr_megatron.config.checks import apply_override
    from oblr_megatron.config.run import read_table

    table = read_table(config)
    for override in overrides:
        apply_override(table, override)
    section = table.get("checkpoint")
    return isinstance(section, dict) and section.get("resume", "none") != "none"
