"""One call of `oblr-megatron eval`: check the input, sample and score, write metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checkpoint.other_formats import MERGE
from oblr_megatron.checks.layout import num_experts
from oblr_megatron.checks.lengths import check_positions
from oblr_megatron.checks.machine import check_rank, check_slot
from oblr_megatron.config import with_own_scores
from oblr_megatron.data.sources import kind_of
from oblr_megatron.environments.registry import check_environment
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.evaluation.answers import evaluate
from oblr_megatron.evaluation.items import Item, Sink, append, items_path
from oblr_megatron.evaluation.setup import check_engine, config_of, load_sets, named_sets, opened, warn_of_golds
from oblr_megatron.evaluation.summary import SetReport
from oblr_megatron.metrics import write_whole
from oblr_megatron.observe.console import progress
from oblr_megatron.rewards.registry import check_reward, check_rows
from oblr_megatron.runtime.run_lock import run_lock

if TYPE_CHECKING:
    import argparse

    from oblr_megatron.checkpoint.peft_dir import AdapterDir
    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A checked evaluation."""

    model: HFDir
    adapter: AdapterDir | None
    config: Config
    sets: dict[str, list[Prompt]]
    out: Path | None
    json: Path | None

    @property
    def k(self) -> int:
        """Sampled responses per prompt."""
        return self.config.evaluate.samples_per_prompt


def check(options: argparse.Namespace) -> EvalTask:
    """Check the input before an engine starts. Creates OUT.

    Raises:
        UserError: the first problem found.
    """
    model = check_hf_dir(options.model, quantized=True)
    adapter = None
    if options.adapter is not None:
        from oblr_megatron.checkpoint.peft_dir import check_adapter_dir  # imports torch

        adapter = check_adapter_dir(options.adapter, model)
    if adapter is not None and num_experts(model.config):
        raise UserError("engines take no adapters of a mixture", where=str(options.adapter), fix=MERGE)
    if adapter is not None:
        check_rank(adapter.shape.rank, where=str(options.adapter), fix=MERGE)
    config = config_of(options, model, {} if options.k is None else {"evaluate.samples_per_prompt": options.k})
    check_positions(config, model.config)
    sources = named_sets(options.data, "--data") if options.data else config.evaluate.data
    if not sources:
        raise UserError("no data set", where="--data", fix="give one, or a --config with evaluate.data")
    config = with_own_scores(config, sources.values())
    check_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
    check_rows(config.reward, sources.values())
    check_environment(config)
    file = options.json
    if file is not None:
        file = file.resolve()  # it is replaced as a whole, and a link stays
        if (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK | os.X_OK):
            raise UserError("cannot write this file", where=str(options.json), fix="give another --json file")
    for source in sources.values():
        kind_of(source)

    import torch  # a common mistake ends before the seconds that this takes

    check_engine(config, model)
    if adapter is not None:
        fix = f"add rollout.dtype=bfloat16, or {MERGE}"
        check_slot(config.engine_dtype, on_gpu=torch.cuda.is_available(), where="--adapter", fix=fix)
    tokenizer = model.tokenizer()
    sets = load_sets(sources, config, tokenizer)
    warn_of_golds(sets, config, tokenizer)
    if options.out is not None:
        _create(options.out)
    return EvalTask(model, adapter, config, sets, options.out, file)


def _create(out: Path) -> None:
    """Create OUT, and refuse one that holds something.

    Raises:
        UserError: names the obstacle.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = any(out.iterdir())
    except OSError as error:
        what = f"cannot write this directory: {error.strerror}"
        raise UserError(what, where=str(out), fix="give a writable --out") from error
    if held:
        raise UserError("the directory holds something", where=str(out), fix="give a new or an empty --out")


def run(task: EvalTask) -> list[SetReport]:
    """Sample the responses of each set, print its line, and write the metrics.

    Raises:
        UserError: another evaluation writes into OUT; its first line comes minutes after its start.
        RunError: an engine failed, the reward failed for a whole block, or a file cannot be written.
    """
    reports = []
    alone = nullcontext() if task.out is None else run_lock(task.out)
    with alone, opened(task.config, task.adapter) as (engines, reward):
        for name, prompts in task.sets.items():
            with progress(name, len(prompts) * (1 + task.k)) as advance:
                sink = _sink(task.out, name, advance)
                grades = evaluate(name, engines, prompts, reward, task.config, sink=sink, strict=True)
            reports.append(SetReport.of(name, grades))
            print(reports[-1].line(), flush=True)
            _write_metrics(task, reports)
    return reports


def _sink(out: Path | None, name: str, advance: Callable[[int], None]) -> Sink:
    """A function that appends a block to its file and advances the progress bar."""

    def append_block(first: int, items: Sequence[Item]) -> None:
        if out is not None:
            try:
                append(items_path(out, name), items)
            except OSError as error:
                raise RunError(f"cannot write to {out}: {error.strerror}") from error
        advance(len(items))

    return append_block


def _write_metrics(task: EvalTask, reports: Sequence[SetReport]) -> None:
    """Write the metrics of all finished sets as JSON.

    Raises:
        RunError: a file cannot be written.
    """
    sets = {report.name: report.record() for report in reports}
    adapter = {} if task.adapter is None else {"adapter": str(task.adapter.path)}
    text = json.dumps({"model": str(task.model.path), **adapter, "k": task.k, "sets": sets}, indent=2) + "\n"
    try:
        for path in (task.json, task.out and task.out / "figures.json"):
            if path is not None:
                write_whole(path, text)
    except OSError as error:
        raise RunError(f"cannot write the metrics: {error}") from error
