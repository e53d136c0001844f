"""Speculative decoding of an engine: vLLM's options, and the batch size up to which it pays. Imports no torch.

Drafts come from the text that is there already, so no second model is needed. A step then checks several tokens of a
sequence at once. That costs nearly nothing while few sequences run, and costs time while many do. `BreakEven` measures
where that changes; scheduler.py asks it before each step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.engine.http_messages import DraftReport

Method = Literal["ngram", "suffix"]
METHODS: tuple[Method, ...] = get_args(Method)
SCHEDULER = "oblr_megatron.extras.speculation.scheduler.TailScheduler"
BELOW = "oblr_speculation_below"
"""Key of vLLM's `additional_config` with a fixed bound; None: the engine measures it."""

OPTIONS: dict[Method, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 6, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"num_speculative_tokens": 12},
}
SUFFIX_PACKAGE = "arctic_inference"

BLOCK = 4
"""Decode steps in a row that a measurement stays with or without drafts."""
ENOUGH = 16
"""Steps of each kind that a size needs before its result counts."""
WINDOW = 64
"""Newest steps of each kind that are kept, so that a result follows the policy as it changes."""
LOOK_AGAIN = 32
"""Every so many blocks of a size, one is of the kind that seemed slower."""
OUTLIER = 4.0
"""A step longer than this many medians counts as this many: the machine was busy with something else."""


def vllm_options(method: Method, below: int | None, max_num_seqs: int) -> dict[str, Any]:
    """vLLM's own options for an engine that speculates, up to `below` sequences; None: the engine measures it."""
    drafts = OPTIONS[method]["num_speculative_tokens"]
    # The scheduler overrules this table. It names both widths, so that vLLM captures CUDA graphs for both.
    table = [[1, max_num_seqs - 1, drafts], [max_num_seqs, max_num_seqs, 0]] if max_num_seqs > 1 else [[1, 1, drafts]]
    return {
        "speculative_config": {
            "method": method,
            **OPTIONS[method],
            "num_speculative_tokens_per_batch_size": table,
        },
        "scheduler_cls": SCHEDULER,
        "additional_config": {BELOW: below},
    }


def check_installed(method: str, where: str) -> None:
    """Refuse (UserError) a method without its package."""
    if method == "suffix" and find_spec(SUFFIX_PACKAGE) is None:
        what = "speculation 'suffix' needs the package arctic-inference, which is not installed"
        fix = "pip install --no-deps arctic-inference==0.3.0 (needs a C++ compiler), or choose 'ngram'"
        raise UserError(what, where=where, fix=fix)


@dataclass(slots=True)
class _Steps:
    """The newest decode steps of one size, with or without drafts."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # per sequence

    @property
    def cost(self) -> float:
        """Seconds until a sequence is one token longer."""
        most = OUTLIER * statistics.median(self.seconds)
        return sum(min(one, most) for one in self.seconds) / sum(self.tokens)


class BreakEven:
    """The most sequences of a batch that gets its tokens sooner with drafts than without, measured while sampling.

    Sizes are taken together from one power of 2 to the next (1, 2-3, 4-7, ...). A size that is not known yet alternates
    between blocks of steps with drafts and without. Then it does what was faster, and looks again now and then.
    Speculation is worth it at all sizes up to `below`, the last size before the first one that has lost.
    """

    def __init__(self, fixed: int | None = None, *, most: int) -> None:
        """Args:
        fixed: the bound, which is not measured then; None: measure it.
        most: largest number of sequences that is tried with drafts.
        """
        self._fixed, self._most = fixed, most
        self._steps: defaultdict[tuple[int, bool], _Steps] = defaultdict(_Steps)
        self._turns: dict[int, int] = {}

    @property
    def below(self) -> int:
        """The bound. Example: 7, if up to 7 sequences are faster with drafts."""
        if self._fixed is not None:
            return self._fixed
        bound = 0
        for size in sorted(self._turns):
            if not self._known(size):
                continue
            if self._steps[size, True].cost >= self._steps[size, False].cost:
                break
            bound = min(2**size - 1, self._most)
        return bound

    def choose(self, sequences: int) -> bool:
        """Whether the next step of so many sequences is to have drafts."""
        if self._fixed is not None:
            return sequences <= self._fixed
        if sequences > self._most:
            return False
        size = sequences.bit_length()
        turn = self._turns[size] = self._turns.get(size, -1) + 1
        block = turn // BLOCK
        if not self._known(size):
            return block % 2 == 0
        return (sequences <= self.below) != (block % LOOK_AGAIN == 0)

    def record(self, sequences: int, *, drafts: bool, seconds: float, tokens: int) -> None:
        """Note a decode step. One in which some sequence got no token computed a part of a prompt, and does not count.

        Args:
            sequences: of the step.
            drafts: whether the step was to have drafts. It counts as such even if none were found.
            seconds: that it took, the search for drafts included.
            tokens: that it added to all sequences together.
        """
        if tokens < sequences:
            return
        steps = self._steps[sequences.bit_length(), drafts]
        steps.seconds.append(seconds)
        steps.tokens.append(tokens / sequences)

    def _known(self, size: int) -> bool:
        """Whether enough steps of both kinds were seen."""
        return all(len(self._steps[size, drafts].seconds) >= ENOUGH for drafts in (True, False))


def metrics_of(reports: list[DraftReport]) -> dict[str, float]:
    """Metrics of all engines together; {} without engines that speculate."""
    if not reports:
        return {}
    metrics: dict[str, float] = {"rollout/speculation_below": statistics.mean(report.below for report in reports)}
    if drafts := sum(report.drafts for report in reports):
        metrics["rollout/speculation_accepted"] = sum(report.accepted for report in reports) / drafts
    return metrics
