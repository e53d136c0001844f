"""The engine process: one `vllm.LLM`, and the methods that the trainer calls on it by name.

`engine.state` decides whether the engine may sample, and which step of a push comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from oblr_megatron.checkpoint.hf_dir import checkpoint_shapes
from oblr_megatron.engine import invariant
from oblr_megatron.engine.arguments import vllm_arguments
from oblr_megatron.engine.http_messages import Holding, Report, ended_of
from oblr_megatron.engine.protocol import EngineSpec, SamplingRequest
from oblr_megatron.engine.samples import sampling_params, to_sample
from oblr_megatron.engine.state import WeightState, check_reset
from oblr_megatron.engine.turns import Abandon, Answered, Inbox, Turn, TurnRequest
from oblr_megatron.errors import RunError
from oblr_megatron.types import Sample
from oblr_megatron.weights.manifest import Manifest, parts_of
from oblr_megatron.weights.names import HF_EMBEDDING


class EngineServer:
    """The engine; the trainer may call every method without a leading underscore."""

    def __init__(self, spec: EngineSpec) -> None:
        import vllm

        from oblr_megatron.engine.plugin import IPC_BACKEND, SHM_BACKEND

        if spec.batch_invariant and spec.device == "cpu":
            invariant.install(spec)
        backend = IPC_BACKEND if spec.device == "cuda" else SHM_BACKEND
        self._llm = vllm.LLM(**vllm_arguments(spec, backend))
        self._tokenizer = self._llm.get_tokenizer()
        shapes = checkpoint_shapes(spec.model, quantized=True)  # evaluation may load one; no run pushes into it
        self._vocab_size = shapes[HF_EMBEDDING][0]
        self._state = WeightState(shapes, spec.dtype)
        self._asleep: set[str] = set()
        self._llm.update_weight_version("0")
        # vLLM finds some faults only in its first forward pass, e.g. a head_dim without a kernel: fail at the start.
        list(self.stream([(0,)], [0], SamplingRequest(group_size=1, temperature=0.0, max_tokens=1, seed=0)))

    def stream(
        self, prompts: Sequence[Sequence[int]], positions: Sequence[int], request: SamplingRequest
    ) -> Iterator[list[tuple[int, list[Sample]]]]:
        """Sample a group of responses for each prompt.

        Yields the (position, group) of all prompts that a decoding step has finished, as one message for the trainer.
        The position of a prompt in the step's batch decides its seed.
        The prefix cache is emptied before each call: a cached prefix changes the last bits of the log-probs, and equal
        calls would return different values.
        """
        from vllm import TokensPrompt

        engine, version = self._ready()
        copies = request.group_size if request.greedy else 1

        def group_of(output: Any) -> tuple[int, list[Sample]]:
            position, prompt = waiting.pop(output.request_id)
            group = [
                to_sample(position, prompt, one, version, self._tokenizer, self._vocab_size, routes=request.routes)
                for one in output.outputs
            ]
            return position, group * copies

        waiting = {str(position): (position, prompt) for position, prompt in zip(positions, prompts, strict=True)}
        try:
            for name, (position, prompt) in waiting.items():
                tokens = TokensPrompt(prompt_token_ids=list(prompt))
                engine.add_request(name, tokens, sampling_params(request, position))
            while engine.has_unfinished_requests():
                if finished := [group_of(output) for output in engine.step() if output.finished]:
                    yield finished
        finally:
            if waiting:  # after an error: the next call must not meet these requests
                engine.abort_request(list(waiting))

    def turns(self, inbox: Inbox) -> Iterator[Answered]:
        """Sample one response to each request of the inbox, until it ends; see `engine.turns`."""
        from vllm import TokensPrompt

        engine, version = self._ready()
        waiting: dict[str, TurnRequest] = {}

        def answer(output: Any) -> tuple[int, Turn]:
            asked = waiting.pop(output.request_id)
            one = to_sample(0, asked.ids, output.outputs[0], version, self._tokenizer, self._vocab_size)
            return asked.number, Turn(one.response_ids, one.logprobs, one.text, ended_of(one))

        try:
            while (messages := inbox(not waiting)) is not None:
                for message in messages:
                    if isinstance(message, Abandon):
                        names = [name for name in map(str, message.numbers) if waiting.pop(name, None) is not None]
                        engine.abort_request(names)
                    else:
                        name, tokens = str(message.number), TokensPrompt(prompt_token_ids=list(message.ids))
                        waiting[name] = message
                        engine.add_request(name, tokens, sampling_params(message.request, message.turn, message.stop))
                if waiting and (found := [answer(output) for output in engine.step() if output.finished]):
                    yield found
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def _ready(self) -> tuple[Any, int]:
        """vLLM's engine, without cached prefixes, and the version of the weights that it samples from."""
        if self._asleep:
            raise RunError(f"it is asleep ({', '.join(sorted(self._asleep))})")
        self._state.check_usable()
        self._llm.reset_prefix_cache()
        return self._llm.llm_engine, self._state.holding.version

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Pass the transport's parameters to vLLM."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_push(self, manifest: Manifest, version: int) -> None:
        """Begin to replace the weights; nothing is sampled until `finish_push`."""
        self.abort_push(f"push {version} has not ended")
        with self._state.begin(Holding(version=version), manifest):
            self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket."""
        with self._state.bucket(parts_of(update_info)):
            self._llm.update_weights({"update_info": update_info})

    def finish_push(self, version: int) -> None:
        """Serve the new weights, provided that all of them have come."""
        with self._state.finish():
            self._llm.finish_weight_update(weight_version=str(version))
            check_reset(self._llm.reset_prefix_cache())

    def read_back(self) -> list[dict[str, str]]:
        """Digests of the weights in place, one dict per worker; see `weights.verify`."""
        from oblr_megatron.weights.verify import read_back

        return self._llm.apply_model(read_back)

    def speculation(self) -> Report:
        """What speculation did since the last call; only of an engine that speculates."""
        core: Any = self._llm.llm_engine.engine_core  # in this process
        return core.engine_core.scheduler.take_report()

    def abort_push(self, reason: str) -> None:
        """Give up a push. The weights may be mixed until the next complete push."""
        self._state.fail(reason)
        if self._state.leave_session():
            try:
                self._llm.update_weights({"update_info": {}})
            except Exception:  # noqa: BLE001  a failing update is the only way to end vLLM's update session early
                return
            raise AssertionError("vLLM accepted an empty update")

    def sleep(self, level: int) -> None:
        """Free GPU memory. Level 1 moves the weights to host memory; level 2 drops them, so a push must follow."""
        self._llm.sleep(level=level)
        self._asleep = {"weights", "kv_cache"}
        if level > 1:
            self._state.fail(f"its weights were dropped by sleep level {level}")

    def wake(self, tags: Sequence[str]) -> None:
        """Take GPU memory back. Only sleeping tags are passed on: vLLM wakes nothing if one of them is awake."""
        asleep = sorted(self._asleep & set(tags))
        if asleep:
            self._llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)
