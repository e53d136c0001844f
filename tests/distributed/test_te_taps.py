"""Norms from factors in Transformer Engine's form: the tokens of all rows in one dimension.

A real backward's factors go through `HandOver` to the real sink. Not covered: Transformer Engine's own backward, which
needs CUDA (tests/gpu); the grouped layers of experts (tests/unit/model/test_te_taps.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.taps import Tap
from oblr_megatron.model.te_taps import HandOver
from oblr_megatron.norms.accumulate import NormAccumulator
from oblr_megatron.norms.norm_sink import NormSink
from oblr_megatron.norms.reduce import Reducer
from oblr_megatron.norms.rules import classify
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy, make_batches, weighted_logprob_loss
from tests.tiny import make_hf_dir

RTOL = 1e-10


class Flattened:
    """Passes a run's events on to another sink; linear layers go there through a `HandOver`."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.tap = inner, Tap()
        self.tap.sink = inner

    def linear(self, weight: nn.Parameter, x: Tensor, dy: Tensor, splits: Any = None) -> None:
        store = HandOver(self.tap, [weight], x.shape[1], [splits], own_outputs=True)
        assert store.delay_wgrad_compute()
        store.put([x.flatten(0, 1), dy.flatten(0, 1)], lambda *_: None)

    def __getattr__(self, name: str) -> Any:  # begin, embedding, scale, end
        return getattr(self.inner, name)


def norms(path: str, rows: int, flattened: bool) -> Tensor:
    with layout() as parallel:
        policy = load_policy(Path(path), parallel)
        policy.zero_grad()
        batches, rules, reducer = make_batches(rows), classify(policy), Reducer(parallel)
        accumulator = NormAccumulator(rules, batches, reducer)
        sink = NormSink(rules, accumulator)
        run_schedule(policy, batches, weighted_logprob_loss(policy), sink=Flattened(sink) if flattened else sink)
        return reducer.finish(accumulator)


@pytest.mark.parametrize("rows", [1, 2])
def test_norms_do_not_depend_on_who_hands_the_factors_over(tmp_path: Any, rows: int) -> None:
    path = str(make_hf_dir(tmp_path, dtype=torch.float64))
    (wanted,) = run_ranks(norms, 1, path, 1, False)
    (found,) = run_ranks(norms, 1, path, rows, True)
    assert wanted.count_nonzero() == 3  # one response is empty
    torch.testing.assert_close(found, wanted, rtol=RTOL, atol=0)
