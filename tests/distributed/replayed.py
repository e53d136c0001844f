"""Whole runs in seconds: the real trainer and its checkpoints on gloo ranks, with saved samples in vLLM's place."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from oblr_megatron.config import Config, parse_config
from oblr_megatron.rollout.step_file import SavedStep, write_step
from oblr_megatron.types import Prompt, Sample
from tests.distributed.launch import run_ranks
from tests.tiny import VOCAB, make_hf_dir, make_moe_hf_dir

STEPS, PROMPTS, GROUP = 8, 4, 4
SHORT = ("num_steps=4", "checkpoint.every_steps=2")
"""Half as many steps; a run still goes on for as many steps as it had before its checkpoint."""
TIMED = ("timing_s/", "perf/")  # what no two runs have in common


def make_samples(directory: Path, worthless: int = 0, steps: int = STEPS) -> Path:
    """Saved steps of random tokens, on-policy by their version; the first `worthless` steps have no reward."""
    draw = np.random.default_rng(0)
    for step in range(1, steps + 1):
        prompts = [Prompt(q, f"row-{q}", "t2 t3", (2, 3, 4 + q), f"t{q}", "made") for q in range(PROMPTS)]
        samples = []
        for n in range(PROMPTS * GROUP):
            ids = tuple(draw.integers(2, VOCAB, 2 + n % 5).tolist())
            logprobs = tuple(float(np.float32(value)) for value in -4 * draw.random(len(ids)))
            text = "" if step <= worthless else f"t{n % 3}"
            samples.append(Sample(n // GROUP, prompts[n // GROUP].token_ids, ids, logprobs, text, "stop", step - 1))
        rewards = [0.0] * len(samples)
        write_step(directory, SavedStep(step, 1.0, 0, 0, prompts, samples, rewards))
    return directory


def make_inputs(
    directory: Path, *, worthless: int = 0, steps: int = STEPS, mixture: bool = False, **model: Any
) -> Path:
    """model/ and rollouts/ of runs."""
    (make_moe_hf_dir if mixture else make_hf_dir)(directory / "model", **model)
    make_samples(directory / "rollouts", worthless, steps)
    return directory


def config_of(inputs: Path, run_dir: Path, *overrides: str) -> Config:
    """A run with norms before the gradient and a rate that follows the noise, or with the preset of an override."""
    named = any(override.startswith("algo.preset=") for override in overrides)
    recipe = {} if named else {"baseline": "optimal", "schedule": "snr"}
    table = {
        "run_dir": str(run_dir),
        "num_steps": STEPS,
        "num_prompts": PROMPTS,
        "group_size": GROUP,
        "model": {"path": str(inputs / "model"), "make_vocab_size_divisible_by": 8},
        "data": {"train": "none", "max_prompt_tokens": 16},
        "rollout": {"replay": str(inputs / "rollouts"), "max_response_tokens": 16, "importance_sampling": "none"},
        "reward": {"name": "exact_match", "num_workers": 1},
        "gradnorm": {"mode": "bookkeep"},
        "algo": {"snr": {"num_folds": 2, "warmup_steps": 2}} | recipe,
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every_steps": 4, "export_hf": True},
        "log": {"trackers": []},
    }
    return parse_config(table, overrides=list(overrides))


def train(config: Config, ranks: int = 1, *, status: int = 0) -> str:
    """Run to the end; every rank must return this exit status. Returns the output of the first rank."""
    outcomes = run_ranks(train_here, ranks, config)
    assert [found for found, _ in outcomes] == [status] * ranks, outcomes[0][1]
    return outcomes[0][1]


def train_here(config: Config) -> tuple[int, str]:
    """A run in this process, as one rank; returns the exit status and the output."""
    from oblr_megatron.runtime.command_line import guarded
    from oblr_megatron.step_loop import run_training

    names = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": dist.get_rank()}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["MASTER_PORT"] = "0"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks have met already
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        return guarded(lambda: run_training(config)), said.getvalue()


def certain(run_dir: Path) -> list[dict[str, float]]:
    """All logged metrics except times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMED)} for line in lines]


def exported(run_dir: Path, name: str = "hf") -> dict[str, Tensor]:
    return load_file(run_dir / name / "model.safetensors")


def stored(*checkpoints: Path) -> list[dict[str, Tensor]]:
    """Every tensor of each checkpoint without the padding of the vocabulary: weights, masters, moments."""
    return run_ranks(_stored, 1, checkpoints)[0]


def _stored(checkpoints: Sequence[Path]) -> list[dict[str, Tensor]]:
    from oblr_megatron.model import cpu

    cpu.install()
    return [_tensors(checkpoint) for checkpoint in checkpoints]


def _tensors(checkpoint: Path) -> dict[str, Tensor]:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(str(checkpoint))
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    return {
        name: tensor[:VOCAB].clone() if "word_embeddings" in name or "output_layer" in name else tensor.clone()
        for name, tensor in tensors.items()
    }
