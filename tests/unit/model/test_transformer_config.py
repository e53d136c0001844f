"""What the TransformerConfig of a GPU sets up besides its fields. Not covered: the kernels that a GPU compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from torch._dynamo.utils import counters

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.transformer_config import transformer_config_of
from tests.tiny import tiny_config

SIZES = ((16, 1), (24, 1), (40, 1), (16, 3), (24, 2), (77, 5), (100, 1))  # tokens, rows


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def test_every_kind_of_microbatch_has_a_compiled_form() -> None:
    """Lengths, rows, the strides of the first layer's input, and passes with and without gradients."""
    parallel = initialize(ParallelConfig())
    try:
        options = ModelConfig(path=Path("unused"), transformer_impl="local")
        transformer_config_of(tiny_config(), options, replace(parallel, device=torch.device("cuda")))
    finally:
        shutdown()
    add = torch.compile(bias_dropout_add_fused_train._torchdynamo_orig_callable, backend="eager")
    for (tokens, rows), turned, gradients, needs in product(SIZES, *3 * [(True, False)]):
        shape = (rows, tokens, 64) if turned else (tokens, rows, 64)
        residual = torch.randn(shape).transpose(0, 1) if turned else torch.randn(shape)
        x = torch.randn(tokens, rows, 64, requires_grad=needs)
        for base in (True, False):
            with torch.set_grad_enabled(gradients):
                add((x, None), residual.detach().requires_grad_(base), 0.0)
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 8
