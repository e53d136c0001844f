"""`oblr-megatron convert to-megatron | to-hf`: the options, what is shown meanwhile, and the lines at the end."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    import torch

    from oblr_megatron.checkpoint.convert import Advance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two commands with their options."""
    directions = parser.add_subparsers(required=True, metavar="DIRECTION")
    to_megatron = directions.add_parser("to-megatron", help="a Hugging Face directory as a torch_dist checkpoint")
    to_megatron.set_defaults(function=_to_megatron)
    to_hf = directions.add_parser("to-hf", help="a torch_dist checkpoint as a Hugging Face directory")
    to_hf.add_argument(
        "--hf-source", type=Path, metavar="DIR", help="take config and tokenizer from here, not from the checkpoint"
    )
    to_hf.add_argument("--max-shard-bytes", type=int, metavar="N", help="of a weight file; 5 GB by default")
    to_hf.set_defaults(function=_to_hf)
    for direction in (to_megatron, to_hf):
        direction.add_argument("source", type=Path, metavar="SRC")
        direction.add_argument("target", type=Path, metavar="DST", help="must not exist")
        direction.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default the source's")
        direction.add_argument(
            "--check", action="store_true", help="load both and compare their logits; takes 12 bytes a parameter"
        )
        direction.add_argument("--prompt", help="text whose logits are compared")


def _to_megatron(options: argparse.Namespace) -> int:
    _prepare(options)
    from oblr_megatron.checkpoint.convert import to_megatron

    with _progress() as advance:
        done = to_megatron(options.source, options.target, _dtype(options), advance)
    if options.check:
        _check(options, checkpoint=options.target, hf_dir=options.source, dtype=done.dtype)
    print(done)
    return EXIT_OK


def _to_hf(options: argparse.Namespace) -> int:
    _prepare(options)
    from oblr_megatron.checkpoint.convert import newest, to_hf
    from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES

    if options.max_shard_bytes is not None and options.max_shard_bytes < 1:
        raise UserError(f"{options.max_shard_bytes} bytes is no size of a file", where="--max-shard-bytes")
    source = newest(options.source)  # once: a run may save another one meanwhile
    with _progress() as advance:
        done = to_hf(
            source,
            options.target,
            _dtype(options),
            hf_source=options.hf_source,
            max_shard_bytes=options.max_shard_bytes or MAX_SHARD_BYTES,
            advance=advance,
        )
    if options.check:
        _check(options, checkpoint=source, hf_dir=options.target, dtype=done.dtype)
    print(done)
    return EXIT_OK


def _prepare(options: argparse.Namespace) -> None:
    """Before anything is imported that takes long, and that tells of every library it does without."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    if options.prompt is not None and not options.check:
        raise UserError("--prompt is what --check compares", where="--prompt", fix="add --check, or leave it out")


def _check(options: argparse.Namespace, *, checkpoint: Path, hf_dir: Path, dtype: torch.dtype) -> None:
    from transformers.utils.logging import disable_progress_bar

    from oblr_megatron.checkpoint.compare import PROMPT, check_logits

    disable_progress_bar()
    print(f"check: {check_logits(checkpoint, hf_dir, dtype, options.prompt or PROMPT)}")


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    from oblr_megatron.model.precision import DTYPES

    return DTYPES[options.dtype] if options.dtype else None


@contextmanager
def _progress() -> Iterator[Advance]:
    """A bar with gigabytes and speed on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
