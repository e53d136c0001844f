"""Norms and policy gradient out of one forward and backward: `bookkeep`, `stash`, and `stash` over several replicas.

Each pass takes whole prompts, adds the gradient of their samples to `main_grad` and reports the norms on the way. The
coefficients of a prompt's samples are asked for as soon as the norms of its group are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.data.packing import microbatches, one_per_microbatch
from oblr_megatron.gradient.bookkeep import BookkeepSink
from oblr_megatron.gradient.buffer import GradientBuffer, add_weighted
from oblr_megatron.gradient.loss_fn import PassMetrics, RatioFn, score_loss
from oblr_megatron.gradient.stash import StashSink
from oblr_megatron.gradient.two_pass import rules_need_single_samples
from oblr_megatron.gradnorm.accumulate import NormAccumulator
from oblr_megatron.gradnorm.reduce import Reducer
from oblr_megatron.gradnorm.rules import Kind, Rule, classify
from oblr_megatron.memory.pass_plan import stash_count
from oblr_megatron.model.step import run_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.gradnorm.sketch import Sketches
    from oblr_megatron.model.qwen3 import Policy
    from oblr_megatron.types import MicroBatch, Sample

AdvantageFn = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""Positions of k prompts and their samples' norms w [k, G] -> coefficients c [k, G], fp64 on the CPU."""


@dataclass(slots=True)
class Work:
    """What a step gives to a pass, and what comes back: made anew for every step."""

    samples: Sequence[Sample]  # [N]
    coefficients_of: AdvantageFn
    ratios: RatioFn
    norms_sq: Tensor  # [N] fp64 on the CPU, filled in by the replica that has the sample
    metrics: PassMetrics


class BookkeepPass:
    """`bookkeep`: as many prompts together as `window_tokens` allows, several samples a microbatch."""

    def __init__(self, policy: Policy, config: Config, sketches: Sketches | None = None) -> None:
        self._policy, self._config, self._sketches = policy, config, sketches
        self._rules = classify(policy)
        self._reducer = Reducer(policy.parallel)

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """main_grad += the gradient of these samples, those of whole prompts in prompt-major order."""
        for window in self._windows(work.samples, indices):
            batches = self._batches(work.samples, window)
            accumulator = NormAccumulator(self._rules, batches, self._reducer)
            sink = BookkeepSink(self._rules, accumulator, self._sketches)
            with untapped_aside(self._rules):
                records = self._run(work, batches, sink)
                order = torch.cat([batch.sample_index for batch in batches]).cpu()
                work.norms_sq[order] = self._reducer.finish(accumulator).cpu()
            coefficients = torch.zeros_like(work.norms_sq)
            coefficients[window] = _weighted(work, window, self._config.group_size)
            work.metrics.add(records, coefficients[order])
            sink.add_gradient(coefficients[order])

    def _run(self, work: Work, batches: list[MicroBatch], sink: BookkeepSink) -> list[dict[str, Tensor]]:
        loss_of = score_loss(self._policy, self._config.rollout.temperature, work.ratios, records=True)
        return run_schedule(self._policy, batches, loss_of, sink=sink)

    def _batches(self, samples: Sequence[Sample], window: Sequence[int]) -> list[MicroBatch]:
        device = self._policy.parallel.device
        if rules_need_single_samples(self._rules):
            return one_per_microbatch(samples, window, device=device)
        return microbatches(samples, window, self._config.parallel, self._policy.padding, device=device)

    def _windows(self, samples: Sequence[Sample], indices: Sequence[int]) -> Iterator[list[int]]:
        """Whole prompts, together no more than `window_tokens` tokens; at least one."""
        window: list[int] = []
        held = 0
        for prompt in _groups(indices, self._config.group_size):
            tokens = sum(len(samples[n].prompt_ids) + len(samples[n].response_ids) for n in prompt)
            if window and held + tokens > self._config.gradnorm.window_tokens:
                yield window
                window, held = [], 0
            window, held = window + prompt, held + tokens
        if window:
            yield window


class StashPass:
    """`stash`, the samples of a prompt on one replica: a buffer for each of them."""

    def __init__(self, policy: Policy, config: Config, buffers: StashBuffers) -> None:
        self._policy, self._config, self._buffers = policy, config, buffers
        self._rules = classify(policy)
        self._reducer = Reducer(policy.parallel)

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """main_grad += the gradient of these samples, those of whole prompts in prompt-major order."""
        loss_of = score_loss(self._policy, self._config.rollout.temperature, work.ratios, records=True)
        made_in, kept = self._buffers.take()
        for prompt in _groups(indices, self._config.group_size):
            batches = one_per_microbatch(work.samples, prompt, device=self._policy.parallel.device)
            accumulator = NormAccumulator(self._rules, batches, self._reducer, squares_rows=False)
            with untapped_aside(self._rules):
                sink = StashSink(self._rules, accumulator, kept, made_in)
                records = run_schedule(self._policy, batches, loss_of, sink=sink)
                work.norms_sq[prompt] = self._reducer.finish(accumulator).cpu()
            coefficients = _weighted(work, prompt, self._config.group_size)
            work.metrics.add(records, coefficients)
            add_weighted(self._policy, kept, coefficients.tolist())


@dataclass(slots=True)
class _Pending:
    """A prompt whose samples are stashed and whose norms are on their way."""

    prompt: int
    own: list[int]  # this replica's samples of it
    buffers: list[GradientBuffer]
    records: list[dict[str, Tensor]]
    gathered: Tensor  # [share, G / share] fp64
    arrival: dist.Work | None


class SpreadStashPass:
    """`stash`, the samples of a prompt dealt to the S replicas of a group: G / S buffers on each, and some more.

    Norms are exchanged by an all-gather that nobody waits for: a replica goes on with the next prompt as long as it has
    a free buffer, and settles a prompt when its norms have arrived. Replica r has the samples r, r + S, ... of each.
    """

    def __init__(self, policy: Policy, config: Config, buffers: StashBuffers, group: dist.ProcessGroup) -> None:
        self._policy, self._config, self._buffers, self._group = policy, config, buffers, group
        self._rules = classify(policy)
        self._reducer = Reducer(policy.parallel)

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """main_grad += the gradient of these samples: this replica's of whole prompts, in prompt-major order."""
        share = self._config.group_size // self._group.size()
        pending: deque[_Pending] = deque()
        made_in, free = self._buffers.take()
        for own in _groups(indices, share):
            while pending and (len(free) < share or _arrived(pending[0])):
                free += self._settle(work, pending.popleft())
            pending.append(self._stash(work, own, [free.pop() for _ in own], made_in))
        while pending:
            self._settle(work, pending.popleft())

    def _stash(
        self, work: Work, own: list[int], buffers: list[GradientBuffer], made_in: GradientBuffer | None
    ) -> _Pending:
        """Backward of this replica's samples of one prompt, into the buffers; their norms set out."""
        batches = one_per_microbatch(work.samples, own, device=self._policy.parallel.device)
        accumulator = NormAccumulator(self._rules, batches, self._reducer, squares_rows=False)
        loss_of = score_loss(self._policy, self._config.rollout.temperature, work.ratios, records=True)
        with untapped_aside(self._rules):
            sink = StashSink(self._rules, accumulator, buffers, made_in)
            records = run_schedule(self._policy, batches, loss_of, sink=sink)
            norms = self._reducer.finish(accumulator)
        work.norms_sq[own] = norms.cpu()
        gathered = norms.new_zeros(self._group.size(), len(own))
        arrival = dist.all_gather(list(gathered), norms.contiguous(), group=self._group, async_op=True)
        return _Pending(own[0] // self._config.group_size, own, buffers, records, gathered, arrival)

    def _settle(self, work: Work, item: _Pending) -> list[GradientBuffer]:
        """Wait for the other replicas' norms, add the stashed gradients; their buffers are free again."""
        if item.arrival is not None:
            item.arrival.wait()
        group = item.gathered.t().flatten()  # sample j of the prompt is number j // S of replica j % S
        coefficients = work.coefficients_of([item.prompt], group[None].cpu())[0]
        own = coefficients[dist.get_rank(self._group) :: self._group.size()]
        work.metrics.add(item.records, own)
        add_weighted(self._policy, item.buffers, own.tolist())
        return item.buffers


class StashBuffers:
    """A gradient's memory for each sample that is stashed, taken when first asked for and kept from step to step.

    Between steps it can be given back, to engines that share the device.
    """

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy, self._count = policy, stash_count(config)
        device = policy.parallel.device
        made_in = policy.chunks[0].buffers[0].grad_data.dtype
        self._kept_on = torch.device("cpu") if config.gradnorm.stash_offload else device
        self._dtype = made_in if made_in == torch.float64 else getattr(torch, config.gradnorm.stash_dtype)
        self._as_made = self._dtype == made_in and self._kept_on.type == device.type
        self._kept: list[GradientBuffer] = []
        self._made_in: GradientBuffer | None = None

    def take(self) -> tuple[GradientBuffer | None, list[GradientBuffer]]:
        """The buffer in which gradients are made, if it is not one of those they are kept in, and the latter."""
        missing = self._count - len(self._kept)
        self._kept += [GradientBuffer(self._policy, self._dtype, self._kept_on) for _ in range(missing)]
        if self._made_in is None and not self._as_made:
            self._made_in = GradientBuffer(self._policy)
        return self._made_in, list(self._kept)

    def release(self) -> None:
        """Let go of what is on the device; what is in host memory stays, since pinning it again would take long."""
        self._made_in = None
        if self._kept_on.type == self._policy.parallel.device.type:
            self._kept = []


@contextmanager
def untapped_aside(rules: Sequence[Rule]) -> Iterator[None]:
    """Take the policy gradient so far out of `main_grad` where samples' own gradients are made there, and add it back.

    Inside, `main_grad` of what is not tapped is zero but for the sample in work.
    """
    grads = [rule.grad for rule in rules if not rule.tapped and rule.kind is not Kind.FROZEN]
    before = [grad.clone() for grad in grads]
    for grad in grads:
        grad.zero_()
    yield
    for grad, value in zip(grads, before, strict=True):
        grad.add_(value)


def _groups(indices: Sequence[int], size: int) -> list[list[int]]:
    """Cut prompt-major samples into prompts."""
    assert len(indices) % size == 0, f"{len(indices)} samples are not whole prompts of {size}"
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def _weighted(work: Work, indices: Sequence[int], group_size: int) -> Tensor:
    """c [n] of the samples of whole prompts."""
    prompts = [group[0] // group_size for group in _groups(indices, group_size)]
    return work.coefficients_of(prompts, work.norms_sq[list(indices)].view(-1, group_size)).flatten()


def _arrived(item: _Pending) -> bool:
    return item.arrival is None or item.arrival.is_completed()
