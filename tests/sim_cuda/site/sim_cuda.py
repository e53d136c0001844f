"""The simulated CUDA device in Python: torch.cuda's own functions on answers of device.cpp instead of CUDA's.

`sitecustomize.py` installs it before torch is used. `waits` counts every wait of the host for the device, by its kind
and by the innermost function of Python outside of torch. Operations on more than SIM_CUDA_LIMIT elements are not
computed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections import Counter
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.nn.attention import bias

COUNT, MEMORY = 8, int(79.1 * 2**30)
PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "total_memory": MEMORY,
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block_optin": 232448,
    "L2_cache_size": 50 * 2**20,
    "gcnArchName": "",
    "is_integrated": 0,
}
waits: Counter[tuple[str, str]] = Counter()
"""(what waits, where) -> how often. Example: ("item", "oblr_megatron/model/optimizer.py clip") -> 1"""


def _compiled() -> Any:
    """The module of device.cpp."""
    spec = importlib.util.spec_from_file_location("sim_cuda_device", os.environ["SIM_CUDA_LIBRARY"])
    assert spec is not None and spec.loader is not None, "SIM_CUDA_LIBRARY names no module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _compiled()


def place(frame: FrameType | None) -> str:
    """File and name of the innermost function that is neither torch's nor this module's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__ and not file.startswith("<"):
            short = file.rpartition("/site-packages/")[2]
            for root in ("oblr_megatron/", "tests/", "tools/"):
                short = root + short.partition(f"/{root}")[2] if f"/{root}" in short else short
            return f"{short} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"


def note(what: str) -> None:
    """Count a wait of the host for the device."""
    waits[what, place(sys._getframe(1))] += 1


class Stream(torch.Stream):
    """`torch.cuda.Stream`: work on it is done at once."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        if known:
            return super().__new__(cls, priority=priority, **known)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index))

    @property
    def cuda_stream(self) -> int:
        """The address that libraries want."""
        return int(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        """Every event has already happened."""
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """As on an H100."""
        return 0, -5


class Event(torch.Event):
    """`torch.cuda.Event`: all times are 1 ms."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> Any:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end: Any) -> float:
        """Of torch's own method only objects of exactly `torch.Event` are accepted."""
        return 1.0


class _OverGloo(type):
    """Makes a group of gloo, which finds the device's memory on the host."""

    def __call__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, c10d.ProcessGroupGloo)


class NCCL(metaclass=_OverGloo):
    """Stands in for torch's ProcessGroupNCCL; the backend is still called nccl."""

    Options = c10d.ProcessGroupNCCL.Options


class _Shared:
    """CUDA IPC by files in memory: a handle names one, and its number, which no later file has."""

    @staticmethod
    def export(storage: Any) -> tuple[Any, ...]:
        """`UntypedStorage._share_cuda_`: device, handle, bytes, offset, counter's handle and offset, event."""
        file = device.shared(storage.data_ptr())
        handle = f"/proc/{os.getpid()}/fd/{file} {os.fstat(file).st_ino}".encode()
        return storage.device.index, handle, storage.nbytes(), 0, b"", 0, b"", False

    @staticmethod
    def open(index: int, handle: bytes, size: int, *_: Any) -> Any:
        """`UntypedStorage._new_shared_cuda`"""
        memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))
        device.open_shared(memory.data_ptr(), handle.decode().split()[0])
        return memory.untyped_storage()


def _stats(index: int) -> dict[str, Any]:
    live, peak = device.live_bytes(index), device.peak_bytes(index)
    whole, blocks = {"all": {"current": live, "peak": peak}}, {"all": {"allocated": device.allocations(index)}}
    return {"allocated_bytes": whole, "reserved_bytes": whole, "allocation": blocks}


def _free_memory(index: int) -> tuple[int, int]:
    return MEMORY - device.live_bytes(index), MEMORY


def add_transformer_engine(directory: str) -> None:
    """Make the package importable from its unpacked wheel, on the `transformer_engine_torch` of this folder."""
    sys.path.append(directory)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then loads no library
    with warnings.catch_warnings(action="ignore"):  # about its own C++ module
        common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    onnx: Any = ModuleType("transformer_engine.pytorch.onnx_extensions")  # for exports, with packages of its own
    onnx.__getattr__ = lambda name: None
    sys.modules[onnx.__name__] = onnx


def _resize_storage(storage: Any, size: int) -> None:
    """`UntypedStorage.resize_`"""
    if storage.device.type == "cuda":
        device.resize_storage(storage, size)
    else:
        torch._C.StorageBase.resize_(storage, size)


def install() -> None:
    """Replace CUDA's kernels and what torch.cuda asks the driver. Nothing may have used CUDA before."""
    device.set_capacity(MEMORY)
    if "SIM_CUDA_LIMIT" in os.environ:
        device.set_limit(int(os.environ["SIM_CUDA_LIMIT"]))
    device.install(note)
    driver = {
        "_cuda_getDeviceCount": lambda: COUNT,
        "_cuda_getDevice": device.get_device,
        "_cuda_setDevice": device.exchange_device,
        "_cuda_synchronize": lambda: device.wait("device"),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getCurrentStream": lambda index: (device.get_stream(index), index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": lambda stream_id, device_index, device_type: device.set_stream(device_index, stream_id),
        "_cuda_memoryStats": _stats,
        "_cuda_resetPeakMemoryStats": device.reset_peak,
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
    }
    for name, answer in driver.items():
        assert hasattr(torch._C, name), f"this torch has no {name}"
        setattr(torch._C, name, answer)
    cuda: Any = torch.cuda
    cuda._initialized, cuda._is_in_bad_fork = True, driver["_cuda_isInBadFork"]
    cuda._exchange_device = cuda._maybe_exchange_device = device.exchange_device
    cuda._get_device_properties = lambda index: SimpleNamespace(**PROPERTIES, uuid=f"simulated-{index}")
    cuda.default_generators = tuple(torch.Generator() for _ in range(COUNT))
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    runtime = SimpleNamespace(cudaMemGetInfo=_free_memory, cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    cuda.cudart = cuda.memory.cudart = lambda: runtime
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign, assignment]
    halves = (torch.bfloat16, torch.float16)
    bias.can_use_flash_attention = lambda asked, debug=False: asked.query.dtype in halves
    bias.can_use_efficient_attention = lambda asked, debug=False: False
    bias._raise_kernel_warnings = lambda asked: None
    storage: Any = torch.UntypedStorage
    storage._share_cuda_, storage._new_shared_cuda = _Shared.export, staticmethod(_Shared.open)
    storage._release_ipc_counter_cuda = staticmethod(lambda *_, **__: None)
    c10d.Backend.backend_capability["nccl"] = ["cpu", "cuda"]
    c10d.ProcessGroupNCCL = NCCL  # type: ignore[misc, assignment]
    if "SIM_CUDA_TE" in os.environ:
        add_transformer_engine(os.environ["SIM_CUDA_TE"])
