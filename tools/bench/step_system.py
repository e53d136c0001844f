"""Run one of `step.py`'s systems: `python step_system.py WORK.json SYSTEM` takes one step per line of input.

The loops are the systems' own: `step_loop.train` of the package, `Trainer.train` of TRL. Each loop blocks at the start
of a step (before its prompts are taken; at TRL's `on_step_begin`) until the next line of input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from step_shapes import REWARDS, table_of
from transformers import TrainerCallback

from oblr_megatron.config import Config, OptimizerConfig, parse_config
from oblr_megatron.types import Prompt

if TYPE_CHECKING:
    from studies.trl_trainer import TrainerName

STILL = 1e-12  # learning rate close to 0: every step samples from the same policy, so response lengths do not drift
STREAM, RANKS = "_stream", "_ranks"
PRESETS = {name + end: name for end in ("", STREAM, RANKS) for name in ("oblr_pooled", "rloo")}
TRAINERS: tuple[TrainerName, ...] = ("grpo", "rloo")
TRL = {f"trl_{name}{end}": name for end in ("", RANKS) for name in TRAINERS}
ONE_PASS = 2**14
"""Tokens of a microbatch: a fold needs one, as TRL's systems take the batch in one pass."""
WAVES = {"max_num_seqs": 128, "wave_tokens": 1024}
"""Responses of equal length end together: an engine that samples a quarter at a time lets the trainer begin."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of every system's step.

    Example: Work(shape="demo", directory="/tmp/x", num_prompts=64, group_size=8, num_steps=12, num_threads=2)
    """

    shape: str  # of step_shapes.py
    directory: str  # with its model and data
    num_prompts: int
    group_size: int
    num_steps: int  # upper limit
    num_threads: int
    dtype: str = "float32"
    micro_batch_tokens: int = ONE_PASS
    micro_batch_samples: int = 0  # of TRL's passes; 0: the batch in one pass


class Finished(Exception):
    """Standard input has ended: no further step."""


class Pace:
    """Called at the start of a step: reports the previous step's time and waits for the next line of input."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._begin: float | None = None

    def __call__(self) -> None:
        """Print "ready" or the seconds of a step; then read a line.

        Raises:
            Finished: standard input has ended.
        """
        now = time.perf_counter()
        print("ready" if self._begin is None else now - self._begin, file=self._output, flush=True)
        if not sys.stdin.readline():
            raise Finished
        self._begin = time.perf_counter()


def main(work_file: str, system: str) -> None:
    """Run the system until standard input ends. Output of libraries goes to standard error."""
    pace = Pace(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    work = Work(**json.loads(Path(work_file).read_text(encoding="utf-8")))
    with suppress(Finished):
        if system in TRL:
            run_trl(work, system, pace)
        else:
            run_package(work, system, pace)


def config_of(work: Work, system: str) -> Config:
    """The config for this work."""
    table = table_of(work.shape)
    directory = Path(work.directory)
    del table["evaluate"], table["algo"]["baseline"], table["algo"]["schedule"]
    table |= {"run_dir": str(directory / system), "num_steps": work.num_steps, "log": {"trackers": []}}
    table |= {"num_prompts": work.num_prompts, "group_size": work.group_size}
    table["algo"]["preset"] = PRESETS.get(system)
    table["model"]["dtype"] = work.dtype
    table["model"]["path"], table["data"]["train"] = str(directory / "model"), str(directory / "train.jsonl")
    table["optimizer"]["lr"] = STILL
    table["rollout"]["num_threads"] = work.num_threads
    table.setdefault("parallel", {})["micro_batch_tokens"] = work.micro_batch_tokens
    if PRESETS.get(system) == "rloo":  # TRL estimates no noise: the fewest folds, so that a fold is a rank's whole part
        table["algo"]["snr"]["num_folds"] = 2
    if system.endswith(RANKS):  # each with an engine and one thread
        table["rollout"] |= {"num_engines": work.num_threads, "num_threads": 1}
    if system.endswith(STREAM):  # trainer and engine work at once, each with its share of the threads
        table["rollout"] |= {"overlap": "stream", "num_threads": max(1, work.num_threads // 2)} | WAVES
    table["checkpoint"]["every_steps"] = 0
    return parse_config(table)


def run_package(work: Work, system: str, pace: Pace) -> None:
    """Train with megatron-core and vLLM."""
    from oblr_megatron.run import open_run
    from oblr_megatron.step_loop import train

    logging.getLogger("vllm").setLevel(logging.ERROR)
    with open_run(config_of(work, system)) as run:
        if run.sampling.parallel.rank:  # the first rank sets the pace: the others wait for it
            train(run)
            return
        next_prompts = run.sampling.stream.next_prompts

        def paced(count: int) -> list[Prompt]:
            pace()
            return next_prompts(count)

        run.sampling.stream.next_prompts = paced  # type: ignore[method-assign]
        train(run)


def run_trl(work: Work, system: str, pace: Pace) -> None:
    """Train with TRL, transformers' generate and TRL's default loss, on the same rows and lengths."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from studies.trl_trainer import open_trainer, trainer_arguments

    class Paced(TrainerCallback):
        def on_step_begin(self, *arguments: object, **more: object) -> None:
            if os.environ.get("RANK", "0") == "0":
                pace()

    config = config_of(work, system)
    rows = [json.loads(line) for line in Path(config.data.train[0].path).read_text(encoding="utf-8").splitlines()]
    rows = [rows[n % len(rows)] for n in range(work.num_steps * work.num_prompts)]
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    arguments = trainer_arguments(
        TRL[system],
        output_dir=config.run_dir,
        seed=config.seed,
        num_steps=work.num_steps,
        num_prompts=work.num_prompts,
        group_size=work.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        kl_coefficient=0.0,
        optimizer=OptimizerConfig(lr=STILL, clip_grad=config.optimizer.clip_grad),
        **_of_ranks(work) if system.endswith(RANKS) else _of_passes(work),
    )

    def score(index: int, tokens: list[int]) -> float:
        text, answer = tokenizer.decode(tokens, skip_special_tokens=True), rows[index]["answer"]
        return REWARDS[work.shape](text, answer, "") if work.shape in REWARDS else float(text == answer)

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=work.dtype)
    questions = [row["question"] for row in rows]
    open_trainer(TRL[system], arguments, model, tokenizer, questions, score, [Paced()]).train()


def _of_ranks(work: Work) -> dict[str, Any]:
    """Settings with which transformers divides a batch over the ranks."""
    samples = work.num_prompts * work.group_size
    return {"per_device_train_batch_size": samples // work.num_threads, "ddp_backend": "gloo"}


def _of_passes(work: Work) -> dict[str, Any]:
    """Settings with which TRL samples the whole batch at once and trains on a part of it in each pass."""
    if not work.micro_batch_samples:
        return {}
    passes = work.num_prompts * work.group_size // work.micro_batch_samples
    return {
        "per_device_train_batch_size": work.micro_batch_samples,
        "gradient_accumulation_steps": passes,
        "steps_per_generation": passes,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
