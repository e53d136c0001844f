"""The command `oblr-megatron convert to-megatron | to-hf`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.runtime.command_line import whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from oblr_megatron.checkpoint.convert import Advance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two directions with their options."""
    directions = parser.add_subparsers(required=True, metavar="DIRECTION")
    to_megatron = directions.add_parser(
        "to-megatron", help="Hugging Face directory, or adapter with its base, to torch_dist checkpoint"
    )
    to_megatron.set_defaults(function=_to_megatron)
    to_hf = directions.add_parser(
        "to-hf", help="torch_dist checkpoint, or adapter with its base, to Hugging Face directory"
    )
    to_hf.add_argument(
        "--hf-source", type=Path, metavar="DIR", help="directory with config and tokenizer, if SRC has none"
    )
    to_hf.add_argument(
        "--max-shard-bytes",
        type=lambda text: whole(text, 1, 2**63 - 1),
        metavar="N",
        help="largest weight file in bytes; 5 GB by default",
    )
    to_hf.set_defaults(function=_to_hf)
    for direction in (to_megatron, to_hf):
        direction.add_argument("source", type=Path, metavar="SRC", help="directory to read")
        direction.add_argument(
            "--base", type=Path, metavar="DIR", help="base model; SRC is then a LoRA adapter (PEFT), which is merged"
        )
        direction.add_argument("target", type=Path, metavar="DST", help="directory to write; absent or empty")
        direction.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default the source's")
        direction.add_argument(
            "--check", action="store_true", help="load both and compare their logits; takes 12 bytes per parameter"
        )
        direction.add_argument("--prompt", help="text for --check")


def _to_megatron(options: argparse.Namespace) -> int:
    _prepare(options)
    from oblr_megatron.checkpoint.convert import to_megatron
    from oblr_megatron.model.precision import DTYPES

    ids = _prompt(options, options.source)
    with _progress() as advance:
        done = to_megatron(options.source, options.target, DTYPES.get(options.dtype), advance, base=options.base)
    if ids is not None:
        _check(ids, checkpoint=options.target, hf_dir=options.source, dtype=done.dtype)
    print(done)
    return EXIT_OK


def _to_hf(options: argparse.Namespace) -> int:
    _prepare(options)
    from oblr_megatron.checkpoint.convert import merged_to_hf, newest, to_hf
    from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES
    from oblr_megatron.checkpoint.saver import HF
    from oblr_megatron.model.precision import DTYPES

    if options.base is not None:
        size = options.max_shard_bytes or MAX_SHARD_BYTES
        print(merged_to_hf(options.source, options.base, options.target, DTYPES.get(options.dtype), size))
        return EXIT_OK
    source = newest(options.source)  # resolved once, because a run may save another one meanwhile
    ids = _prompt(options, options.hf_source or source / HF)
    with _progress() as advance:
        done = to_hf(
            source,
            options.target,
            DTYPES.get(options.dtype),
            hf_source=options.hf_source,
            max_shard_bytes=options.max_shard_bytes or MAX_SHARD_BYTES,
            advance=advance,
        )
    if ids is not None:
        _check(ids, checkpoint=source, hf_dir=options.target, dtype=done.dtype)
    print(done)
    return EXIT_OK


def _prepare(options: argparse.Namespace) -> None:
    """Check the options before slow imports."""
    from oblr_megatron.checkpoint.store import check_absent

    if options.prompt is not None and not options.check:
        raise UserError("--prompt is given without --check", where="--prompt", fix="add --check, or remove --prompt")
    if options.base is not None and options.check:
        what = "--check compares a checkpoint with its source, and an adapter with its base is merged on the way"
        raise UserError(what, where="--check", fix="leave it out, or merge first (to-hf) and convert that directory")
    if options.base is not None and getattr(options, "hf_source", None) is not None:
        what = "--hf-source has no effect with --base, which has config and tokenizer"
        raise UserError(what, where="--hf-source", fix="leave it out")
    if not options.source.is_dir():
        what = "the source is a file" if options.source.exists() else "the source does not exist"
        raise UserError(what, where=str(options.source), fix="give an existing directory")
    check_absent(options.target)


def _prompt(options: argparse.Namespace, files: Path) -> Tensor | None:
    """The prompt's tokens for --check, read before anything is written. Files that are absent are refused later."""
    from oblr_megatron.checkpoint.compare import PROMPT, prompt_ids

    if not _is_text(options.prompt or ""):
        raise UserError("the prompt is not UTF-8", where="--prompt", fix="give text in UTF-8")
    return prompt_ids(files, options.prompt or PROMPT) if options.check and files.is_dir() else None


def _is_text(value: str) -> bool:
    """Whether it has no bytes that are not UTF-8, which Python keeps in arguments as halves of surrogate pairs."""
    return value.encode("utf-8", "ignore").decode() == value


def _check(ids: Tensor, *, checkpoint: Path, hf_dir: Path, dtype: torch.dtype) -> None:
    from transformers.utils.logging import disable_progress_bar

    from oblr_megatron.checkpoint.compare import check_logits

    disable_progress_bar()
    print(f"check: {check_logits(checkpoint, hf_dir, dtype, ids)}")


@contextmanager
def _progress() -> Iterator[Advance]:
    """A progress bar with bytes and speed if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
