"""One training pass: divisors, the order of microbatches, and main_grad at the end of each microbatch's backward.

Not covered: speed, recomputation (test_recompute.py), the interleaved schedule (test_interleaved.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.model.policy import Policy
from oblr_megatron.model.step import reduce_data_parallel_grads, run_schedule
from oblr_megatron.model.taps import AccumulateSink
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import RankError, layout, run_ranks
from tests.distributed.passes import assert_close, load_policy, make_batches, weighted_logprob_loss
from tests.tiny import make_hf_dir

LAYOUTS = [{"pp": 2}, {"tp": 2, "sp": True}]


def snapshot(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in policy.named_parameters()}


class _Taker(AccumulateSink):
    """Takes main_grad at the end of every microbatch."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.order: list[int] = []
        self.taken: list[dict[str, Tensor]] = []

    def begin(self, position: int, chunk: int, batch: MicroBatch) -> None:
        """The microbatch is the one of this position; nothing of it is accumulated yet."""
        assert chunk == 0
        assert batch.sample_index.tolist() == [position]
        assert all(not parameter.main_grad.any() for _, parameter in self.policy.named_parameters())
        self.order.append(position)

    def end(self, position: int, chunk: int) -> None:
        """Everything of the microbatch is there."""
        assert (position, chunk) == (self.order[-1], 0)
        self.taken.append(snapshot(self.policy))
        self.policy.zero_grad()


def separate_and_together(path: Path) -> list[tuple[list[int], list[dict[str, Tensor]], list[dict[str, Tensor]]]]:
    """The order of the ends, main_grad at each, and the gradients of passes of one microbatch each."""
    results = []
    for sizes in LAYOUTS:
        with layout(**sizes) as parallel:
            policy = load_policy(path, parallel)
            loss_fn, batches = weighted_logprob_loss(policy), make_batches()
            separate = []
            for batch in batches:
                policy.zero_grad()
                run_schedule(policy, [batch], loss_fn)
                separate.append(snapshot(policy))
            policy.zero_grad()
            taker = _Taker(policy)
            run_schedule(policy, batches, loss_fn, sink=taker)
            assert all(not parameter.main_grad.any() for _, parameter in policy.named_parameters())
            results.append((taker.order, taker.taken, separate))
    return results


def test_sink_finds_exactly_its_microbatch_between_begin_and_end(tmp_path: Path) -> None:
    """Also with several microbatches in flight, and for a sample with loss 0."""
    path = make_hf_dir(tmp_path / "model", tied=True)
    for rank in run_ranks(separate_and_together, 2, path):
        for order, together, separate in rank:
            assert order == [0, 1, 2, 3]
            for index in range(4):
                for name, gradient in separate[index].items():
                    assert_close(together[index][name], gradient, (index, name), rtol=1e-12)


class _Recorder(AccumulateSink):
    """Notes beginnings and ends."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def begin(self, position: int, chunk: int, batch: MicroBatch) -> None:
        self.events.append(f"B{position}")

    def end(self, position: int, chunk: int) -> None:
        self.events.append(f"E{position}")


def events_of_stage(path: Path) -> list[str]:
    """Forwards and backwards of a pipeline stage, in the order they happen."""
    with layout(pp=2) as parallel:
        policy = load_policy(path, parallel)
        events: list[str] = []
        policy.modules[0].register_forward_hook(lambda *_: events.append("F"))
        run_schedule(policy, make_batches(), weighted_logprob_loss(policy), sink=_Recorder(events))
        return events


def test_pipeline_stages_interleave_forwards_and_backwards(tmp_path: Path) -> None:
    """The first of two stages is one forward ahead, the hard case for the sink."""
    first, last = run_ranks(events_of_stage, 2, make_hf_dir(tmp_path / "model"))
    assert first == ["F", "F", "B0", "E0", "F", "B1", "E1", "F", "B2", "E2", "B3", "E3"]
    assert last == ["F", "B0", "E0", "F", "B1", "E1", "F", "B2", "E2", "F", "B3", "E3"]


def metrics_and_effects(path: Path) -> tuple[list[list[float]], bool, bool]:
    with layout(pp=dist.get_world_size()) as parallel:
        policy = load_policy(path, parallel)
        loss_fn = weighted_logprob_loss(policy)
        events: list[str] = []
        metrics = run_schedule(policy, make_batches(), loss_fn, forward_only=True, sink=_Recorder(events))
        assert not events
        clean = all(not parameter.main_grad.any() for _, parameter in policy.named_parameters())
        return [record["sums"].tolist() for record in metrics], clean, run_schedule(policy, [], loss_fn) == []


def test_forward_only_returns_metrics_in_order_and_no_gradient(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path / "model")
    [(expected, clean, nothing)] = run_ranks(metrics_and_effects, 1, path)
    assert clean
    assert nothing
    assert len(expected) == 4
    assert expected[1] == [0.0]  # the sample without response
    (first, *_), (last, *_) = run_ranks(metrics_and_effects, 2, path)
    assert first == []  # metrics are the last stage's
    torch.testing.assert_close(last, expected, rtol=1e-12, atol=0)


def uneven_replicas(path: Path) -> dict[str, Tensor]:
    """Replica 0 runs three microbatches, replica 1 one."""
    with layout() as parallel:
        policy = load_policy(path, parallel)
        batches = make_batches()
        run_schedule(policy, batches[:3] if parallel.dp_rank == 0 else batches[3:], weighted_logprob_loss(policy))
        reduce_data_parallel_grads(policy)
        return snapshot(policy)


def all_at_once(path: Path) -> dict[str, Tensor]:
    with layout() as parallel:
        policy = load_policy(path, parallel)
        run_schedule(policy, make_batches(), weighted_logprob_loss(policy))
        return snapshot(policy)


def test_replicas_may_run_different_numbers_of_microbatches(tmp_path: Path) -> None:
    """Nothing is divided by these numbers."""
    path = make_hf_dir(tmp_path / "model")
    [expected] = run_ranks(all_at_once, 1, path)
    for rank in run_ranks(uneven_replicas, 2, path):
        for name, gradient in expected.items():
            assert_close(rank[name], gradient, name, rtol=1e-12)


def constant_loss(path: Path) -> None:
    with layout() as parallel:
        policy = load_policy(path, parallel)

        def loss_fn(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return torch.zeros(()), {}

        run_schedule(policy, make_batches(), loss_fn)


def test_a_loss_without_the_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="depends on the output"):
        run_ranks(constant_loss, 1, make_hf_dir(tmp_path / "model"))
