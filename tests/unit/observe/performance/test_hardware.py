"""Devices by name. Not covered: real GPUs' names, and whether they reach their data sheets' numbers."""

from __future__ import annotations

import pytest

from oblr_megatron.errors import UserError
from oblr_megatron.observe.performance.hardware import DEVICES, device_named, device_of_driver, this_device


def test_a_device_is_found_by_its_name_in_any_case() -> None:
    assert device_named("H100").bf16_tflops == pytest.approx(989.4)
    assert device_named("A100").name == "a100-80gb"
    assert device_named("H100").memory_bytes == 80 * 10**9
    for device in DEVICES:
        assert device_named(device.name) is device


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="'h9000'") as error:
        device_named("h9000")
    assert all(device.name in error.value.fix for device in DEVICES)


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_a_driver_s_name_is_understood(driver_name: str, name: str | None) -> None:
    found = device_of_driver(driver_name)
    assert (found and found.name) == name


def test_fp8_is_twice_bf16_where_there_is_any() -> None:
    """A mix-up of dense and sparse numbers would show."""
    for device in DEVICES:
        assert device.fp8_tflops is None or device.fp8_tflops == pytest.approx(2 * device.bf16_tflops, rel=0.02)


def test_this_machine_without_a_gpu_has_no_device() -> None:
    import torch

    assert torch.cuda.is_available() or this_device() is None
