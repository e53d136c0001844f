"""Training from saved samples: prompts and responses are read from the files of another run.

    engine = ReplayEngine(config, parallel)
    prompts = engine.next_prompts(config.num_prompts)     # those of the next saved step
    samples = engine.generate(prompts, request)           # its responses

No vllm is loaded, no engine process is started, and no weights leave the trainer: a push only counts versions. The
responses are scored again, since the reward is part of the experiment; the rewards in the files are for inspection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from oblr_megatron.checks.run_dir import check_saved_samples
from oblr_megatron.engine.protocol import PushStats, RolloutEngine, SamplingRequest
from oblr_megatron.errors import BrokenStepError, Problem, UserError
from oblr_megatron.rewards.registry import takes_rows
from oblr_megatron.rollout.in_flight import Complete
from oblr_megatron.rollout.routes import without_routes
from oblr_megatron.rollout.staleness import StaleSampleError, staleness
from oblr_megatron.rollout.step_file import FIX, SavedStep, read_step, step_path

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.rewards.base import Reward
    from oblr_megatron.types import Prompt, Sample
    from oblr_megatron.weights.manifest import Source

ROUNDING = 1e-3
"""A log-prob may be this far above 0."""
LOWEST_LOGPROB = -104.0
"""The logarithm of the smallest float32 is -103.3: an engine never draws a token of a lower probability."""


class ReplayEngine(RolloutEngine):
    """Yields prompts and samples of the saved steps in order; every rank calls every method.

    Rank 0 reads the files and broadcasts their contents, except routes (`rollout.routes`).
    """

    def __init__(self, config: Config, parallel: Parallel) -> None:
        """Start before the first step of `rollout.replay`, which `check_replay` has checked."""
        assert config.rollout.replay is not None, "only a replay has this engine"
        self._directory, self._rank = config.rollout.replay, parallel.rank
        self._with_routes = config.model.moe_routing_replay
        self._version = 0
        self._step = 0
        self._saved: SavedStep | None = None

    @property
    def version(self) -> int:
        """Version of the weights that the trainer pushed last."""
        return self._version

    @property
    def epoch(self) -> int:
        """Epoch of the saved run's data, after the last step taken."""
        return 0 if self._saved is None else self._saved.epoch

    @property
    def num_skipped(self) -> int:
        """Rows of the saved run's data that were skipped."""
        return 0 if self._saved is None else self._saved.skipped

    def state_dict(self) -> dict[str, int]:
        """The last saved step taken."""
        return {"replayed": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the saved step after it. Raises as `check_replayed`."""
        check_replayed(state)
        self._step = int(state["replayed"])

    def next_prompts(self, count: int) -> list[Prompt]:
        """The prompts of the next saved step; a `BrokenStepError` if its file has changed since the run began."""
        self._step += 1
        self._saved = self._read(self._step)
        if len(self._saved.prompts) != count:
            raise BrokenStepError(f"saved step {self._step} has {len(self._saved.prompts)} prompts, not {count}")
        return self._saved.prompts

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        """The saved responses to the last prompts taken. `check_replay` has compared sizes and temperature."""
        assert self._saved is not None and list(prompts) == self._saved.prompts, "only saved prompts have samples"
        size = self._saved.group_size
        assert request.group_size == size and not request.greedy, f"saved were groups of {size}"
        return self._saved.samples

    def begin(self, prompts: Sequence[Prompt], request: SamplingRequest, reward: Reward | None = None) -> Complete:
        """The saved responses, the shortest first; not scored."""
        samples, size = self.generate(prompts, request), request.group_size
        return Complete(
            {position: samples[position * size : (position + 1) * size] for position in range(len(prompts))}
        )

    def push(self, source: Source, version: int) -> PushStats:
        """Count the version; no rank reads the source."""
        self._version = version
        return PushStats(bytes=0, seconds=0.0, tensors=0, buckets=0)

    def _read(self, step: int) -> SavedStep:
        outcome: list[SavedStep | str] = [""]
        routes: list[Sample] | None = None
        if self._rank == 0:
            try:
                saved = read_step(step_path(self._directory, step))
                routes = saved.samples if self._with_routes else None
                outcome = [replace(saved, samples=without_routes(saved.samples))]
            except UserError as error:  # no user error any more: the file was good when the run began
                outcome = [str(error)]
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], str):
            raise BrokenStepError(outcome[0])
        return outcome[0] if routes is None else replace(outcome[0], samples=routes)


def check_replayed(state: Mapping[str, Any]) -> None:
    """Refuse (UserError) the data state of a checkpoint from a run that sampled."""
    if "replayed" not in state:
        what = "the checkpoint is from a run that sampled, but this run replays"
        raise UserError(what, where="rollout.replay", fix="resume without --replay")


def check_replay(config: Config, vocab_size: int, model: str = "") -> None:
    """Read every step that the run will take, and refuse samples that do not fit the run.

    Without `rollout.replay` nothing is checked. `model` is the fingerprint of the model's weights
    (`HFDir.fingerprint`), or empty if they are not on this machine.

    Raises:
        UserError: names the first file that is missing, damaged, or from a run that does not fit.
    """
    directory = config.rollout.replay
    if directory is None:
        return
    check_saved_samples(directory)
    for step in range(1, config.num_steps + 1):
        path = step_path(directory, step)
        if not path.exists() and step_path(directory, 1).exists():
            what = f"step {step} of {config.num_steps} was not saved"
            raise UserError(what, where=str(path), fix=f"set num_steps to {step - 1}, or save more steps")
        for what, fix in _problems(read_step(path), config, vocab_size, model):
            raise UserError(what, where=str(path), fix=fix)


def other_settings(saved: SavedStep, config: Config) -> Iterator[Problem]:
    """Settings of the saved run that this run must have, and has not."""
    for name, stored, wanted in (
        ("num_prompts", len(saved.prompts), config.num_prompts),
        ("group_size", saved.group_size, config.group_size),
        ("rollout.temperature", saved.temperature, config.rollout.temperature),
    ):
        if stored != wanted:
            yield f"the samples were saved with {name} {stored}, but the run has {wanted}", f"set {name} to {stored}"


def other_filters(saved: SavedStep, config: Config) -> Iterator[Problem]:
    """Filters of the draws that differ from those of this run."""
    if saved.filters != config.rollout.filters:
        stored, wanted = (
            ", ".join(f"{name} {value:g}" for name, value in one.items()) or "no filter"
            for one in (saved.filters, config.rollout.filters)
        )
        what = f"the samples were saved with {stored}, but the run has {wanted}: log-probs are of what a filter leaves"
        yield what, "set top_p, top_k and min_p of [rollout] as they were"


def _problems(saved: SavedStep, config: Config, vocab_size: int, model: str) -> Iterator[Problem]:
    """Why a step does not fit the run: its sizes, its age, its tokens, its log-probs, its model."""
    yield from other_settings(saved, config)
    samples = saved.samples
    if config.model.moe_routing_replay and any(sample.routes is None for sample in samples):
        yield (
            "model.moe_routing_replay is true, but the samples were saved without the engine's routes",
            "save them with model.moe_routing_replay=true, or set it to false",
        )
    unrecorded = any(sample.recorded is None and sample.length for sample in samples)  # a failed episode has no tokens
    if unrecorded and not config.replays_support:  # recorded tokens tell what the filter left
        yield from other_filters(saved, config)
    if config.replays_support and unrecorded:
        yield (
            f"rollout.top_k is {config.rollout.top_k}, but the samples were saved without the tokens that it left",
            "save them with the same top_k, or set rollout.top_k to -1",
        )
    if config.algo.center and unrecorded:
        yield (
            "algo.center is true, but the samples were saved without the engine's most likely tokens",
            "save them with algo.center=true, or set it to false",
        )
    if takes_rows(config.reward) and not all(prompt.columns for prompt in saved.prompts):
        yield (
            "the reward takes the columns of the data rows, but the samples were saved without them",
            "save them with this reward or with data.keep_columns=true",
        )
    try:
        staleness((sample.version for sample in samples), saved.step - 1, config.rollout.max_staleness)
    except StaleSampleError as error:
        yield f"step {saved.step}: {error}", "raise rollout.max_staleness, or save samples of training"
    longest = max(sample.num_tokens for sample in samples)
    allowed = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > allowed:
        yield (
            f"a saved sample has {longest} tokens, but the run allows {allowed}",
            "raise data.max_prompt_tokens or rollout.max_response_tokens",
        )
    ids = [token for sample in samples for token in (*sample.prompt_ids, *sample.response_ids)]
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        yield (
            f"a saved sample has token {outside}, but the model's vocabulary has {vocab_size}",
            "use the model that the samples were drawn from, or one with the same tokenizer",
        )
    for number, sample in enumerate(samples):
        impossible = [value for value in sample.logprobs if not LOWEST_LOGPROB <= value <= ROUNDING]  # NaN, too
        ended = sample.finish_reason in ("stop", "length") and not config.rollout.environment.function
        empty = ended and not sample.response_ids  # an episode may have none
        if impossible or empty or not sample.prompt_ids:
            yield f"saved sample {number} has {f'log-prob {impossible[0]:g}' if impossible else 'no tokens'}", FIX
    if model and saved.model not in ("", model):
        yield (
            f"the samples were drawn from another model: its weights have the fingerprint {saved.model!r:.40}, "
            f"those of model.path have {model!r}",
            "set model.path to the model that the saved run started from",
        )
