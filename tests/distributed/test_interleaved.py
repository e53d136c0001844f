"""The interleaved pipeline schedule: several chunks of layers a rank, any number of microbatches of any length.

4 layers in 2 stages of 2 chunks. A sink and the metrics see each microbatch once.

Not covered: gradients (test_gradients.py), exports (test_short_ends.py), speed, more than 2 stages, experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.taps import AccumulateSink
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy, some_batches, weighted_logprob_loss
from tests.tiny import make_hf_dir


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("models") / "untied", num_hidden_layers=4)


class _Recorder(AccumulateSink):
    """Notes beginnings and ends with their chunk."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []

    def begin(self, position: int, chunk: int, batch: MicroBatch) -> None:
        self.events.append(("begin", position, chunk))

    def end(self, position: int, chunk: int) -> None:
        self.events.append(("end", position, chunk))


def observed(path: Path, count: int) -> tuple[list[tuple[str, int, int]], list[list[float]], list[list[float]]]:
    """What a sink hears, the metrics of a training pass, and those of a forward pass."""
    with layout(pp=2, vp=2) as parallel:
        policy, recorder = load_policy(path, parallel), _Recorder()
        held = {int(name.split(".")[2]) for name, _ in policy.named_parameters() if "layers" in name}
        assert held == {parallel.pp_rank, parallel.pp_rank + 2}
        loss_fn = weighted_logprob_loss(policy)
        trained = run_schedule(policy, some_batches(count), loss_fn, sink=recorder)
        forward = run_schedule(policy, some_batches(count), loss_fn, forward_only=True)
        return recorder.events, *([record["sums"].tolist() for record in records] for records in (trained, forward))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sink_and_metrics_know_the_microbatches_and_no_filler(count: int, path: Path) -> None:
    """Each microbatch goes backwards through the later chunk before the earlier one; metrics are the last stage's."""
    first, last = run_ranks(observed, 2, path, count)
    for events, _, _ in (first, last):
        begins, ends = events[::2], events[1::2]
        assert [event[1:] for event in begins] == [event[1:] for event in ends]
        for position in range(count):
            assert [chunk for _, index, chunk in begins if index == position] == [1, 0]
        assert len(begins) == 2 * count
    assert first[1] == first[2] == []
    [expected] = run_ranks(plain_metrics, 1, path, count)
    torch.testing.assert_close(last[1], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(last[2], expected, rtol=1e-12, atol=0)


def plain_metrics(path: Path, count: int) -> list[list[float]]:
    with layout() as parallel:
        policy = load_policy(path, parallel)
        records = run_schedule(policy, some_batches(count), weighted_logprob_loss(policy), forward_only=True)
        return [record["sums"].tolist() for record in records]
