"""FLOP/s, memory and bandwidth of GPUs by name, from NVIDIA's data sheets.

FLOP/s are dense; data sheets often give twice as much, with structured sparsity. Link bandwidths count one direction;
NVLink data sheets add both. GB are 1e9 bytes. Sources: data sheets of A100, H100, H200, H20, B200 (DGX B200),
GB200 NVL72 and L40S; for links between nodes, those of the DGX of that generation, with one network card per GPU of
200 Gbit/s (A100) or 400 Gbit/s (later).

    device_named("H100").bf16_tflops        # 989.4
    this_device()                           # the Device of this process's GPU; None on a CPU or an unknown GPU
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from oblr_megatron.errors import UserError


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its links. Example: Device("h100", 989.4, 1978.9, 80, 3350, 450, 50, 8)."""

    name: str
    bf16_tflops: float  # 1e12 FLOP/s, dense
    fp8_tflops: float | None  # None: no FP8 support
    memory_gb: float  # 1e9 bytes; drivers report slightly less
    memory_gb_s: float  # 1e9 bytes/s
    intra_node_gb_s: float  # 1e9 bytes/s of one GPU to the others of its node, one direction
    inter_node_gb_s: float  # 1e9 bytes/s of one GPU to other nodes, one direction
    gpus_per_node: int
    driver_name: str = ""  # pattern for words of torch.cuda.get_device_name(), in any case

    @property
    def memory_bytes(self) -> int:
        """memory_gb in bytes."""
        return int(self.memory_gb * 1e9)


DEVICES: tuple[Device, ...] = (
    Device("a100-80gb", 312.0, None, 80, 2039, 300, 25, 8, "A100-SXM4-80GB|A100 80GB PCIe"),
    Device("a100-40gb", 312.0, None, 40, 1555, 300, 25, 8, "A100-(SXM4|PCIE)-40GB"),
    Device("h100", 989.4, 1978.9, 80, 3350, 450, 50, 8, r"H100(?! (NVL|PCIe)\b)"),  # SXM5
    Device("h100-nvl", 835.5, 1670.5, 94, 3900, 300, 50, 8, "H100 NVL"),  # PCIe, bridged in pairs
    Device("h100-pcie", 756.5, 1513.0, 80, 2000, 64, 50, 8, "H100 PCIe"),
    Device("h800", 989.4, 1978.9, 80, 3350, 200, 50, 8, "H800"),
    Device("h20", 148.0, 296.0, 96, 4000, 450, 50, 8, "H20"),
    Device("h200", 989.4, 1978.9, 141, 4800, 450, 50, 8, r"H200(?! NVL\b)"),
    Device("h200-nvl", 835.5, 1670.5, 141, 4800, 450, 50, 8, "H200 NVL"),  # PCIe, bridged in fours
    Device("b200", 2250.0, 4500.0, 180, 8000, 900, 50, 8, "B200"),
    Device("gb200", 2500.0, 5000.0, 186, 8000, 900, 50, 4, "GB200"),  # a node is one tray of an NVL72
    Device("l40s", 362.0, 733.0, 48, 864, 32, 25, 8, "L40S"),
)

_OTHER_NAMES = {"a100": "a100-80gb"}


def device_named(name: str) -> Device:
    """A device by its name in DEVICES, ignoring case ("H100", "a100-80gb").

    Raises:
        UserError: the name is unknown.
    """
    wanted = name.strip().lower().replace("_", "-")
    wanted = _OTHER_NAMES.get(wanted, wanted)
    by_name = {device.name: device for device in DEVICES}
    if wanted not in by_name:
        raise UserError(f"unknown device {name!r}", where="device", fix=f"use one of {', '.join(by_name)}")
    return by_name[wanted]


def device_of_driver(driver_name: str) -> Device | None:
    """The device with this driver name, e.g. "NVIDIA H100 80GB HBM3"; None for others and for slices (MIG)."""
    if " MIG " in driver_name:
        return None
    fits = (device for device in DEVICES if re.search(rf"\b({device.driver_name})\b", driver_name, re.IGNORECASE))
    return next(fits, None)


def this_device() -> Device | None:
    """This process's GPU; None if there is none or it is not in DEVICES."""
    import torch

    return device_of_driver(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
