"""What the TransformerConfig of a GPU sets up besides its fields. Not covered: the kernels that a GPU compiles."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

NAMES = ("recompile_limit", "compile_threads")
SIZES = ((16, 1), (24, 1), (40, 1), (16, 3), (24, 2), (77, 5), (100, 1))  # tokens, rows


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    before = torch._dynamo.config.recompile_limit, torch._inductor.config.compile_threads
    yield
    for config, name, value in zip((torch._dynamo, torch._inductor), NAMES, before, strict=True):
        config.config._config[name].default = value
    torch._dynamo.reset()


def test_every_kind_of_microbatch_has_a_compiled_form() -> None:
    """Lengths, rows, the strides of the first layer's input, and passes with and without gradients.

    They run in a second thread, as a GPU's recomputation does. There, torch's settings are other ones than here.
    """
    parallel = initialize(ParallelConfig())
    try:
        options = ModelConfig(path=Path("unused"), transformer_impl="local")
        transformer_config_of(tiny_config(), options, replace(parallel, device=torch.device("cuda")))
    finally:
        shutdown()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pass_every_kind).result()
        assert thread.submit(lambda: torch._inductor.config.compile_threads).result() == 1, "no process of torch's own"
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 8


def pass_every_kind() -> None:
    add = torch.compile(bias_dropout_add_fused_train._torchdynamo_orig_callable, backend="eager")
    for (tokens, rows), turned, gradients, needs in product(SIZES, *3 * [(True, False)]):
        shape = (rows, tokens, 64) if turned else (tokens, rows, 64)
        residual = torch.randn(shape).transpose(0, 1) if turned else torch.randn(shape)
        x = torch.randn(tokens, rows, 64, requires_grad=needs)
        for base in (True, False):
            with torch.set_grad_enabled(gradients):
                add((x, None), residual.detach().requires_grad_(base), 0.0)
