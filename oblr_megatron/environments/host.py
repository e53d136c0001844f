"""Runs the episodes of a batch: between an engine, which samples turns, and a process with the user's function.

    host = EpisodeHost(config, index=0, owner="rank 0")
    host.sample(engine, prompts, positions, request, put, version=3)    # in the feed's thread, for each batch
    host.close()

The process may do anything. One that blocks, dies or misses a deadline is killed. The episode that ran at that moment
fails, and the others run again in a new process: their turns have the same seeds. After MOST_LOSSES losses in one batch
its remaining episodes fail as well. A killed episode has no tokens.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from oblr_megatron.checks.run_dir import LOGS
from oblr_megatron.engine.channel import CHECK_SECONDS, Channel, PeerGone
from oblr_megatron.engine.protocol import PromptRequest, SamplingRequest, prompt_seed
from oblr_megatron.engine.turns import Answered
from oblr_megatron.environments.messages import Answer, Begin, Cancel, Ended, SampleCall, ToolWait
from oblr_megatron.environments.process import options_of
from oblr_megatron.errors import EngineDeadlineError, EnginesGoneError
from oblr_megatron.processes.client import ForkServer, Worker
from oblr_megatron.processes.watch import NOBODY, Watch
from oblr_megatron.types import FinishReason, Prompt, Sample

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.engine.handle import VllmEngine

logger = logging.getLogger(__name__)

MOST_LOSSES = 8
"""Processes that a batch may lose before its remaining episodes fail."""
BLOCKED_SECONDS = 10.0
"""Seconds that a function may run without an await."""
GRACE_SECONDS = 5.0
"""Seconds, besides BLOCKED_SECONDS, from the cancellation of an episode at its deadline until its process is killed."""


@dataclass(slots=True, eq=False)
class _Process:
    """A process that plays episodes."""

    worker: Worker
    channel: Channel  # to read from
    writer: Channel
    seen: tuple[int, float] = (NOBODY, 0.0)  # the watch's value at the last look


@dataclass(slots=True)
class _Running:
    """An episode of this batch that has not ended."""

    begin: Begin
    position: int  # of its prompt
    place: int  # in the prompt's group
    watch: Watch  # of the process
    waits: int = 0  # responses that it waits for
    queued: int = 0  # its tool calls that wait for a worker
    spent_s: float = 0.0  # without waiting
    since: float = 0.0  # time.monotonic() of the end of its last wait
    others_s: float = 0.0  # `Watch.seconds_of_others` at that time
    cancelled: bool = False

    @property
    def stands(self) -> bool:
        """Whether its clock stands still."""
        return self.waits > 0 or self.queued > 0

    def restart(self) -> None:
        """Begin again."""
        self.waits, self.queued, self.cancelled, self.spent_s = 0, 0, False, 0.0
        self._mark()

    def seconds(self) -> float:
        """Time that it has taken, without the waits for the engine and for a tool's worker, and the turns of others."""
        if self.stands:
            return self.spent_s
        others = self.watch.seconds_of_others(self.begin.number) - self.others_s
        return self.spent_s + time.monotonic() - self.since - others

    def wait(self, *, waits: int = 0, queued: int = 0) -> None:
        """Begin (1) or end (-1) a wait."""
        self.spent_s = self.seconds()
        self._mark()
        self.waits, self.queued = self.waits + waits, self.queued + queued

    def _mark(self) -> None:
        self.since, self.others_s = time.monotonic(), self.watch.seconds_of_others(self.begin.number)


@dataclass(slots=True)
class _Batch:
    """The state of one call of `sample`."""

    engine: VllmEngine
    request: SamplingRequest
    done: Callable[[_Running, Ended], None]
    running: dict[int, _Running]
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)  # request -> (episode, call), at the engine
    calls: list[SampleCall] = field(default_factory=list)  # not yet sent to the engine
    requests: int = 0
    losses: int = 0


class EpisodeHost:
    """One per engine. Its process starts with the host, and again after a loss."""

    def __init__(self, config: Config, *, index: int, owner: str) -> None:
        """Args:
        config: of the run.
        index: of the engine, for the name of the log.
        owner: who waits, for error messages.
        """
        self._options = config.rollout.environment
        self._reward_counts = "environment" in config.reward.names
        self._blocked_s = min(BLOCKED_SECONDS, self._options.deadline_s)
        self._watch = Watch()
        self._server = ForkServer(
            "oblr_megatron.environments.process:plays",
            options_of(config) | {"watch": self._watch.fd},
            what="the environment process",
            owner=owner,
            start_s=config.rollout.start_timeout_s,
            log=config.run_dir / LOGS / f"environment-{index}.log",
            inherited=[self._watch.fd],
        )
        self._queue: queue.SimpleQueue[tuple[_Process | None, Any]] = queue.SimpleQueue()  # (None: the engine, message)
        self._told: set[str] = set()  # kinds of failures that are in the log
        self._numbers = itertools.count()  # of episodes, over all batches
        self._process: _Process | None = None

    def sample(
        self,
        engine: VllmEngine,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        request: SamplingRequest,
        put: Callable[[int, list[Sample]], None],
        *,
        version: int,
    ) -> None:
        """Run the episodes of some prompts; `put(position, group)` as soon as a prompt's last episode has ended.

        The position of a prompt decides the seeds of its episodes, as for single responses.

        Args:
            engine: samples the turns.
            prompts: of the whole batch.
            positions: in `prompts`, of those to run.
            request: how to sample a turn, but for its seed and length.
            put: called in the order in which groups end.
            version: of the weights.

        Raises:
            EngineLostError: the engine died.
            RunError: the process does not start.
        """
        if not positions:
            return
        episodes: dict[int, _Running] = {}
        groups: dict[int, dict[int, Sample]] = {position: {} for position in positions}
        for position in positions:
            for place in range(request.group_size):
                seed = prompt_seed(request.seed, position) + place
                begin = Begin(next(self._numbers), prompts[position], seed, request.max_tokens)
                episodes[begin.number] = _Running(begin, position, place, self._watch)

        def done(episode: _Running, ended: Ended) -> None:
            group = groups[episode.position]
            group[episode.place] = to_sample(episode.position, episode.begin, ended, version)
            if len(group) == request.group_size:
                put(episode.position, [group[number] for number in range(request.group_size)])

        batch = _Batch(engine, request, done, episodes)
        reader = threading.Thread(target=self._read_engine, args=(engine.begin_turns(),), daemon=True)
        reader.start()
        try:
            self._begin(batch)
            while batch.running:
                self._receive(batch)
                self._look(batch)
        except BaseException:  # whatever ended the batch, its episodes must end too
            self._end_process()
            raise
        finally:
            engine.end_turns()
            reader.join()
            self._forget_messages()

    def close(self) -> None:
        """End the process. May be called more than once."""
        self._server.close()
        self._end_process()
        self._watch.close()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._server.kill(process.worker)
            process.writer.close()
            with suppress(OSError):  # its reader has closed it
                process.worker.socket.shutdown(socket.SHUT_RDWR)

    def _read_process(self, process: _Process) -> None:
        """In a thread: pass the messages of a process on, then its end."""
        try:
            with suppress(PeerGone):
                while True:
                    self._queue.put((process, process.channel.receive()))
        finally:  # a process that nobody reads is lost, whatever ended the reader
            process.channel.close()
            self._queue.put((process, None))

    def _read_engine(self, answers: Iterator[Answered]) -> None:
        try:
            for answered in answers:
                self._queue.put((None, answered))
        except BaseException as error:  # noqa: BLE001  it is raised again in the feed's thread
            self._queue.put((None, error))

    def _begin(self, batch: _Batch) -> None:
        """Give all episodes that have not ended to the process, which is started if there is none."""
        batch.calls.clear()
        if self._process is None:
            self._watch.set(NOBODY)
            worker = self._server.fork()
            channel = Channel(worker.socket)
            self._process = _Process(worker, channel, channel.writer())
            threading.Thread(target=self._read_process, args=(self._process,), daemon=True).start()
        for running in batch.running.values():
            running.restart()
        self._tell(batch, [running.begin for running in batch.running.values()])

    def _receive(self, batch: _Batch) -> None:
        """Handle what has come, or wait for a moment; then send on what the engine can sample now."""
        with suppress(queue.Empty):
            item = self._queue.get(timeout=CHECK_SECONDS)
            while True:
                self._handle(batch, item)
                item = self._queue.get_nowait()
        if batch.calls and (not self._options.in_rounds or self._all_wait(batch)):
            calls = sorted(batch.calls, key=lambda call: (call.number, call.call))
            batch.calls.clear()
            batch.engine.ask([self._request(batch, call) for call in calls])

    def _handle(self, batch: _Batch, item: tuple[_Process | None, Any]) -> None:
        sender, message = item
        if sender is None and isinstance(message, EngineDeadlineError) and not batch.waiting:
            raise EnginesGoneError(  # the engine has answered all: after a restart the batch would end in the same way
                f"{len(batch.running)} episodes took longer than rollout.generate_timeout_s, {message.seconds:g} s, "
                "and the engine had nothing to sample. Fix: raise it, or make the episodes shorter"
            ) from message
        if sender is None and isinstance(message, BaseException):
            raise message
        if sender is None:
            self._answer(batch, message)
        elif sender is not self._process:
            return  # its process was killed
        elif message is None:
            self._lost(batch, "the environment process ended", "failed")
        elif isinstance(message, SampleCall):
            self._note_call(batch, message)
        elif isinstance(message, ToolWait):
            if (running := batch.running.get(message.number)) is not None:
                running.wait(queued=message.change)
        else:
            self._end(batch, message)

    def _note_call(self, batch: _Batch, call: SampleCall) -> None:
        running = batch.running.get(call.number)
        if running is None:
            return  # an episode left its task behind
        running.wait(waits=1)
        batch.calls.append(call)

    def _request(self, batch: _Batch, call: SampleCall) -> PromptRequest:
        number, batch.requests = batch.requests, batch.requests + 1
        batch.waiting[number] = (call.number, call.call)
        seed = batch.running[call.number].begin.seed
        request = replace(batch.request, group_size=1, max_tokens=call.max_tokens, seed=seed)
        return PromptRequest(number, call.ids, request, position=call.call, stop=call.stop)

    def _all_wait(self, batch: _Batch) -> bool:
        """Whether every episode waits for a response, and the engine has none to sample."""
        return not batch.waiting and all(running.waits for running in batch.running.values())

    def _answer(self, batch: _Batch, answered: Answered) -> None:
        answers = []
        for request, turn in answered:
            number, call = batch.waiting.pop(request, (NOBODY, 0))
            running = batch.running.get(number)
            if running is None:
                continue  # abandoned
            running.wait(waits=-1)
            answers.append(Answer(number, call, turn))
        if answers:
            self._tell(batch, answers)

    def _end(self, batch: _Batch, ended: Ended, what: str = "the function") -> None:
        episode = batch.running.pop(ended.number, None)
        if episode is None:
            return
        self._abandon(batch, {ended.number})
        batch.calls = [call for call in batch.calls if call.number != ended.number]
        if ended.error:
            self._warn(what, f"an episode, of prompt {episode.begin.prompt.id}, gave no sample (reward 0)", ended.error)
        elif ended.reward is not None and not self._reward_counts and "reward" not in self._told:
            self._told.add("reward")
            fix = 'set reward.name or a term of reward.terms to "environment", or let the function return none'
            logger.warning(
                "%s: it returns a reward, which no reward of the run reads. Fix: %s", self._options.function, fix
            )
        batch.done(episode, ended)

    def _warn(self, what: str, happened: str, error: str) -> None:
        """Log what went wrong with the function, the first time."""
        if what not in self._told:
            self._told.add(what)
            name = self._options.function
            logger.warning("%s: %s; later ones like it are only counted:\n%s", name, happened, error)

    def _look(self, batch: _Batch) -> None:
        """Kill a process that is blocked, or holds an episode that should have ended."""
        process, now = self._process, time.monotonic()
        if process is None or not batch.running:
            return
        number, since = seen = self._watch.get()
        if number != NOBODY and seen == process.seen and now - since > self._blocked_s:
            what = f"it ran for {self._blocked_s:g} seconds without an await"
            self._lost(batch, what, "late")
        process.seen = seen
        limit = self._options.deadline_s
        late = [running for running in batch.running.values() if not running.stands and running.seconds() > limit]
        limit += self._blocked_s + GRACE_SECONDS
        for running in late:
            if running.seconds() > limit:
                self._lost(batch, "it did not end at its deadline", "late", running.begin.number)
                return
        fresh = [running for running in late if not running.cancelled]
        for running in fresh:
            running.cancelled = True
        if fresh:
            self._tell(batch, [Cancel(running.begin.number) for running in fresh])

    def _lost(self, batch: _Batch, what: str, reason: FinishReason, number: int | None = None) -> None:
        """Kill the process; the guilty episode fails, the others begin again.

        Args:
            batch: its episodes.
            what: the event.
            reason: of the failure.
            number: of the guilty episode; by default the one that runs.
        """
        process = self._process
        assert process is not None, "only a process that runs is lost"
        guilty = self._watch.get()[0] if number is None else number
        self._end_process()
        self._abandon(batch, batch.running.keys())
        batch.losses += 1
        if guilty in batch.running:
            self._end(batch, Ended(guilty, finish_reason=reason, error=what), what)
        else:
            self._warn(f"nobody: {what}", "the process was lost while no episode ran, and is replaced", what)
        if batch.losses >= MOST_LOSSES:
            why = f"{what}; {batch.losses} environment processes of this batch were lost"
            for other in list(batch.running):
                self._end(batch, Ended(other, finish_reason=reason, error=why), "losses")
        if batch.running:
            self._begin(batch)

    def _abandon(self, batch: _Batch, episodes: Set[int]) -> None:
        """Take back the requests of some episodes."""
        numbers = tuple(request for request, (number, _) in batch.waiting.items() if number in episodes)
        for request in numbers:
            batch.waiting.pop(request)
        if numbers:
            batch.engine.abandon(numbers)

    def _tell(self, batch: _Batch, messages: Sequence[Begin | Answer | Cancel]) -> None:
        """Send to the process. One that does not read is blocked, and one that has ended is noticed by its reader."""
        assert self._process is not None, "a batch that runs has a process"
        try:
            self._process.writer.send(messages, time.monotonic() + self._blocked_s + GRACE_SECONDS)
        except TimeoutError:
            self._lost(batch, "it ran for too long without an await", "late")
        except OSError:
            return

    def _forget_messages(self) -> None:
        """Nothing of this batch may reach the next one; a process that ended is started again then."""
        while True:
            try:
                sender, message = self._queue.get_nowait()
            except queue.Empty:
                return
            if sender is not None and sender is self._process and message is None:
                self._end_process()


def to_sample(group: int, begin: Begin, ended: Ended, version: int) -> Sample:
    """The sample of an episode."""
    return Sample(
        group=group,
        prompt_ids=begin.prompt.token_ids,
        response_ids=ended.ids,
        logprobs=ended.logprobs,
        text=ended.text,
        finish_reason=ended.finish_reason,
        version=version,
        mask=ended.mask,
        environment_reward=ended.reward,
        recorded=ended.recorded,
    )
