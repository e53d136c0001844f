"""Padding: each rank gets whole blocks within the token budget, and the memory estimate counts the same tokens.

Not covered: that Transformer Engine accepts these multiples (tests/gpu).
"""

from __future__ import annotations

from math import lcm
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.data.packing import microbatches, one_per_microbatch
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.model.published import published
from oblr_megatron.model.sequence import local_part
from oblr_megatron.padding import FP8_GATHERED_TOKENS, FP8_TOKENS, Padding, padding_of
from oblr_megatron.types import Sample
from tests.unit.configs import config_with

RECIPES = get_args(ModelConfig.model_fields["fp8_recipe"].annotation)
layouts = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 8]), st.booleans())


def test_every_recipe_has_its_multiples() -> None:
    assert set(RECIPES) == set(FP8_TOKENS) == set(FP8_GATHERED_TOKENS)


@given(layouts, st.sampled_from([None, *RECIPES]), st.integers(1, 5000))
def test_every_rank_gets_whole_blocks(layout: tuple[int, int, bool], recipe: str | None, length: int) -> None:
    tp, cp, sequence_parallel = layout
    padding = Padding.of(tp_size=tp, cp_size=cp, sequence_parallel=sequence_parallel, recipe=recipe)
    padded = padding.rounded(length)
    assert length <= padded < length + padding.row and padding.row % padding.sample == 0
    of_rank, split = padded // cp, tp if sequence_parallel else 1
    assert padded % cp == 0 and of_rank % split == 0 and (cp == 1 or padded % (2 * cp) == 0)
    if recipe is not None:
        assert of_rank % FP8_TOKENS[recipe] == 0
        if split > 1:
            assert of_rank // split % FP8_GATHERED_TOKENS[recipe] == 0


def test_rows_of_transformer_engine_have_few_lengths() -> None:
    rows = ParallelConfig(packing="rows", context_parallel_size=3)
    model = ModelConfig(path="model")
    assert padding_of(model, rows, transformer_engine=True).row == 384
    assert len({padding_of(model, ParallelConfig(), transformer_engine=True).rounded(n) for n in range(1, 9217)}) == 72
    assert padding_of(model, rows).row == 6
    packed = ParallelConfig(packing="packed")  # its norm pass has one sample in a row
    assert padding_of(model, packed, transformer_engine=True).row == 128


@pytest.mark.parametrize(
    ("sizes", "recipe", "row"),
    [
        ((1, 1, False), None, 1),
        ((2, 2, True), None, 8),
        ((1, 1, False), "tensorwise", 16),
        ((8, 1, True), "tensorwise", 64),  # 8 on each rank
        ((2, 1, True), "tensorwise", 16),
        ((8, 1, True), "blockwise", 1024),
        ((8, 1, False), "blockwise", 16),
        ((1, 2, False), "mxfp8", 64),
        ((4, 1, True), "mxfp8", 128),
    ],
)
def test_known_multiples(sizes: tuple[int, int, bool], recipe: str | None, row: int) -> None:
    tp, cp, sequence_parallel = sizes
    assert Padding.of(tp_size=tp, cp_size=cp, sequence_parallel=sequence_parallel, recipe=recipe).row == row


def sample(length: int) -> Sample:
    return Sample(0, tuple(range(1, length + 1)), (5,), (-1.0,), "", "stop", 0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), layouts, st.booleans(), st.integers(1, 200))
def test_the_bound_on_tokens_holds_after_padding(
    lengths: list[int], layout: tuple[int, int, bool], packed: bool, bound: int
) -> None:
    tp, cp, sequence_parallel = layout
    options = ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel,
        packing="packed" if packed else "rows",
        micro_batch_tokens=bound,
    )
    padding = Padding.of(tp_size=tp, cp_size=cp, sequence_parallel=sequence_parallel, recipe="tensorwise")
    samples = [sample(length) for length in lengths]
    of_first: Any = SimpleNamespace(tp_size=tp, cp_size=cp, cp_rank=0, sequence_parallel=sequence_parallel)
    batches = microbatches(samples, range(len(samples)), options, padding)
    for batch in batches:
        part = local_part(of_first, batch, padding)
        rows, width = part.input_ids.shape
        assert width % 16 == 0 and width * cp % padding.row == 0
        assert batch.num_samples == 1 or rows * width * cp <= bound
        assert int(part.mask.sum()) <= int(batch.mask.sum()), "padding counts for nothing"
    assert sorted(n for batch in batches for n in batch.sample_index.tolist()) == list(range(len(samples)))


def test_a_padded_microbatch_holds_the_tokens_and_zeros() -> None:
    [batch] = one_per_microbatch([sample(5)], [0])
    alone: Any = SimpleNamespace(tp_size=1, cp_size=1, cp_rank=0, sequence_parallel=False)
    part = local_part(alone, batch, Padding.of(tp_size=1, cp_size=1, sequence_parallel=False, recipe="mxfp8"))
    assert part.input_ids.shape == (1, 32)
    for name in ("input_ids", "labels", "mask", "rollout_logprobs"):
        assert torch.equal(getattr(part, name)[:, :5], getattr(batch, name)), name
        assert not getattr(part, name)[:, 5:].any(), name


def test_the_memory_estimate_counts_the_padding() -> None:
    config = config_with(
        model={"dtype": "bfloat16", "fp8": "hybrid", "fp8_recipe": "blockwise"},
        parallel={"tensor_model_parallel_size": 4, "sequence_parallel": True},
    )
    sizes = RankSizes.of(published("Qwen3-8B"), config, stage=0)
    tokens = sizes.tokens(rows=2, length=700)
    assert padding_of(config.model, config.parallel).row == lcm(4 * 128, 16) == 512
    assert (tokens.length, tokens.split) == (1024, 512)
