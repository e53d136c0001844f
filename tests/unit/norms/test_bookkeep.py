"""`bookkeep` and the extra gradients never look at a value on the device, which would wait for a GPU.

Exactness is tested in tests/distributed/test_gradnorm_modes.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from oblr_megatron.model.taps import add_product
from oblr_megatron.norms.bookkeep import BookkeepSink, _KeptVectors, _Product


def on_meta(*shape: int) -> Any:
    """A tensor without values: to read one raises, as a synchronisation would wait."""
    return torch.empty(*shape, device="meta")


def test_coefficients_are_read_on_the_host() -> None:
    sink = BookkeepSink.__new__(BookkeepSink)
    weight: Any = SimpleNamespace(main_grad=on_meta(3, 4))
    alone: Any = SimpleNamespace(num_samples=1, cu_seqlens=None)
    rows: Any = SimpleNamespace(num_samples=2, cu_seqlens=None)
    packed: Any = SimpleNamespace(num_samples=2, cu_seqlens=[0, 2, 5])
    sink._kept = [
        _Product(weight, 0, alone, on_meta(5, 1, 4), on_meta(5, 1, 3)),
        _Product(weight, 1, rows, on_meta(5, 2, 4), on_meta(5, 2, 3)),
        _Product(weight, 1, packed, on_meta(5, 1, 4), on_meta(5, 1, 3)),
        _KeptVectors(weight, 1, on_meta(2, 3, 4)),
    ]
    sink.add_gradient(torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64))
    assert sink._kept == []


def test_products_of_half_precision_are_summed_in_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, kinds = torch.mm, []

    def watched(*factors: Any, **options: Any) -> Any:
        kinds.append(options.get("out_dtype"))
        return multiply(*factors, **options)

    monkeypatch.setattr(torch, "mm", watched)
    with FakeTensorMode():
        x, dy = (torch.empty(5, 1, n, dtype=torch.bfloat16, device="cuda") for n in (4, 3))
        add_product(torch.empty(3, 4, device="cuda"), x, dy, 0.5)
    assert kinds == [torch.float32]
