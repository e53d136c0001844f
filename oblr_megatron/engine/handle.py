"""The trainer's handle of one vLLM engine process. Every wait has a deadline, and a death is noticed at once.

    engine = VllmEngine(spec, owner="rank 0", log=log_file, deadlines=Deadlines(600, 1800, 300, 120))
    engine.wait_ready()            # the process was started above
    for position, group in engine.stream([(5, 9)], [0], request): ...
    engine.close()

After a missed deadline, a death, or an error that no code of ours has raised, the engine is lost: the process is
killed, and every further call raises an `EngineLostError` with the reason. A refusal is an answer, so it does not lose
the engine.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO, Any

import torch

from oblr_megatron.engine.channel import CHECK_SECONDS, Call, Channel, PeerGone, Reply
from oblr_megatron.engine.http_messages import DraftReport
from oblr_megatron.engine.protocol import EngineSpec, PromptRequest, SamplingRequest
from oblr_megatron.engine.turns import Answered, Turn
from oblr_megatron.errors import EngineDeadlineError, EngineLostError, RunError
from oblr_megatron.formatting import log_tail
from oblr_megatron.runtime.processes import SAFE_PATH, alive, identity, python_module
from oblr_megatron.types import Sample
from oblr_megatron.weights.shm import SharedBuffer

GRACE_SECONDS = 5.0
"""Time for an ending engine and its child processes; then they are killed."""
NOBODY = -1
"""Number of a call without a reply: nobody waits for one."""

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS")
_MEGATRON = ("CUDA_DEVICE_MAX_CONNECTIONS",)  # 1 orders megatron-core's kernels, but would serialise vLLM's streams
_TORCHRUN_PREFIXES = ("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "GROUP_", "ROLE_", "VLLM_CPU_")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines in seconds. Example: Deadlines(start=600, generate=1800, push=300, sleep=120)"""

    start: float
    generate: float
    push: float
    sleep: float  # also to wake


def child_environment(environment: Mapping[str, str], spec: EngineSpec) -> dict[str, str]:
    """An engine process's environment: the trainer's without torchrun's variables, offline, with the spec's threads."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN + _MEGATRON and not name.startswith(_TORCHRUN_PREFIXES)
    }
    if "VLLM_PLUGINS" in kept:  # a list of all that vLLM may load
        kept["VLLM_PLUGINS"] += ",oblr_megatron"
    kept |= SAFE_PATH | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MAX_N_SEQUENCES": str(2**31 - 1),  # by default 16,384, which would refuse larger groups in mid-run
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # A forked worker runs no plugin, so that it would outlive its engine; and it would hold the engine's socket.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if spec.device == "cuda":
        return kept | ({} if spec.visible_devices is None else {"CUDA_VISIBLE_DEVICES": spec.visible_devices})
    return kept | {
        "OMP_NUM_THREADS": str(spec.num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # on a busy machine, threads that spin while waiting are 20x slower
        "VLLM_ZENTORCH_WEIGHT_PREPACK": "0",  # AMD's build packs weights like oneDNN: see plugin.py
        # vLLM compiles one small function even in eager mode, which takes seconds and needs a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # by default the second where Triton is installed; draws and routes are ours
        "NUMBA_NUM_THREADS": "1",  # vLLM looks up n-grams with one thread; the others spin meanwhile
    }


def launch(
    spec: EngineSpec, output: IO[bytes] | None = None, inherited: Sequence[int] = ()
) -> tuple[Channel, Popen[bytes]]:
    """Start an engine process. The first message on the channel is its reply to the start.

    Args:
        spec: of the engine.
        output: for the process's output; None: where this process writes.
        inherited: file descriptors that the process keeps.
    """
    own_end, child_end = socket.socketpair()
    command = [*python_module("oblr_megatron.engine.worker"), str(child_end.fileno()), str(os.getpid())]
    with child_end:
        process = Popen(
            command,
            env=child_environment(os.environ, spec),
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            pass_fds=(child_end.fileno(), *inherited),
            start_new_session=True,  # the parent handles Ctrl-C; and one signal ends the engine's children, too
        )
    channel = Channel(own_end)
    with suppress(PeerGone):  # the process is dead already: the wait for its reply reports it
        channel.send(spec)
    return channel, process


def kill(process: Popen[bytes]) -> None:
    """End an engine process and its children, whatever they are doing, and reap it."""
    process.kill()
    end = time.monotonic() + GRACE_SECONDS
    while _others_in_group(process.pid) and time.monotonic() < end:
        time.sleep(CHECK_SECONDS)  # workers end by themselves, and the last one removes what they shared
    with suppress(ProcessLookupError):  # the whole group: an engine over several GPUs has child processes
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutExpired):  # in a driver that hangs it cannot be reaped; its engine is replaced anyway
        process.wait(GRACE_SECONDS)


def how_it_ended(process: Popen[bytes]) -> str:
    """For an error message, of a process that is ending. Examples: "was ended by SIGKILL", "ended with status 1"."""
    with suppress(TimeoutExpired):
        process.wait(GRACE_SECONDS)
    if process.returncode is None:
        return "does not answer"
    if process.returncode < 0:
        return f"was ended by {signal.Signals(-process.returncode).name}"
    return f"ended with status {process.returncode}"


class VllmEngine:
    """The trainer's handle of an engine process.

    The thread that creates it must outlive the engine: the kernel treats the end of that thread as the parent's death.
    """

    def __init__(self, spec: EngineSpec, *, owner: str, log: Path, deadlines: Deadlines, restart: int = 0) -> None:
        """Start the process and return; `wait_ready` waits for the engine in it.

        Args:
            owner: who waits, for error messages, e.g. "rank 0".
            log: file for the process's output.
            restart: how often this engine was restarted before.
        """
        self.spec, self.owner, self.log, self.deadlines, self.restart = spec, owner, log, deadlines, restart
        self.buffer = SharedBuffer.create()
        self._lost: str | None = None
        self._closed = False
        self._device = torch.cuda.current_device() if spec.device == "cuda" and torch.cuda.is_available() else 0
        self._wait_for: tuple[str, float, float] | None = None  # what, begin, seconds
        self._number = 0  # number of the last call; 0 is the start
        self._ready = False
        self._started_at = time.monotonic()
        self._channel, self._process = self._launch()
        self._writer, self._turns_end = self._channel.writer(), 0.0  # both for `ask`

    @property
    def lost(self) -> bool:
        """Whether the process has died or was killed; False after `close`."""
        return self._lost is not None and not self._closed

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the engine can be called.

        Raises:
            EngineLostError: it died, or is not ready `deadlines.start` seconds after its launch; or a restart failed.
            RunError: its first start failed with an error. Another start would fail the same way.
        """
        if self._ready:
            return
        try:
            self._receive("the start", self._started_at, self.deadlines.start)
        except RunError as error:
            self._lose(str(error))
            if self.restart and not isinstance(error, EngineLostError):
                raise EngineLostError(str(error)) from error
            raise
        self._ready = True

    def call(self, method: str, arguments: dict[str, Any], *, what: str, seconds: float) -> Any:
        """Call a method of `EngineServer` and wait for the answer; `what` names it in error messages.

        Raises:
            EngineLostError: the engine died or failed, or gave no answer in time and was killed
                (`EngineDeadlineError`).
            RunError: the engine refused.
        """
        self.post(method, arguments, what=what, seconds=seconds)
        return self.collect()

    def post(
        self, method: str, arguments: dict[str, Any], *, what: str, seconds: float, begin: float | None = None
    ) -> None:
        """Send the request of `call`. Its answer must be collected before the next post.

        The deadline counts from `begin`, a value of time.monotonic(); by default from now.
        """
        assert self._wait_for is None, f"the answer to {self._wait_for} was not collected"
        self.wait_ready()
        self._check_lost()
        begin = time.monotonic() if begin is None else begin
        self._number += 1
        try:
            self._channel.send(Call(method, arguments, self._number), begin + seconds)
        except TimeoutError:
            raise self._too_late(what, seconds) from None
        except PeerGone:
            raise self._died(what) from None
        self._wait_for = (what, begin, seconds)

    def collect(self) -> Any:
        """Wait for the answer to `post`."""
        assert self._wait_for is not None, "nothing was posted"
        wait_for, self._wait_for = self._wait_for, None
        return self._receive(*wait_for).value

    def stream(
        self, prompts: Sequence[Sequence[int]], positions: Sequence[int], request: SamplingRequest
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Sample G responses for each prompt; yields (position, group) as soon as a prompt's last response has ended.

        The positions of the prompts in the step's batch decide the seeds. The engine waits while nobody reads, so read
        it in a thread of its own (`rollout.feed`). `wait_ready` must have returned before.

        Raises:
            EngineLostError: the engine died, or took longer than `deadlines.generate`.
            RunError: the engine refused.
        """
        what = f"{len(prompts)} x {request.group_size} samples"
        pairs = zip(prompts, positions, strict=True)
        asked = [PromptRequest(position, tuple(ids), request, position) for ids, position in pairs]
        for reply in self._begin_sampling(what, asked):
            yield from reply.value
            if not reply.more:
                return

    def begin_turns(self) -> Iterator[Answered]:
        """Begin a call that samples the requests of `ask`, until `end_turns`; yields the responses as they end.

        Read it in a thread of its own, and call `ask` in another. `wait_ready` must have returned before. Raises as
        `stream`.
        """
        self._turns_end = time.monotonic() + self.deadlines.generate
        replies = self._begin_sampling("the turns", [])

        def answers() -> Iterator[Answered]:
            for reply in replies:
                if reply.value is None:  # the reply to `end_turns`
                    return
                yield [(number, Turn.of(sample)) for number, (sample,) in reply.value]

        return answers()

    def ask(self, asked: Sequence[PromptRequest]) -> None:
        """Sample one response to each request, in the open call of `begin_turns`.

        Neither this nor the methods below raise: the thread that reads the call notices a lost engine.
        """
        self._write(Call("sample", {"asked": asked, "keep_prefixes": True}, self._number))

    def abandon(self, numbers: Sequence[int]) -> None:
        """Take requests of `ask` back."""
        self._write(Call("abandon", {"numbers": numbers}, NOBODY))

    def end_turns(self) -> None:
        """End the call of `begin_turns`; requests without a response are abandoned."""
        self._write(Call("abandon", {}, self._number))

    def _write(self, call: Call) -> None:
        with suppress(OSError):
            self._writer.send(call, self._turns_end)

    def speculation(self) -> DraftReport:
        """Drafts since the last call, and the bound; see `EngineServer.speculation`."""
        return self.call("speculation", {}, what="the speculation", seconds=self.deadlines.sleep)

    def sleep(self, level: int) -> None:
        """See `RolloutEngine.sleep`; only on a GPU, because vLLM's CPU backend cannot sleep."""
        self.call("sleep", {"level": level}, what="the sleep", seconds=self.deadlines.sleep)

    def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of these tags back; see `EngineServer.wake`.

        Raises:
            EngineLostError: also if the engine could not take all of its memory back.
        """
        self.call("wake", {"tags": tags}, what=f"the waking ({', '.join(tags)})", seconds=self.deadlines.sleep)

    def _begin_sampling(self, what: str, asked: Sequence[PromptRequest]) -> Iterator[Reply]:
        """Begin a call with many replies, within `deadlines.generate`."""
        begin, seconds = time.monotonic(), self.deadlines.generate
        self.post("sample", {"asked": asked}, what=what, seconds=seconds, begin=begin)
        self._wait_for = None
        return iter(lambda: self._receive(what, begin, seconds), None)

    def close(self) -> None:
        """End the process, whatever it is doing. May be called more than once."""
        self._closed = True
        self._lose(f"{self.spec.name} is closed")

    def _launch(self) -> tuple[Channel, Popen[bytes]]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            return launch(self.spec, output, (self.buffer.fd,))

    def _receive(self, what: str, begin: float, seconds: float) -> Reply:
        self._check_lost()
        try:
            reply = Reply(number=NOBODY)
            while reply.number != self._number:  # replies to a call that was given up are left
                reply = self._channel.receive(begin + seconds, alive=lambda: self._process.poll() is None)
        except TimeoutError:
            raise self._too_late(what, seconds) from None
        except PeerGone:
            raise self._died(what) from None
        if reply.error is None:
            return reply
        message = f"{self.spec.name} failed while {self.owner} waited for {what}: {reply.error}"
        elsewhere = self.spec.tensor_parallel_size > 1 and not self._ready  # vLLM's error does not say why one failed
        if reply.kind is EngineLostError or elsewhere:
            message += f"; {self._memory()}{log_tail(self.log)}"
        if reply.kind is EngineLostError:
            self._lose(message)
        raise reply.kind(message)

    def _too_late(self, what: str, seconds: float) -> EngineDeadlineError:
        error = EngineDeadlineError(self.owner, f"{what} of {self.spec.name}", seconds)
        self._lose(f"{self.spec.name} was killed: {error}")
        return error

    def _died(self, what: str) -> EngineLostError:
        ending = f"{self.spec.name} (process {self.pid}) {how_it_ended(self._process)}"
        self._lose(ending)
        return EngineLostError(f"{ending} while {self.owner} waited for {what}; {log_tail(self.log)}")

    def _lose(self, reason: str) -> None:
        """Kill the process and its children, reap it, and free its shared memory. The first reason is kept."""
        if self._lost is not None:
            return
        self._lost = reason
        kill(self._process)
        self._channel.close()
        self._writer.close()
        self.buffer.close()

    def _memory(self) -> str:
        """What a GPU engine may have lacked, for an error message; "" of a CPU engine."""
        if self.spec.device != "cuda":
            return ""
        return f"{_free_memory(self._device)}, and the engine's share is {self.spec.gpu_memory_utilization:g}; "

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise (RunError if self._closed else EngineLostError)(self._lost)


def _others_in_group(leader: int) -> bool:
    """Whether child processes of an engine process still run. Zombies do not: a container's init may reap them late."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(ProcessLookupError):  # it has just ended
            if int(name) != leader and os.getpgid(int(name)) == leader and alive(identity(int(name))):
                return True
    return False


def _free_memory(device: int) -> str:
    """Free GPU memory of a rank's device, and the trainer's share, for an error message.

    Example: "3.2 of 79.1 GiB of GPU memory are free, this rank of the trainer holds 60.4"
    """
    if not torch.cuda.is_available():
        return "no GPU is visible"
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    held = torch.cuda.memory_reserved(device) / 2**30
    return f"{free:.1f} of {total:.1f} GiB of GPU memory are free, this rank of the trainer holds {held:.1f}"
