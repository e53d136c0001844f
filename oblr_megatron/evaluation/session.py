"""One call of `oblr-megatron eval`: checked, gone on with where OUT holds a part, answered, written down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checks.lengths import check_positions
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.evaluation.accuracy import Grade, Grades
from oblr_megatron.evaluation.answers import blocks_of, evaluate
from oblr_megatron.evaluation.items import Item, append, items_path, recover
from oblr_megatron.evaluation.settings import FIGURES, claim, settings_of
from oblr_megatron.evaluation.setup import config_of, load_sets, named_sets, opened
from oblr_megatron.evaluation.summary import SetReport
from oblr_megatron.metrics import write_whole
from oblr_megatron.observe.console import progress
from oblr_megatron.rewards.registry import check_reward

if TYPE_CHECKING:
    import argparse

    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """What was asked for, checked."""

    model: HFDir
    config: Config
    sets: dict[str, list[Prompt]]
    done: dict[str, list[Grade]]  # of each set, found in OUT
    out: Path | None
    json: Path | None

    @property
    def k(self) -> int:
        """Sampled responses a prompt."""
        return self.config.evaluate.samples_per_prompt

    def responses(self, name: str) -> int:
        """Of a set, in all."""
        return len(self.sets[name]) * (1 + self.k)


def check(options: argparse.Namespace) -> Task:
    """Everything that can be found wrong before an engine is started; OUT is made, or cut back to whole blocks.

    Raises:
        UserError: the first thing found wrong.
    """
    if options.overwrite and options.out is None:
        raise UserError("nothing to overwrite", where="--overwrite", fix="give --out as well")
    model = check_hf_dir(options.model, quantized=True)
    config = config_of(options, model, {} if options.k is None else {"evaluate.samples_per_prompt": options.k})
    check_positions(config, model.config)
    check_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
    sources = named_sets(options.data, "--data") if options.data else config.evaluate.data
    if not sources:
        raise UserError("no data set", where="--data", fix="name one, or a --config with evaluate.data")
    _check_writable(options.json)
    sets = load_sets(sources, config, model.tokenizer())
    task = Task(model, config, sets, {name: [] for name in sets}, options.out, options.json)
    return task if task.out is None else _claimed(task, task.out, overwrite=options.overwrite)


def _claimed(task: Task, out: Path, *, overwrite: bool) -> Task:
    """With what OUT holds of the same evaluation."""
    claim(out, task.model.path, settings_of(task.config, task.model), task.sets, overwrite=overwrite)
    done = {}
    for name, prompts in task.sets.items():
        keys = (block.keys(prompts) for block in blocks_of(task.config, len(prompts)))
        done[name] = recover(items_path(out, name), keys)
    return replace(task, done=done)


def _check_writable(path: Path | None) -> None:
    """A figures file that could not be written is found now, not hours later."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)):
        raise UserError("cannot be written", where=str(path), fix="name another --json file")


def run(task: Task) -> list[SetReport]:
    """Answer what is missing of each set, print its line, write all figures; an engine is started if one is needed.

    Raises:
        RunError: an engine failed, or the disk takes no more.
    """
    reports = []
    with ExitStack() as stack:
        place = None
        for name, prompts in task.sets.items():
            done = task.done[name]
            if len(done) == task.responses(name):
                grades = Grades.of(done, len(prompts), task.k)
            else:
                place = place or stack.enter_context(opened(task.config))
                with progress(name, task.responses(name)) as advance:
                    advance(len(done))
                    sink = _sink(task.out, name, advance)
                    grades = evaluate(name, place[0], prompts, place[1], task.config, done=done, sink=sink)
            reports.append(SetReport.of(name, grades))
            print(reports[-1].line(), flush=True)
            _write_metrics(task, reports)
    return reports


def _sink(out: Path | None, name: str, advance: Callable[[int], None]) -> Callable[[Sequence[Item]], None]:
    """Takes a block: to its file, and to the bar."""

    def take(items: Sequence[Item]) -> None:
        if out is not None:
            try:
                append(items_path(out, name), items)
            except OSError as error:
                raise RunError(f"cannot write to {out}: {error.strerror}; the same command goes on") from error
        advance(len(items))

    return take


def _write_metrics(task: Task, reports: Sequence[SetReport]) -> None:
    """The figures of the sets done so far, as JSON; those of other sets that OUT holds stay in its file.

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
        raise RunError(f"cannot write the figures: {error}") from error
