"""Set up TRL's GRPOTrainer and RLOOTrainer for a study's runs.

Each batch of num_prompts * group_size fresh responses gives one update, in fp32 on the CPU, with transformers'
`generate`. Nothing is uploaded or saved. Where TRL's method differs, its defaults stay (TRL 1.16):

    GRPO    loss_type "dapo": A_i / sum_j L_j (the package's "token_mean"); scale_rewards "group": A divided by the
            group's standard deviation + 1e-4; token-wise ratios clipped to 1 +- 0.2 (all 1 with one update per batch)
    RLOO    A_i / (Q G); sequence-wise ratios clipped to 1 +- 0.2 (all 1): the same estimator as preset "rloo"

RLOO subtracts its KL penalty, which TRL enables by default, from the reward. GRPO adds the k3 form to the loss.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

    from oblr_megatron.config import OptimizerConfig

VLLM_LEVEL = "VLLM_LOGGING_LEVEL"
TrainerName = Literal["grpo", "rloo"]
Scorer = Callable[[int, list[int]], float]
"""(question index, response tokens) -> reward."""


@dataclass(frozen=True, slots=True)
class TrlTask:
    """What a run of TRL trains on."""

    model: PreTrainedModel  # trained in place
    tokenizer: PreTrainedTokenizerBase
    questions: Sequence[str]  # num_steps * num_prompts of them, in order
    score: Scorer
    evaluate: Callable[[PreTrainedModel], dict[str, float]]  # metrics of the held-out set
    max_response_tokens: int
    arguments: dict[str, Any] = field(default_factory=dict)  # further settings of TRL


def trainer_arguments(
    trainer: TrainerName,
    *,
    output_dir: Path,
    seed: int,
    num_steps: int,
    num_prompts: int,
    group_size: int,
    max_response_tokens: int,
    temperature: float,
    kl_coefficient: float,
    optimizer: OptimizerConfig,
    **own: Any,
) -> Any:
    """A GRPOConfig or RLOOConfig; `own` holds further TRL settings, such as loss_type.

    Raises:
        UserError: TRL is not installed, or the optimizer is not Adam.
    """
    if optimizer.name != "adam":
        raise UserError("the TRL backend trains with Adam", where="optimizer.name", fix='set it to "adam"')
    trl = import_trl()
    common = {
        "output_dir": str(output_dir),
        "seed": seed,
        "max_steps": num_steps,
        "per_device_train_batch_size": num_prompts * group_size,  # the whole batch in one pass
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "num_generations": group_size,
        "max_completion_length": max_response_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "beta": kl_coefficient,
        "optim": "adamw_torch",
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.lr_warmup_steps,  # transformers' warmup lags one step: its first rate is 0
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_epsilon": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_grad,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "use_vllm": False,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[trainer](**common | own)


def open_trainer(
    trainer: TrainerName,
    arguments: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    score: Scorer,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """Build the trainer, ready for `train()`.

    Args:
        trainer: "grpo" or "rloo".
        arguments: from `trainer_arguments`.
        model: trained in place.
        tokenizer: must pad on the left.
        questions: num_steps * num_prompts questions, in order.
        score: the reward.
        callbacks: further callbacks.
    """
    trl = import_trl()
    from datasets import Dataset
    from huggingface_hub import constants
    from transformers import PrinterCallback

    constants.HF_HUB_DISABLE_TELEMETRY = True  # else the trainer reports its use; the variable is read at import

    def reward(completion_ids: list[list[int]], question: list[int], **rest: object) -> list[float]:
        return [score(index, list(tokens)) for index, tokens in zip(question, completion_ids, strict=True)]

    built: Trainer = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[trainer](
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": list(questions), "question": list(range(len(questions)))}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    built.remove_callback(PrinterCallback)
    return built


def import_trl() -> Any:
    """Import TRL and its trainers, without the warnings about vLLM's version and Triton.

    TRL sets vLLM's log level to ERROR in the environment. The level is restored, because engines inherit it.

    Raises:
        UserError: TRL is not installed.
    """
    logger = logging.getLogger("vllm.triton_utils.importing")
    logger.addFilter(_not_about_triton)
    level = os.environ.get(VLLM_LEVEL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
            import trl

            for name in ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"):
                getattr(trl, name)  # trl imports its classes on first access
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise UserError("TRL is not installed", where="study: trl", fix="pip install trl==1.16.0") from None
    finally:
        logger.removeFilter(_not_about_triton)
        os.environ.pop(VLLM_LEVEL, None)
        if level is not None:
            os.environ[VLLM_LEVEL] = level
    return trl


def _not_about_triton(record: logging.LogRecord) -> bool:
    return "doesn't include CPU backend" not in record.getMessage()
