"""Where the fields of a microbatch are during a pass. Padding and cuts: tests/distributed/test_context_parallel.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from oblr_megatron.data.packing import one_per_microbatch
from oblr_megatron.model.sequence import for_loss, on_device
from oblr_megatron.types import Sample

META = torch.device("meta")


def test_recorded_tokens_stay_in_host_memory_until_the_loss() -> None:
    """There may be a thousand for each token, and a pass holds all its microbatches on the device."""
    (plain,) = one_per_microbatch([Sample(0, (1, 2), (3, 4), (-1.0, -1.0), "", "stop", 0)], [0])
    shape = (*plain.labels.shape, 5)
    batch = replace(plain, recorded_ids=torch.zeros(shape, dtype=torch.int32), recorded_logprobs=torch.zeros(shape))
    moved = on_device(batch, META)
    assert moved.input_ids.is_meta and moved.rollout_logprobs.is_meta
    assert moved.recorded_ids is not None and not moved.recorded_ids.is_meta
    whole = for_loss(moved, META)
    assert whole.recorded_ids is not None and whole.recorded_ids.is_meta
    assert whole.recorded_logprobs is not None and whole.recorded_logprobs.is_meta
    assert for_loss(on_device(plain, META), META).recorded_ids is None
