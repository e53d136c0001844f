"""One vLLM engine in a child process, seen from the trainer: every wait ends, and a death is noticed at once.

    engine = VllmEngine(spec, owner="rank 0", log=log_file, deadlines=Deadlines(600, 1800, 300, 120))
    engine.wait_ready()            # the process was started above; the trainer may have been busy meanwhile
    engine.call("generate", {"prompts": [(5, 9)], "request": request}, what="64 prompts", seconds=60)
    engine.close()

After a deadline or a death the engine is lost: the process is killed, and every further call says why, as an
`EngineLostError`. What an engine answers, be it a refusal, is no loss.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oblr_megatron.engine.channel import CHECK_SECONDS, Call, Channel, PeerGone, Reply
from oblr_megatron.engine.protocol import EngineSpec, SamplingRequest
from oblr_megatron.errors import EngineDeadlineError, EngineLostError, RunError
from oblr_megatron.types import Sample
from oblr_megatron.weights.shm import SharedBuffer

GRACE_SECONDS = 5.0
"""How long an engine that is ending, and what it has started, may take to end; then it is killed."""
LOG_LINES = 15
"""Lines of the engine's log that an error quotes."""

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS")
_TORCHRUN_PREFIXES = ("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "GROUP_", "ROLE_", "VLLM_CPU_")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds a wait may take. Example: Deadlines(start=600, generate=1800, push=300, sleep=120)"""

    start: float
    generate: float
    push: float
    sleep: float  # and to wake


def child_environment(environment: Mapping[str, str], spec: EngineSpec) -> dict[str, str]:
    """The engine process's environment: the trainer's without torchrun's variables, offline, threads as the spec says.

    Args:
        environment: of the trainer.
        spec: of the engine.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN and not name.startswith(_TORCHRUN_PREFIXES)
    }
    kept |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.device == "cuda":
        return kept | ({} if spec.visible_devices is None else {"CUDA_VISIBLE_DEVICES": spec.visible_devices})
    return kept | {
        "OMP_NUM_THREADS": str(spec.num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait cost 20 times the speed on a busy machine
        "VLLM_ZENTORCH_WEIGHT_PREPACK": "0",  # the same trap as oneDNN's, on AMD's build
        # The one function vLLM compiles in eager mode takes seconds and a C++ compiler, to count a few numbers.
        "TORCHDYNAMO_DISABLE": "1",
    }


class VllmEngine:
    """The trainer's handle of an engine process.

    Made by a thread that lives as long as the engine shall: the kernel takes its end for the parent's death.
    """

    def __init__(self, spec: EngineSpec, *, owner: str, log: Path, deadlines: Deadlines, restart: int = 0) -> None:
        """Start the process and return; `wait_ready` waits for the engine in it.

        Args:
            spec: of the engine.
            owner: who waits, in error messages, e.g. "rank 0".
            log: file that takes the process's output.
            deadlines: of the waits.
            restart: which one of this engine it is; 0 is its first start.
        """
        self.spec, self.owner, self.log, self.deadlines, self.restart = spec, owner, log, deadlines, restart
        self.buffer = SharedBuffer.create()
        self._lost: str | None = None
        self._closed = False
        self._wait_for: tuple[str, float, float] | None = None  # what, since when, for how long
        self._ready = False
        self._started_at = time.monotonic()
        self._channel, self._process = self._launch()

    @property
    def lost(self) -> bool:
        """Whether the process has died or was killed, other than by `close`."""
        return self._lost is not None and not self._closed

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the engine can be called.

        Raises:
            EngineLostError: it died, or is not ready `deadlines.start` seconds after it was launched; or, one that had
                been ready before, could not start again.
            RunError: it never was ready and says why: a second start would end alike.
        """
        if self._ready:
            return
        try:
            self._receive(f"{self.spec.name} to start", self._started_at, self.deadlines.start)
        except RunError as error:
            self._lose(str(error))
            if self.restart and not isinstance(error, EngineLostError):
                raise EngineLostError(str(error)) from error
            raise
        self._ready = True

    def call(
        self, method: str, arguments: dict[str, Any], *, what: str, seconds: float, begin: float | None = None
    ) -> Any:
        """Have the engine process do something, and wait for the answer.

        Args:
            method: of `EngineServer`.
            arguments: its keyword arguments.
            what: what is waited for, in error messages.
            seconds: the deadline, counted from
            begin: on the monotonic clock; by default now.

        Raises:
            EngineLostError: the engine died, or gave no answer in time and was killed (`EngineDeadlineError`).
            RunError: the engine refused.
        """
        self.post(method, arguments, what=what, seconds=seconds, begin=begin)
        return self.collect()

    def post(
        self, method: str, arguments: dict[str, Any], *, what: str, seconds: float, begin: float | None = None
    ) -> None:
        """The first half of `call`; its answer must be collected before the next post."""
        assert self._wait_for is None, f"the answer to {self._wait_for} was not collected"
        self.wait_ready()
        self._check_lost()
        begin = time.monotonic() if begin is None else begin
        try:
            self._channel.send(Call(method, arguments), begin + seconds)
        except TimeoutError:
            raise self._too_late(what, seconds) from None
        except PeerGone:
            raise self._died(what) from None
        self._wait_for = (what, begin, seconds)

    def collect(self) -> Any:
        """The second half of `call`."""
        assert self._wait_for is not None, "nothing was posted"
        wait_for, self._wait_for = self._wait_for, None
        return self._receive(*wait_for)

    def generate(self, prompts: Sequence[Sequence[int]], request: SamplingRequest) -> list[list[Sample]]:
        """Q prompts of token ids -> Q groups of G samples.

        Raises:
            EngineLostError: the engine died, or took longer than `deadlines.generate`.
            RunError: the engine refused.
        """
        what = f"{len(prompts)} x {request.group_size} samples of {self.spec.name}"
        arguments = {"prompts": prompts, "request": request}
        return self.call("generate", arguments, what=what, seconds=self.deadlines.generate)

    def sleep(self, level: int = 1) -> None:
        """See `RolloutEngine.sleep`. vLLM's CPU backend has none: a CPU engine goes on as it is."""
        if self.spec.device == "cuda":
            what = f"{self.spec.name} to sleep"
            self.call("sleep", {"level": level}, what=what, seconds=self.deadlines.sleep)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.wake`.

        Raises:
            EngineLostError: also when the engine could not take its memory back, and may have taken some of it; the
                message says what is free and what the trainer holds.
        """
        if self.spec.device != "cuda":
            return
        arguments = {"tags": None if tags is None else list(tags)}
        what = f"{self.spec.name} to wake ({', '.join(tags or ['all'])})"
        try:
            self.call("wake", arguments, what=what, seconds=self.deadlines.sleep)
        except EngineLostError:
            raise
        except RunError as error:
            message = f"{error}; {_free_memory()}, and the engine's share is {self.spec.gpu_memory_utilization:g}"
            self._lose(message)
            raise EngineLostError(message) from error

    def close(self) -> None:
        """End the process, whatever it is doing; may be called again."""
        self._closed = True
        self._lose(f"{self.spec.name} is closed")

    def _launch(self) -> tuple[Channel, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "oblr_megatron.engine.worker", str(theirs.fileno()), str(os.getpid())]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self.log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=child_environment(os.environ, self.spec),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), self.buffer.fd),
                start_new_session=True,  # Ctrl-C is the trainer's to handle; and the engine's own children go with it
            )
        channel = Channel(ours)
        with suppress(PeerGone):  # `wait_ready` reports a process that is dead already
            channel.send(self.spec)
        return channel, process

    def _receive(self, what: str, begin: float, seconds: float) -> Any:
        self._check_lost()
        try:
            reply: Reply = self._channel.receive(begin + seconds, alive=lambda: self._process.poll() is None)
        except TimeoutError:
            raise self._too_late(what, seconds) from None
        except PeerGone:
            raise self._died(what) from None
        if reply.error is not None:
            raise reply.kind(f"{self.spec.name} failed while {self.owner} waited for {what}: {reply.error}")
        return reply.value

    def _too_late(self, what: str, seconds: float) -> EngineDeadlineError:
        error = EngineDeadlineError(self.owner, what, seconds)
        self._lose(f"{self.spec.name} was killed: {error}")
        return error

    def _died(self, what: str) -> EngineLostError:
        self._wait(GRACE_SECONDS)
        ending = f"{self.spec.name} (process {self.pid}) {_ending(self._process.returncode)}"
        self._lose(ending)
        return EngineLostError(f"{ending} while {self.owner} waited for {what}; {self._log_tail()}")

    def _lose(self, reason: str) -> None:
        """End the process and those it started, reap it, free the memory shared with it; the first reason stands."""
        if self._lost is not None:
            return
        self._lost = reason
        self._process.kill()
        end = time.monotonic() + GRACE_SECONDS
        while _others_in_group(self._process.pid) and time.monotonic() < end:
            time.sleep(CHECK_SECONDS)  # workers end without their engine, and the last one removes what they shared
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        self.buffer.close()

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise (RunError if self._closed else EngineLostError)(self._lost)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # the group, for an engine over several GPUs has processes of its own
            os.killpg(self._process.pid, number)

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return f"the end of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)


def _others_in_group(leader: int) -> bool:
    """Whether processes that an engine process has started still exist."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(ProcessLookupError):  # it ended since
            if int(name) != leader and os.getpgid(int(name)) == leader:
                return True
    return False


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "does not answer"
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"


def _free_memory() -> str:
    """Free GPU memory of this rank's device, and the trainer's share, for an error message.

    Example: "3.2 of 79.1 GiB of GPU memory are free, this rank of the trainer holds 60.4"
    """
    if not torch.cuda.is_available():
        return "no GPU is visible"
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    held = torch.cuda.memory_reserved() / 2**30
    return f"{free:.1f} of {total:.1f} GiB of GPU memory are free, this rank of the trainer holds {held:.1f}"
