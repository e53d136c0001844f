"""Accuracy on held-out prompts: one greedy response each, and k sampled ones.

The figures are pure functions of how many responses were right. For a prompt with c right ones of n:

    pass@k = 1 - C(n - c, k) / C(n, k)      the chance that k of them, drawn without replacement, hold a right one

(arXiv 2107.03374). A response is right when its reward is 1 or more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    import argparse

    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config
    from oblr_megatron.rewards.base import Reward
    from oblr_megatron.rollout.engine import RolloutEngine
    from oblr_megatron.types import Prompt, Sample

RIGHT = 1.0  # the reward of a right answer
SEED_STRIDE, SEED_OFFSET = 1_000_003, 1_000_002  # apart from the seeds of a run's first million steps


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Unbiased estimate for one prompt. Examples: pass_at_k(1, 4, 1) = 0.25; pass_at_k(1, 4, 4) = 1."""
    assert 0 <= right <= samples and 1 <= k <= samples, f"{right} right of {samples}, k = {k}"
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[Hashable | None], gold: Hashable) -> bool:
    """Whether the answer given most often is the gold one; of equals the first given. None is no answer and no vote.

    Answers count as the same when they are equal as Python values: give them in a canonical form.
    Example: majority_at_k(["4", "5", "4", None], "4") is True.
    """
    votes: dict[Hashable, int] = {}
    for answer in answers:
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
    return bool(votes) and max(votes, key=lambda answer: votes[answer]) == gold


def wilson_interval(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion, at 95% for z = 1.96; (0, 1) when nothing was counted.

    Example: wilson_interval(8, 10) = (0.490, 0.943).
    """
    if count == 0:
        return 0.0, 1.0
    share = right / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return min(max(low, 0.0), share), max(min(high, 1.0), share)  # rounding may carry an end past the share itself


def figures(greedy: Sequence[float], sampled: Sequence[Sequence[float]]) -> dict[str, float]:
    """accuracy, mean_at_k and pass_at_k of a set.

    Args:
        greedy: [Q] rewards of the greedy responses.
        sampled: [Q, k] rewards of the sampled ones; k is the same for all prompts.

    Example: figures([1, 0], [[1, 0], [0, 0]]) = {"accuracy": 0.5, "mean_at_k": 0.25, "pass_at_k": 0.5}
    """
    solved = [pass_at_k(sum(map(is_right, group)), len(group), len(group)) for group in sampled]
    return {
        "accuracy": _mean([float(is_right(reward)) for reward in greedy]),
        "mean_at_k": _mean([_mean(group) for group in sampled]),
        "pass_at_k": _mean(solved),
    }


def is_right(reward: float) -> bool:
    """Whether a response earned the full reward."""
    return reward >= RIGHT


def evaluate(
    name: str, engines: RolloutEngine, prompts: Sequence[Prompt], reward: Reward, config: Config
) -> dict[str, float]:
    """Evaluate a set with the weights that the engines hold; every rank calls, every rank gets the figures.

    The same prompts get the same random numbers each time, so that two evaluations differ by the weights alone.

    Args:
        name: of the set.
        engines: collective.
        prompts: Q, at least one.
        reward: judges the responses.
        config: `evaluate` and `rollout` hold the sampling settings.

    Returns:
        {"eval/<name>/accuracy": ..., "eval/<name>/mean_at_k": ..., "eval/<name>/pass_at_k": ...}
    """
    right = greedy_rewards(engines, prompts, reward, config)
    k = config.evaluate.samples_per_prompt
    sampled = _responses(engines, prompts, config, k=k, greedy=False)
    rewards = reward.score(prompts, sampled).rewards
    groups = [rewards[first : first + k] for first in range(0, len(rewards), k)]
    return {f"eval/{name}/{figure}": value for figure, value in figures(right, groups).items()}


def greedy_rewards(engines: RolloutEngine, prompts: Sequence[Prompt], reward: Reward, config: Config) -> list[float]:
    """[Q] rewards of one greedy response to each prompt; every rank calls, every rank gets them."""
    return reward.score(prompts, _responses(engines, prompts, config, k=1, greedy=True)).rewards


def evaluate_model(options: argparse.Namespace) -> int:
    """`oblr-megatron eval`: print, and write as JSON if asked, the figures of a Hugging Face directory.

    Raises:
        UserError: a bad config, model, reward or data set, before any engine is started.
    """
    from oblr_megatron.checkpoint.hf_dir import check_hf_dir
    from oblr_megatron.preflight import check_lengths

    model = check_hf_dir(options.model, quantized=True)
    given = {"data.train": options.data[0], "evaluate.samples_per_prompt": options.k}
    config = config_of(options, model, given)
    check_lengths(config, model)
    sets = load_sets(options.data, "--data", config, model.tokenizer())
    report: dict[str, Any] = {"model": str(config.model.path), "k": config.evaluate.samples_per_prompt}
    with opened(config) as (engines, reward):
        for name, prompts in sets.items():
            report |= evaluate(name, engines, prompts, reward, config)
            print(_line(name, len(prompts), report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return EXIT_OK


@contextmanager
def opened(config: Config) -> Iterator[tuple[RolloutEngine, Reward]]:
    """A vLLM engine of config.model.path and the reward, in this one process; both end with the block."""
    from oblr_megatron.model import parallel as layout
    from oblr_megatron.rewards.registry import build_reward
    from oblr_megatron.rewards.shared import SharedReward
    from oblr_megatron.rollout.colocated import ColocatedEngines

    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="oblr-eval-"))  # of the engine's log
        config = config.model_copy(update={"run_dir": Path(scratch)})
        parallel = layout.initialize(config.parallel, seed=config.seed)
        stack.callback(layout.shutdown)
        reward = stack.enter_context(SharedReward(build_reward(config.reward), share=0, shares=1))
        engines = ColocatedEngines(config, parallel)
        stack.callback(engines.close)
        yield engines, reward


def load_sets(
    files: Sequence[Path], option: str, config: Config, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Prompt]]:
    """The prompts of each file, by the file's name.

    Raises:
        UserError: a file cannot be used, or two have the same name.
    """
    from oblr_megatron.data.prompts import load_prompts

    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        raise UserError("two data files have the same name", where=option, mend="rename one: sets go by file names")
    return {
        name: load_prompts(file, config.data, tokenizer, limit=config.evaluate.num_prompts)
        for name, file in zip(names, files, strict=True)
    }


def _responses(
    engines: RolloutEngine, prompts: Sequence[Prompt], config: Config, *, k: int, greedy: bool
) -> list[Sample]:
    """k responses a prompt, prompt-major; asked for in blocks of a training step's size, which the deadline is for."""
    block = max(1, config.num_prompts * config.group_size // k)
    samples: list[Sample] = []
    for first in range(0, len(prompts), block):
        samples += engines.generate(
            prompts[first : first + block],
            group_size=k,
            temperature=config.evaluate.temperature,
            max_tokens=config.rollout.max_response_tokens,
            seed=config.seed * SEED_STRIDE + SEED_OFFSET + first,
            greedy=greedy,
        )
    return samples


def config_of(options: argparse.Namespace, model: HFDir, given: dict[str, Any]) -> Config:
    """The run's config, or the defaults, with what the command line says; for one process.

    The defaults of prompt and response length are cut to what a small model's positions hold.

    Args:
        options: `config` and `overrides` of a command.
        model: what is evaluated.
        given: further keys that the command line sets, e.g. {"data.train": Path("gsm8k.jsonl")}.
    """
    from oblr_megatron.config import load_config, parse_config

    given = given | {
        "model.path": model.path,
        "parallel.tensor_model_parallel_size": 1,
        "parallel.pipeline_model_parallel_size": 1,
        "parallel.sequence_parallel": "false",
        "rollout.num_engines": 1,  # this is one process
    }
    if "quantization_config" in model.config:
        given |= {"rollout.dtype": "bfloat16"}  # of what is not quantised: vLLM has no FP8 product in fp32
    if options.config is not None:
        return load_config(options.config, [*_pairs(given), *options.overrides])
    half = int(model.config.get("max_position_embeddings", 0)) // 2
    given |= {"data.max_prompt_tokens": min(1024, half or 1024), "rollout.max_response_tokens": min(512, half or 512)}
    return parse_config({"run_dir": "."}, "command line", [*_pairs(given), *options.overrides])


def _pairs(given: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in given.items()]


def _line(name: str, prompts: int, report: dict[str, Any]) -> str:
    accuracy, mean, solved = (report[f"eval/{name}/{figure}"] for figure in ("accuracy", "mean_at_k", "pass_at_k"))
    low, high = wilson_interval(round(accuracy * prompts), prompts)
    k = report["k"]
    return (
        f"{name}: accuracy {accuracy:.1%} ({low:.1%} to {high:.1%}) greedy, mean@{k} {mean:.1%}, "
        f"pass@{k} {solved:.1%} on {prompts} prompts"
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
