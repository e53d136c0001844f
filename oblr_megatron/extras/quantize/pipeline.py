"""The steps of `oblr-megatron quantize`: calibrate, measure, write, read back, answer. DST is created atomically."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checkpoint.hf_write import whole_directory
from oblr_megatron.checkpoint.store import sync
from oblr_megatron.extras.quantize import fp8
from oblr_megatron.extras.quantize.accuracy import Accuracy, with_transformers, with_vllm
from oblr_megatron.extras.quantize.calibration import CalibrationBatch, Rows, pack
from oblr_megatron.extras.quantize.fidelity import LogitComparison, LogitError
from oblr_megatron.extras.quantize.summary import REPORT, Calibrated, QuantizeReport
from oblr_megatron.observe.console import progress
from oblr_megatron.rewards.registry import build_reward
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oblr_megatron.config import Config

Engine = Literal["vllm", "transformers"]
Accuracies = tuple[dict[str, Accuracy], dict[str, Accuracy]]
"""Accuracies by set, before and after."""


@dataclass(frozen=True, slots=True)
class QuantizeTask:
    """The command's checked arguments."""

    source: HFDir
    target: Path
    format: str
    rows: Rows
    config: Config  # data.train is the calibration data
    tokenizer: PreTrainedTokenizerBase
    sets: dict[str, list[Prompt]]  # to answer before and after; may be empty
    engine: Engine  # answers the sets


def run(task: QuantizeTask) -> QuantizeReport:
    """Write task.target and return the measurements.

    Raises:
        RunError: a layer has no scale, a file differs from the measured weights, or an engine failed. The target is not
            created.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = fp8.load_model(task.source.path, device)
    with progress("calibrating", len(task.rows.calibration)) as advance:
        fp8.calibrate(model, pack(task.rows.calibration), advance)
    error = _compare(model, pack(task.rows.held_out))
    answers: Accuracies = {}, {}
    if task.sets and task.engine == "transformers":
        answers = _answer_simulated(model, task)
    with whole_directory(task.target) as partial:
        written = fp8.write(model, task.source.path, partial)
        fp8.check_written(partial, written)
        del model
        gc.collect()
        torch.cuda.empty_cache()  # does nothing on a CPU
        if task.sets and task.engine == "vllm":
            before, after = (with_vllm(directory, task.sets, task.config) for directory in (task.source.path, partial))
            answers = before, after
        report = _report(task, error, answers, device, partial, len(written))
        report.write(partial)
        sync(partial / REPORT)
    return report


@torch.no_grad()
def _compare(model: PreTrainedModel, batches: Sequence[CalibrationBatch]) -> LogitError:
    comparison = LogitComparison()
    for batch in batches:
        arguments = batch.arguments(model.device)
        with fp8.original(model):
            before = model(**arguments).logits[0]
        comparison.add(before, model(**arguments).logits[0])
    return comparison.result()


def _answer_simulated(model: PreTrainedModel, task: QuantizeTask) -> Accuracies:
    max_tokens = task.config.rollout.max_response_tokens
    with build_reward(task.config.reward, max_response_tokens=max_tokens) as reward:
        with fp8.original(model):
            before = with_transformers(model, task.tokenizer, task.sets, reward, task.config)
        return before, with_transformers(model, task.tokenizer, task.sets, reward, task.config)


def _report(
    task: QuantizeTask, error: LogitError, answers: Accuracies, device: torch.device, written: Path, num_weights: int
) -> QuantizeReport:
    simulated = f"transformers in bf16, FP8 simulated on {device.type}"
    engine = f"vLLM on {device.type}" if task.engine == "vllm" else simulated
    calibration = Calibrated(
        file=", ".join(source.path for source in task.config.data.train),
        rows=len(task.rows.calibration),
        tokens=sum(map(len, task.rows.calibration)),
        skipped_rows=task.rows.skipped,
        held_out_rows=len(task.rows.held_out),
    )
    return QuantizeReport(
        source=str(task.source.path),
        format=task.format,
        modelopt=version("nvidia-modelopt"),
        device=device.type,
        calibration=calibration,
        logits=error,
        quantized_weights=num_weights,
        weight_bytes_before=task.source.num_bytes,
        weight_bytes_after=check_hf_dir(written, quantized=True).num_bytes,
        accuracy_engine=engine if task.sets else None,
        accuracy_before=answers[0],
        accuracy_after=answers[1],
    )
