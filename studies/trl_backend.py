"""Backends "trl_grpo", "trl_rloo": TRL's trainers with their own loss and advantages.

Start, prompt order, samples per step, reward, Adam's settings and evaluation are those of the toy trainer, or for a
recipe those of a training run (trl_recipe.py). TRL computes the gradient from a batch (see trl_trainer.py), and steps
Adam also when that is zero, which the other trainers do not. Of `config.algo`,
the schedule must be "constant" and kl_coefficient becomes TRL's beta; all other keys are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import MetricsWriter, write_whole
from studies.start import load, task_named
from studies.toy_trainer import ToyConfig, evaluate, prompt_order
from studies.trl_recipe import open_recipe
from studies.trl_trainer import TrainerName, TrlTask, open_trainer, trainer_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRICS = {  # TRL's names -> the package's
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/truncated_fraction",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
}


def run_trl(config: ToyConfig, trainer: TrainerName) -> None:
    """Train, and write RUN_DIR/config.json and RUN_DIR/metrics.jsonl as `run_toy` does.

    Args:
        config: config of a toy run.
        trainer: TRL's trainer.

    Raises:
        UserError: TRL is not installed, or does not support the config.
    """
    _check(config, trainer)
    with open_task(config) if config.recipe is None else open_recipe(config) as task:
        arguments = _arguments(config, trainer, task.max_response_tokens, task.arguments)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(config.run_dir / "config.json", config.model_dump_json(indent=2) + "\n")
        with MetricsWriter(config.run_dir) as metrics:
            recorder = Recorder(config, metrics, task.evaluate)
            model, tokenizer = task.model, task.tokenizer
            open_trainer(trainer, arguments, model, tokenizer, task.questions, task.score, [recorder]).train()


@contextmanager
def open_task(config: ToyConfig) -> Iterator[TrlTask]:
    """A generated task with the toy trainer's prompts, rewards and evaluation."""
    task = task_named(config.task)
    train, held_out = task.rows()
    policy = load(config.start_dir, task, temperature=config.temperature)
    rows = [train[row] for chosen in prompt_order(len(train), config) for row in chosen]

    def score(question: int, tokens: list[int]) -> float:
        return task.reward(policy.decode(tokens), rows[question].answer)

    def evaluated(model: PreTrainedModel) -> dict[str, float]:
        policy.assign(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
        return evaluate(policy, task, held_out, config)

    yield TrlTask(
        model=Qwen3ForCausalLM.from_pretrained(config.start_dir / "model", dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(config.start_dir / "model"),
        questions=[row.question for row in rows],
        score=score,
        evaluate=evaluated,
        max_response_tokens=task.max_response_tokens,
    )


def _check(config: ToyConfig, trainer: TrainerName) -> None:
    """Refuse a config that TRL cannot train."""
    if config.algo.schedule != "constant":
        raise UserError(
            f"the TRL backend trains at a constant rate, not with schedule {config.algo.schedule!r}",
            where="algo.schedule",
            fix=f'set it to "constant", as algo.preset = "{trainer}" does',
        )
    if config.algo.updates_per_batch > 1:
        raise UserError(
            f"the TRL backend takes one update on a batch, not {config.algo.updates_per_batch}",
            where="algo.updates_per_batch",
            fix="set it to 1",
        )


def _arguments(config: ToyConfig, trainer: TrainerName, max_response_tokens: int, own: dict[str, Any]) -> Any:
    """TRL's arguments for this config."""
    return trainer_arguments(
        trainer,
        output_dir=config.run_dir,
        seed=config.seed,
        num_steps=config.num_steps,
        num_prompts=config.num_prompts,
        group_size=config.group_size,
        max_response_tokens=max_response_tokens,
        temperature=config.temperature,
        kl_coefficient=config.algo.kl_coefficient,
        optimizer=config.optimizer,
        **own,
    )


class Recorder(TrainerCallback):
    """Writes TRL's metrics of every step, and the evaluation of TRL's weights, to metrics.jsonl.

    Args:
        config: config of the run.
        metrics: open writer of metrics.jsonl.
        evaluate: the task's evaluation of a model.
    """

    def __init__(
        self, config: ToyConfig, metrics: MetricsWriter, evaluate: Callable[[PreTrainedModel], dict[str, float]]
    ) -> None:
        self._config, self._metrics, self._evaluate = config, metrics, evaluate
        self._began = self._seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the record of step 0."""
        self._metrics.write(0, self._evaluate(rest["model"]))

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start the step's timer, before sampling."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stop the step's timer, after the update."""
        self._seconds = time.perf_counter() - self._began

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **rest: Any) -> None:
        """Write a step's record. TRL calls this after every `on_step_end`, and once more at the end without metrics."""
        if logs is None or "reward" not in logs:
            return
        record = {ours: float(logs[name]) for name, ours in METRICS.items() if logs.get(name) is not None}
        record["groups/mixed_fraction"] = 1.0 - float(logs["frac_reward_zero_std"])
        record["timing_s/step"] = self._seconds
        step = int(state.global_step)
        if step % self._config.evaluate_every == 0 or step == self._config.num_steps:
            record |= self._evaluate(rest["model"])
        self._metrics.write(step, record)
