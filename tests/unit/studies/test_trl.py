"""TRL's trainers on the toy trainer's samples give the package's advantages, gradient and update, up to rounding.

The tests replace the output of TRL's `generate` by given completions; everything after that is TRL's code. The
expected values contain TRL's differences from the package's recipes: GRPO's default loss is a mean over tokens, its
standard deviation has 1e-4 added, and dr_grpo also divides by max_completion_length. A run with TRL's own sampling is
compared with a toy run: the same prompts in the same order, records and evaluation.
Not covered: whether a run learns, KL terms (TRL's RLOO puts its own into the reward), several processes, vLLM.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("trl") is None:
    pytest.skip("TRL, the peer, is not installed", allow_module_level=True)
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback

from oblr_megatron.algo.baseline import STD_EPS, advantages
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import read_metrics
from studies import trl_backend
from studies.policy import Drawn
from studies.start import load, prepare
from studies.tasks import TASKS, Row
from studies.toy_trainer import ToyConfig, prompt_order, run_toy
from studies.trl_trainer import VLLM_LEVEL, import_trl, open_trainer, trainer_arguments
from tests.unit.studies.runs import prompts_asked_of_trl

TASK, Q, G, TEMPERATURE = TASKS["chain"], 6, 4, 0.8
TRL_STD_EPS = 1e-4


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A short warm start: half of the responses end, few are right."""
    return prepare(TASK.name, "high", tmp_path_factory.mktemp("start"), steps=150)


def test_the_import_leaves_vllms_log_level_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL sets it when it is first imported; engines that start later inherit the environment."""
    monkeypatch.delenv(VLLM_LEVEL, raising=False)
    import_trl()
    assert VLLM_LEVEL not in os.environ


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return TASK.rows()[0][: 2 * Q]


@pytest.fixture(scope="module")
def samples(start, rows) -> list[Drawn]:
    """The samples of one step, prompt-major."""
    policy = load(start, TASK, temperature=TEMPERATURE)
    prompts = [policy.encode(row.question) for row in rows[:Q] for _ in range(G)]
    return policy.sample(prompts, TASK.max_response_tokens, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def rewards(samples) -> Tensor:
    """[Q, G]: graded, so that no group has equal rewards by chance."""
    drawn = torch.Generator().manual_seed(1)
    return torch.rand(Q, G, generator=drawn).round(decimals=1)


class Watch(TrainerCallback):
    """Records the gradient that the optimizer gets."""

    gradient: Tensor

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest) -> None:
        self.gradient = torch.cat([p.grad.detach().clone().flatten() for p in model.parameters()])


def arguments_of(trainer: str, optimizer: OptimizerConfig, output_dir: Path, num_steps: int = 1, **own: Any) -> Any:
    return trainer_arguments(
        trainer,
        output_dir=output_dir,
        seed=0,
        num_steps=num_steps,
        num_prompts=Q,
        group_size=G,
        max_response_tokens=TASK.max_response_tokens,
        temperature=TEMPERATURE,
        kl_coefficient=0.0,
        optimizer=optimizer,
        **own,
    )


def step(start, rows, samples, rewards, trainer: str, optimizer: OptimizerConfig, tmp_path, **own: Any) -> tuple:
    """(trainer, gradient, model) after one step of TRL on these samples."""
    model = Qwen3ForCausalLM.from_pretrained(start / "model", dtype=torch.float32)
    arguments = arguments_of(trainer, optimizer, tmp_path, **own)
    watch, tokenizer = Watch(), AutoTokenizer.from_pretrained(start / "model")
    questions = [row.question for row in rows[:Q]]
    found = iter(rewards.flatten().tolist())
    built = open_trainer(trainer, arguments, model, tokenizer, questions, lambda n, tokens: next(found), [watch])

    def given(prompt_ids: list[list[int]], *rest: object) -> Any:
        assert [tuple(ids) for ids in prompt_ids] == [each.prompt for each in samples], "unexpected prompts"
        completions = [list(each.tokens) for each in samples]
        return completions if trainer == "rloo" else (completions, None)

    built._generate_single_turn = given
    built.train()
    return built, watch.gradient, model


def expected(start, samples, rewards, baseline: str, aggregation: str) -> tuple[Tensor, Tensor]:
    """(A [Q, G], ascent direction [P]) of the package, with TRL's epsilon in the standard deviation."""
    lengths = torch.tensor([[len(each.tokens)] for each in samples]).view(Q, G)
    values = advantages(baseline, rewards, torch.ones(Q, G), lengths)
    if baseline == "grpo":
        std = rewards.double().std(-1, keepdim=True)
        values = values * (std + STD_EPS) / (std + TRL_STD_EPS)
    coefficients = sample_coefficients(values.flatten(), lengths.flatten(), Q, G, aggregation)
    return values, load(start, TASK, temperature=TEMPERATURE).gradient(samples, coefficients)


CASES = {
    "rloo": ("rloo", {}, "rloo", "constant", 1.0),
    "grpo": ("grpo", {}, "grpo", "token_mean", 1.0),
    "grpo, loss_type grpo": ("grpo", {"loss_type": "grpo"}, "grpo", "sample_mean", 1.0),
    "dr_grpo": (
        "grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "group_mean",
        "constant",
        TASK.max_response_tokens,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_advantages_and_gradient_equal_the_packages(case, start, rows, samples, rewards, tmp_path):
    trainer, own, baseline, aggregation, divisor = CASES[case]
    unclipped = OptimizerConfig(lr=1e-3, clip_grad=0.0)
    built, gradient, _ = step(start, rows, samples, rewards, trainer, unclipped, tmp_path, **own)
    values, want = expected(start, samples, rewards, baseline, aggregation)
    assert len({len(each.tokens) for each in samples}) > 2, "divisors differ only if lengths differ"
    torch.testing.assert_close(torch.tensor(built._logs["advantages"]).view(Q, G), values.float(), rtol=1e-5, atol=1e-6)
    assert float((-divisor * gradient - want).norm() / want.norm()) < 1e-5


def test_the_update_is_one_clipped_adam_step(start, rows, samples, rewards, tmp_path):
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.1, adam_eps=1e-2)
    _, _, model = step(start, rows, samples, rewards, "rloo", optimizer, tmp_path)
    _, ascent = expected(start, samples, rewards, "rloo", "constant")
    assert ascent.norm() > 0.2, "nothing to clip"
    policy = load(start, TASK)
    clipped = -ascent * 0.1 / ascent.norm()
    want = policy.vector() - 1e-3 * clipped / (clipped.abs() + 1e-2)
    got = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-7)


def test_only_adam(tmp_path):
    with pytest.raises(UserError, match=r"\[optimizer\.name\]"):
        arguments_of("rloo", OptimizerConfig(name="sgd"), tmp_path)


def run_config(start: Path, run_dir: Path, **more: Any) -> ToyConfig:
    table = {
        "task": TASK.name,
        "start_dir": start,
        "run_dir": run_dir,
        "seed": 3,
        "num_steps": 3,
        "num_prompts": Q,
        "group_size": G,
        "temperature": TEMPERATURE,
        "evaluate_every": 2,
        "evaluation_samples": 1,
        "algo": {"preset": "rloo", "snr": {"num_folds": 2}},
        "optimizer": {"lr": 1e-3},
    }
    return ToyConfig.model_validate(table | more)


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_run_has_the_prompts_and_records_of_a_toy_run(trainer, start, tmp_path, monkeypatch):
    from huggingface_hub.utils import _telemetry

    reported = list[object]()
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: reported.append(trainer))
    config, asked = run_config(start, tmp_path / "trl"), prompts_asked_of_trl(monkeypatch)
    trl_backend.run_trl(config, trainer)
    assert not reported, "TRL reports the use of its trainers"
    run_toy(config.model_copy(update={"run_dir": tmp_path / "toy"}))
    policy, rows = load(start, TASK), TASK.rows()[0]
    want = [
        [policy.encode(rows[n].question) for n in step for _ in range(G)] for step in prompt_order(len(rows), config)
    ]
    assert asked == want
    trl, toy = read_metrics(tmp_path / "trl"), read_metrics(tmp_path / "toy")
    assert trl[0] == toy[0], "same weights and random numbers before the first step"
    assert [record["step"] for record in trl] == [0, 1, 2, 3]
    evaluated = [[name for name in record if name.startswith("eval/")] for record in trl]
    assert [len(names) for names in evaluated] == [3, 0, 3, 3]
    for record, other in zip(trl[1:], toy[1:], strict=True):
        assert record["lr"] == other["lr"] == 1e-3
        assert {"reward/mean", "entropy", "response_length/mean", "timing_s/step", "grad_norm"} <= record.keys()
    assert trl[1]["entropy"] == pytest.approx(toy[1]["entropy"], rel=0.2), "two samples of one policy"
    assert trl[1]["response_length/mean"] == pytest.approx(toy[1]["response_length/mean"], rel=0.3)


def test_unsupported_configs_are_refused(start, tmp_path):
    with pytest.raises(UserError, match=r"\[algo\.schedule\]"):
        trl_backend.run_trl(run_config(start, tmp_path, algo={"schedule": "snr", "snr": {"num_folds": 2}}), "rloo")
