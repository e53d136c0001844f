"""With activations computed again in backward, a sink still gets every event once, and a mixture's gradient is the
same.

Core attention, norms and MLPs, whole layers in groups and as a block; 4 layers. A mixture of experts is compared with
itself without recomputation, fp64, relative 1e-10.

Not covered: gradients of dense models (test_gradients.py), the memory saved, dropout's random states (dropout is 0),
Transformer Engine (and so "moe_act").
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.lm_head import HeadFactors
from oblr_megatron.model.policy import Policy
from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.taps import AccumulateSink, Splits
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    Outcome,
    assert_close,
    load_policy,
    make_batches,
    reduced_gradients,
    weighted_logprob_loss,
)
from tests.distributed.test_gradients import OPTIONS
from tests.tiny import make_hf_dir, make_moe_hf_dir

# core attentions, MLPs, norms before them, whole layers
RERUNS = {
    "no recomputation": (0, 0, 0, 0),
    "selective": (4, 0, 0, 0),
    "modules": (0, 4, 4, 0),
    "uniform": (4, 4, 4, 4),
    "block": (1, 1, 1, 1),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("models") / "tied", tied=True, num_hidden_layers=4)


class _Recorder(AccumulateSink):
    """Notes every call; an event outside of its microbatch is an error."""

    def __init__(self) -> None:
        self.current: int | None = None
        self.order: list[int] = []
        self.counts: list[int] = []

    def begin(self, position: int, chunk: int, batch: MicroBatch) -> None:
        assert self.current is None, f"microbatch {position} begins inside {self.current}"
        self.current = position
        self.order.append(position)
        self.counts.append(0)

    def linear(self, weight: nn.Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        self._note()
        super().linear(weight, x, dy, splits)

    def head(self, factors: HeadFactors, rows: slice, dy: Tensor) -> None:
        assert self.current is not None
        if rows.start == 0:
            self._note()
        super().head(factors, rows, dy)

    def embedding(self, weight: nn.Parameter, rows: Tensor, dy: Tensor) -> None:
        self._note()
        super().embedding(weight, rows, dy)

    def scale(self, weight: nn.Parameter, terms: Tensor) -> None:
        self._note()
        super().scale(weight, terms)

    def end(self, position: int, chunk: int) -> None:
        assert self.current == position
        self.current = None

    def _note(self) -> None:
        assert self.current is not None, "a weight gradient before its microbatch began, or after its end"
        self.counts[-1] += 1


def observed(path: Path) -> dict[str, tuple[list[int], list[int], tuple[int, ...]]]:
    """Microbatches in order, weight gradients of each, and the number of repeated runs of the counted modules."""
    results = {}
    for name, options in OPTIONS.items():
        with layout() as parallel:
            policy, recorder = load_policy(path, parallel, options), _Recorder()
            counters = _count_forwards(policy)
            run_schedule(policy, make_batches(), weighted_logprob_loss(policy), sink=recorder)
            reruns = tuple(len(counter) // len(make_batches()) - 4 for counter in counters)
            results[name] = recorder.order, recorder.counts, reruns
    return results


def _count_forwards(policy: Policy) -> tuple[list[int], ...]:
    counters: tuple[list[int], ...] = ([], [], [], [])
    for layer in policy.modules[0].decoder.layers:
        modules = (layer.self_attention.core_attention, layer.mlp, layer.pre_mlp_layernorm, layer)
        for module, counter in zip(modules, counters, strict=True):
            module.register_forward_hook(lambda *_, counter=counter: counter.append(1))
    return counters


def test_a_sink_gets_everything_between_begin_and_end(path: Path) -> None:
    """4 linear layers and 4 norms a layer, the final norm, embedding and output layer, with any recomputation."""
    [results] = run_ranks(observed, 1, path)
    for name, (order, counts, reruns) in results.items():
        assert order == [0, 1, 2, 3], name
        assert counts == [4 * 8 + 3] * 4, name
        assert reruns == RERUNS[name], name


def experts_again(path: Path) -> tuple[list[tuple[dict[str, Tensor], float]], int]:
    """Gradients without recomputation and with it, and the number of repeated runs of the mixtures."""
    mixtures = ParallelConfig(recompute_granularity="selective", recompute_modules=("moe", "layernorm"))
    results, runs = [], []
    for options in (ParallelConfig(), mixtures):
        with layout(ep=2) as parallel:
            policy = load_policy(path, parallel, options)
            for layer in policy.modules[0].decoder.layers:
                layer.mlp.experts.register_forward_hook(lambda *_: runs.append(1))
            results.append(reduced_gradients(policy, make_batches()))
    forwards = 2 * len(make_batches()) // 2  # layers, microbatches of a rank
    return results, len(runs) - 2 * forwards


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    for (plain, again), reruns in run_ranks(experts_again, 2, make_moe_hf_dir(tmp_path / "moe")):
        assert reruns == 4
        assert_outcomes_equal(again, plain)


def assert_outcomes_equal(found: Outcome, expected: Outcome) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-10)
    assert found[0].keys() == expected[0].keys()
    for name, gradient in expected[0].items():
        assert_close(found[0][name], gradient, name)
