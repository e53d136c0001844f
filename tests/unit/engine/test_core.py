"""An engine process whose vLLM is a stand-in: every call gets an answer, and after an error inside the process ends.

The process, its socket and the trainer's handle are real. Real vLLM: tests/e2e/test_engine_failures.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from oblr_megatron.engine import handle, worker
from oblr_megatron.engine.channel import Call
from oblr_megatron.engine.core import EngineServer
from oblr_megatron.engine.handle import Deadlines, VllmEngine
from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.engine.protocol import EngineSpec, PromptRequest, SamplingRequest
from oblr_megatron.engine.state import InvalidRequest, WeightState
from oblr_megatron.errors import EngineLostError, RunError

REQUEST = SamplingRequest(group_size=1, temperature=1.0, max_tokens=4, seed=0)
ROOT = Path(__file__).resolve().parents[3]


class Vllm:
    """The part of `vllm.LLM` that decodes. A step completes all requests, with these tokens, or raises."""

    def __init__(self, tokens: dict[str, int], error: Exception | None = None) -> None:
        self.tokens, self.error, self.aborted = tokens, error, list[str]()
        self.llm_engine = self.engine_core = self
        self.batch_queue: list[str] | None = None  # steps begun ahead
        self.left_at_resets = list[int]()
        self.output_processor = SimpleNamespace(parent_requests={})

    def step(self) -> list[Any]:
        if self.batch_queue:
            self.batch_queue.pop()
        if self.error is not None:
            raise self.error
        return [self.output(name, token) for name, token in self.tokens.items()]

    def output(self, name: str, token: int) -> Any:
        logprobs = SimpleNamespace(start_indices=[0], logprobs=[0.0])
        spans = [SimpleNamespace(version="0")]
        response = SimpleNamespace(
            token_ids=[token], logprobs=logprobs, weight_versions=spans, finish_reason="stop", routed_experts=None
        )
        return SimpleNamespace(request_id=name, finished=True, outputs=[response], num_cached_tokens=0)

    def abort_request(self, names: list[str]) -> None:
        if self.error is not None:
            raise self.error
        self.aborted += names

    def sleep(self, level: int) -> None:
        raise RuntimeError("CUDA error")

    def reset_prefix_cache(self) -> bool:
        self.left_at_resets.append(len(self.batch_queue or ()))
        return True


class Server(EngineServer):
    """An engine that samples already: names of requests, and the numbers of their calls."""

    def __init__(self, vllm: Vllm, calls: dict[str, int]) -> None:
        self._llm: Any = vllm
        self._spec: Any = SimpleNamespace(max_model_len=64)
        self._tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
        self._vocab_size, self._state = 10, WeightState({}, "float32")
        self._generated = self._cached = 0
        self._replies, self._asleep = [], set()
        self._running = {name: (call, PromptRequest(int(name), (5,), REQUEST, 0)) for name, call in calls.items()}
        self._unfinished = Counter(calls.values())


CALLS = {"0": 1, "1": 1, "2": 2, "3": 3}
"""Numbers of prompts, and of the calls that they belong to."""


@pytest.mark.parametrize("wrong", CALLS)
def test_a_response_that_cannot_be_read_is_answered_to_every_call(wrong: str) -> None:
    """Also to calls of which it is the last one, or of which the last one came in the same step."""
    vllm = Vllm({name: 11 if name == wrong else 3 for name in CALLS})
    server = Server(vllm, CALLS)
    replies = server.step()
    assert sorted(reply.number for reply in replies) == [1, 2, 3]
    assert all(reply.kind is RunError and "token 11, outside" in (reply.error or "") for reply in replies)
    assert vllm.aborted == list(CALLS) and not server.sampling and not server.failed


def test_an_error_of_vllm_in_a_step_is_answered_to_every_call_and_is_the_end() -> None:
    server = Server(Vllm({}, RuntimeError("CUDA error")), CALLS)
    replies = server.step()
    assert sorted(reply.number for reply in replies) == [1, 2, 3]
    assert {(reply.kind, reply.error) for reply in replies} == {(EngineLostError, "RuntimeError: CUDA error")}
    assert server.failed


def test_an_abandoned_group_leaves_nothing_in_vllm() -> None:
    vllm = Vllm({})
    vllm.output_processor.parent_requests |= {f"{name}-a": SimpleNamespace(external_req_id=name) for name in CALLS}
    Server(vllm, CALLS).abandon([0, 2])
    assert vllm.aborted == ["0", "2"] and [*vllm.output_processor.parent_requests] == ["1-a", "3-a"]


def test_responses_of_one_step_go_to_their_calls() -> None:
    server = Server(Vllm(dict.fromkeys(CALLS, 3)), CALLS)
    found = {reply.number: [number for number, _ in reply.value] for reply in server.step()}
    assert found == {1: [0, 1], 2: [2], 3: [3]} and not server.sampling


def test_the_cache_is_emptied_after_the_steps_that_were_begun_ahead() -> None:
    """Routes of a step under way would be lost in the middle of vLLM's books, which ends the engine."""
    vllm = Vllm({})
    server = Server(vllm, {})
    for vllm.batch_queue in (["ahead", "last"], [], None):
        assert [reply.error for reply in server.answer(Call("sample", {"asked": []}))] == [None]
    vllm.batch_queue = ["ahead"]
    assert "CUDA error" in (server.answer(Call("sleep", {"level": 1}))[0].error or "") and not vllm.batch_queue
    assert vllm.left_at_resets == [0, 0, 0]


def test_a_response_that_max_model_len_could_cut_is_refused() -> None:
    """vLLM would end it with "length", as if it had `max_tokens`."""
    server = Server(Vllm({}), {})
    asked = [PromptRequest(0, (5,) * 61, REQUEST, 0)]
    (reply,) = server.answer(Call("sample", {"asked": asked, "keep_prefixes": True}))
    assert (reply.kind, server.failed) == (InvalidRequest, False)
    assert "need 65 tokens, but it takes 64" in (reply.error or "")


@pytest.fixture
def engine_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], VllmEngine]]:
    """Handles of engine processes that run this file."""
    monkeypatch.setattr(handle, "python_module", lambda _: [sys.executable, "-m", __name__])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    opened: list[VllmEngine] = []

    def make() -> VllmEngine:
        sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_bytes": 0, "num_threads": 1}
        spec = EngineSpec("engine 0", tmp_path, "float32", "cpu", **sizes)
        deadlines = Deadlines(start=120, generate=120, push=120, sleep=120)
        opened.append(VllmEngine(spec, owner="rank 0", log=tmp_path / "engine-0.log", deadlines=deadlines))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def test_the_trainer_loses_an_engine_with_an_error_inside_and_its_process_ends(
    engine_of: Callable[[], VllmEngine],
) -> None:
    engine = engine_of()
    with pytest.raises(RunError, match="push 4 is not open") as refused:
        engine.call("finish_push", {"holding": Holding(version=4)}, what="push 4", seconds=120)
    assert not isinstance(refused.value, EngineLostError) and not engine.lost, "a refusal is an answer"
    with pytest.raises(EngineLostError, match=r"(?s)rank 0 waited for the sleep: RuntimeError: CUDA error; the end of"):
        engine.sleep(1)
    assert engine.lost and not psutil.pid_exists(engine.pid)
    with pytest.raises(EngineLostError, match="CUDA error"):
        engine.sleep(1)


def test_the_process_ends_by_itself(engine_of: Callable[[], VllmEngine]) -> None:
    """The HTTP door kills no engine: it ends with it."""
    engine = engine_of()
    engine.wait_ready()
    engine._channel.send(Call("sleep", {"level": 1}, 5))
    reply = engine._channel.receive()
    assert (reply.number, reply.kind) == (5, EngineLostError)
    assert engine._process.wait(120) == 1


if __name__ == "__main__":
    worker._start = lambda spec: Server(Vllm({}), {})
    sys.exit(worker.main(sys.argv[1:]))
