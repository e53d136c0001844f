"""The passes over samples in a step, and the samples in each run of the pipeline. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.config import Config
from oblr_megatron.config.lora import LoraConfig
from oblr_megatron.families import OF_MLP

Kind = Literal["gradient", "norms", "inline", "stash", "bookkeep"]

MICROBATCHES_OF_A_FLUSH = 4
"""Microbatches for each pipeline stage that a wave should fill: with p stages the bubble is then under 1 / 5."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a step's folds among the replicas of the model.

    Example, 8 ranks with TP2 and the experts on blocks of 4 ranks: Layout(replicas=4, block=2)
    """

    replicas: int  # the data-parallel size
    block: int  # replicas that share experts, and so folds

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], config: Config, world_size: int) -> Layout:
        """The layout of a run; `checks.layout.check_layout` must have accepted it."""
        parallel = config.parallel
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        experts = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or tp)
        return cls(
            replicas=world_size // (tp * cp * parallel.pipeline_model_parallel_size),
            block=max(1, experts // (tp * cp)) if num_experts(hf_config) else 1,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the pipeline on a rank: forward and backward of a number of samples."""

    kind: Kind
    samples: int  # per run
    rows: int  # samples per microbatch

    @property
    def microbatches(self) -> int:
        """Microbatches of the run."""
        return -(-self.samples // self.rows)


def longest_sample(config: Config) -> int:
    """Tokens of the longest prompt and response together."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def lengths_that_fill(config: Config) -> list[int]:
    """Lengths of samples at which a pass may need the most memory, the longest first.

    They are that of the longest sample, and those that put one sample more into a microbatch or one prompt more into a
    window. Example, samples of at most 9,216 tokens and microbatches of 18,000: [9216, 9000].
    """
    longest, bound = longest_sample(config), config.parallel.micro_batch_tokens
    lengths = [longest, bound // (bound // longest + 1)]
    if config.gradnorm.mode == "bookkeep":
        window = config.gradnorm.window_tokens // config.group_size  # for one response of each prompt
        lengths.append(window // (window // longest + 1))
    return sorted({length for length in lengths if length > 0}, reverse=True)


def num_folds(config: Config) -> int:
    """R, the number of folds: as configured, or one per prompt; 1, over all replicas, if the estimator needs none."""
    if not config.algo.snr.needs_folds:
        return 1
    return config.num_prompts if config.algo.snr.estimator == "prompts" else config.algo.snr.num_folds


def folds_of_a_rank(config: Config, layout: Layout) -> int:
    """Folds that a rank processes one after another; 1 if there are too few folds, which `check_dealing` refuses."""
    return max(1, num_folds(config) * layout.block // layout.replicas)


def samples_of_a_rank(config: Config, layout: Layout) -> int:
    """Most samples of a step on a replica. Replicas that share a fold divide its prompts.

    Example, 4 folds of one prompt and two replicas that share experts: the first replica gets all prompts.
    """
    return folds_of_a_rank(config, layout) * prompts_of_a_run(config, layout) * config.group_size


def prompts_of_a_run(config: Config, layout: Layout) -> int:
    """Most prompts of a fold on a replica, or of the batch if there are no folds."""
    replicas = layout.block if config.algo.snr.needs_folds else layout.replicas
    return -(-config.num_prompts // (num_folds(config) * replicas))


def idle_replicas(config: Config, layout: Layout) -> str | None:
    """A warning if replicas that share a fold get unequal numbers of its prompts, so that some of them wait; else None.

    Example, 4 folds of one prompt each and two replicas that share experts: replicas are idle half of the time.
    """
    config = config.per_update  # as the gradient of an update divides them
    most = samples_of_a_rank(config, layout) * layout.replicas
    idle = 1 - config.num_prompts * config.group_size / most
    if idle <= 0:
        return None
    if not config.algo.snr.needs_folds:
        return (
            f"replicas idle {idle:.0%} of the gradient: {layout.replicas} replicas share {config.num_prompts} prompts; "
            f"make num_prompts a multiple of {layout.replicas}"
        )
    prompts = config.num_prompts // num_folds(config)
    return (
        f"replicas idle {idle:.0%} of the gradient: {layout.block} replicas share the {prompts} prompts of a fold; "
        f"make num_prompts / algo.snr.num_folds a multiple of {layout.block}"
    )


def needs_single_samples(hf_config: Mapping[str, Any], lora: LoraConfig, *, transformer_engine: bool) -> bool:
    """Whether a microbatch of a norm pass holds one sample: experts and untapped layers cannot tell samples apart.

    With LoRA only adapters are measured, which are all tapped. `norms.two_pass.rules_need_single_samples` reads the
    same from the parameters of a built model.
    """
    if lora.rank:
        return num_experts(hf_config) > 0 and not set(OF_MLP).isdisjoint(lora.targets)
    return num_experts(hf_config) > 0 or transformer_engine


def passes_of(
    hf_config: Mapping[str, Any],
    config: Config,
    layout: Layout,
    length: int,
    *,
    norms: bool,
    transformer_engine: bool,
) -> list[Pass]:
    """The passes of a step over samples of one length; with `norms` they are measured. "auto" counts as "two_pass"."""
    group, mode = config.group_size, config.gradnorm.mode if config.measures_norms else "two_pass"
    rows = max(1, config.parallel.micro_batch_tokens // length)
    single = needs_single_samples(hf_config, config.model.lora, transformer_engine=transformer_engine)
    alone = 1 if single or layout.block > 1 else rows  # replicas that share experts pass their microbatches together
    prompts = prompts_of_a_run(config, layout)
    share = prompts * group
    gradient = Pass("gradient", share, min(rows, share))
    if not norms:
        return [gradient]
    if mode == "inline":
        return [Pass("inline", share, min(alone, share))]
    if mode == "stash":
        return [Pass("stash", config.stash_size, 1)]
    if mode == "bookkeep":
        fit = max(1, config.gradnorm.window_tokens // (group * length))  # prompts in a window
        window = min(prompts, fit) * group
        return [Pass("bookkeep", window, min(alone, window))]
    mine = samples_of_a_rank(config, layout)
    return [Pass("norms", mine, min(alone, mine)), gradient]


def tokens_of_a_wave(config: Config, replicas: int) -> int:
    """Tokens that are worth a wave: a microbatch for every replica, and several for every stage of a pipeline.

    Fewer would leave replicas or stages idle while the wave is computed. More would delay the first gradient.
    `rollout.wave_tokens` replaces the rule.
    """
    stages = config.parallel.pipeline_model_parallel_size
    flush = MICROBATCHES_OF_A_FLUSH * stages if stages > 1 else 1
    return config.rollout.wave_tokens or replicas * flush * config.parallel.micro_batch_tokens
