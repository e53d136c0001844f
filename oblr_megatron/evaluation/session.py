"""One call of `oblr-megatron eval`: check the input, resume from OUT, sample and score, write metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checks.lengths import check_positions
from oblr_megatron.checks.machine import check_head_size
from oblr_megatron.config import with_own_scores
from oblr_megatron.data.sources import kind_of
from oblr_megatron.environments.registry import check_environment
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.evaluation.accuracy import Grade, Grades
from oblr_megatron.evaluation.answers import blocks_of, evaluate, unfinished
from oblr_megatron.evaluation.items import Item, Sink, append, items_path, recover, rewrite
from oblr_megatron.evaluation.settings import FIGURES, claim, settings_of
from oblr_megatron.evaluation.setup import config_of, load_sets, named_sets, opened
from oblr_megatron.evaluation.summary import SetReport
from oblr_megatron.metrics import write_whole
from oblr_megatron.observe.console import progress
from oblr_megatron.rewards.registry import check_reward, check_rows

if TYPE_CHECKING:
    import argparse

    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """A checked evaluation."""

    model: HFDir
    config: Config
    sets: dict[str, list[Prompt]]
    done: dict[str, list[Grade]]  # of each set, recovered from OUT
    out: Path | None
    json: Path | None

    @property
    def k(self) -> int:
        """Sampled responses per prompt."""
        return self.config.evaluate.samples_per_prompt


def check(options: argparse.Namespace) -> Task:
    """Check the input before an engine starts. Creates OUT, or truncates its files to whole blocks.

    Raises:
        UserError: the first problem found.
    """
    if options.overwrite and options.out is None:
        raise UserError("--overwrite needs a directory", where="--overwrite", fix="add --out DIR")
    model = check_hf_dir(options.model, quantized=True)
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
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK)):
        raise UserError("cannot write this file", where=str(file), fix="give another --json file")
    for source in sources.values():
        kind_of(source)

    import torch  # a common mistake ends before the seconds that this takes

    check_head_size(model.config, model.path, on_gpu=torch.cuda.is_available())
    sets = load_sets(sources, config, model.tokenizer())
    done: dict[str, list[Grade]] = {name: [] for name in sets}
    if options.out is not None:
        claim(options.out, model.path, settings_of(config, model), sets, overwrite=options.overwrite)
        for name, prompts in sets.items():
            keys = (block.keys(prompts) for block in blocks_of(config, len(prompts)))
            done[name] = recover(items_path(options.out, name), keys)
    return Task(model, config, sets, done, options.out, file)


def run(task: Task) -> list[SetReport]:
    """Sample the missing responses of each set, print its line, and write the metrics. Starts an engine if needed.

    Raises:
        RunError: an engine failed, the reward failed for a whole block, or a file cannot be written.
    """
    reports = []
    with ExitStack() as stack:
        place = None
        for name, prompts in task.sets.items():
            done = task.done[name]
            left = sum(block.size for block in unfinished(task.config, len(prompts), done))
            if not left:
                grades = Grades(done[: len(prompts)], done[len(prompts) :], task.k)
            else:
                place = place or stack.enter_context(opened(task.config))
                total = len(prompts) * (1 + task.k)
                with progress(name, total) as advance:
                    advance(total - left)
                    sink = _sink(task.out, name, advance, done=len(done))
                    engines, reward = place
                    grades = evaluate(name, engines, prompts, reward, task.config, done=done, sink=sink, strict=True)
            reports.append(SetReport.of(name, grades))
            print(reports[-1].line(), flush=True)
            _write_metrics(task, reports)
    return reports


def _sink(out: Path | None, name: str, advance: Callable[[int], None], done: int = 0) -> Sink:
    """A function that writes a block to its file, which has `done` lines, and advances the progress bar."""

    def take(first: int, items: Sequence[Item]) -> None:
        if out is not None:
            path = items_path(out, name)
            try:
                if first < done:
                    rewrite(path, first, items)
                else:
                    append(path, items)
            except OSError as error:
                raise RunError(f"cannot write to {out}: {error.strerror}; the same command continues") from error
        advance(len(items))

    return take


def _write_metrics(task: Task, reports: Sequence[SetReport]) -> None:
    """Write the metrics of all finished sets as JSON. Metrics of other sets stay in OUT's file.

    Raises:
        RunError: a file cannot be written.
    """
    sets = {report.name: report.record() for report in reports}
    content: dict[str, Any] = {"model": str(task.model.path), "k": task.k}
    try:
        if task.json is not None:
            write_whole(task.json, json.dumps(content | {"sets": sets}, indent=2) + "\n")
        if task.out is not None:
            path = task.out / FIGURES
            before = json.loads(path.read_text(encoding="utf-8"))["sets"] if path.exists() else {}
            write_whole(path, json.dumps(content | {"sets": before | sets}, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"cannot write the metrics: {error}") from error
