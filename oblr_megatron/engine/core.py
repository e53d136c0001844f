"""The engine process: one `vllm.LLM`, and the methods that a `Call` names. Both doors lead here.

    engine = EngineServer(spec)
    replies = engine.answer(Call("start_push", {"holding": holding, "manifest": manifest}))
    replies = engine.answer(Call("sample", {"asked": asked}, number=7))
    while engine.sampling:
        replies = engine.step()              # to call 7, as its prompts are completed

Calls may come while prompts are being sampled: those of `sample` join the next decoding step. `engine.state` decides
whether the engine may sample, and which step of a push comes next.

A `RunError` is an answer of a healthy engine. After any other error, such as one of CUDA, the engine cannot be trusted:
it has `failed`, and its process ends.
"""

from __future__ import annotations

import secrets
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

from oblr_megatron.checkpoint.hf_dir import checkpoint_shapes
from oblr_megatron.engine.adapter import install, lora_request, read_adapter, stage
from oblr_megatron.engine.arguments import vllm_arguments
from oblr_megatron.engine.channel import Call, Reply
from oblr_megatron.engine.http_messages import PROTOCOL, DraftReport, Holding, Info
from oblr_megatron.engine.identity import ModelIdentity
from oblr_megatron.engine.protocol import EngineSpec, PromptRequest, SamplingRequest
from oblr_megatron.engine.samples import sampling_params, to_sample
from oblr_megatron.engine.state import InvalidRequest, Refusal, WeightState, check_reset
from oblr_megatron.engine.workers import WorkerError, WorkerRefusal, call_workers
from oblr_megatron.errors import DamagedError, EngineLostError, RunError, WeightError
from oblr_megatron.extension import extension
from oblr_megatron.types import Sample
from oblr_megatron.weights.adapter import adapter_shapes
from oblr_megatron.weights.engine_view import unwritten
from oblr_megatron.weights.manifest import Manifest, parts_of
from oblr_megatron.weights.names import HF_EMBEDDING, read_shape
from oblr_megatron.weights.shm import DAMAGED

Groups = list[tuple[int, list[Sample]]]
"""(number of a `PromptRequest`, its responses) of prompts that are complete."""


class EngineServer:
    """The engine; a call may name every method from `info` on."""

    failed = False
    """Whether an error has come that is no answer: the process must end."""

    def __init__(self, spec: EngineSpec) -> None:
        import vllm

        from oblr_megatron.engine.plugin import BACKENDS

        if spec.batch_invariant and spec.device == "cpu":  # an evaluation may run elsewhere than its run
            extension("model.batch_invariant engine")(spec)
        self._spec, self._backend = spec, BACKENDS[spec.device, spec.server]
        self._llm = vllm.LLM(**vllm_arguments(spec, self._backend))
        self._tokenizer = self._llm.get_tokenizer()
        self._shapes = shapes = checkpoint_shapes(spec.model, quantized=True)  # evaluation may load one without pushes
        self._vocab_size = shapes[HF_EMBEDDING][0]
        self._instance = secrets.token_hex(8)
        adapter = {} if spec.lora is None else adapter_shapes(read_shape(spec.model), spec.lora)
        self._state = WeightState(shapes, spec.dtype, adapter)
        self._names: frozenset[str] = frozenset()  # tensors of the last push
        self._lora: Any = None  # the name of the adapter in requests; None: none is in place
        if spec.adapter is not None:
            self._lora = lora_request(spec.adapter)
            self._llm.llm_engine.add_lora(self._lora)
        self._asleep: set[str] = set()
        self._running: dict[str, tuple[int, PromptRequest]] = {}  # number of the call, by vLLM's name of the request
        self._unfinished: Counter[int] = Counter()  # prompts of each call
        self._replies: list[Reply] = []  # not yet returned
        self._generated = self._cached = 0
        self._llm.update_weight_version("0")
        # vLLM finds some faults only in its first forward pass, e.g. a head_dim without a kernel: fail at the start.
        request = SamplingRequest(group_size=1, temperature=0.0, max_tokens=1, seed=0)
        self.sample(0, [PromptRequest(0, (0,), request, 0)])
        while self.sampling:
            self._decode()

    @property
    def sampling(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._running)

    def answer(self, call: Call) -> list[Reply]:
        """Run a call. Its reply is returned, or comes from `step` if it samples."""
        try:
            if call.method == "sample":
                self.sample(call.number, **call.arguments)
            else:
                value = getattr(self, call.method)(**call.arguments)
                self._replies.append(Reply(value, number=call.number))
        except Exception as error:  # noqa: BLE001  any error of vLLM must reach the caller, who waits for an answer
            self.failed = not isinstance(error, RunError)
            self._replies.append(failure(error, call.number))
        return self._take_replies()

    def step(self) -> list[Reply]:
        """Decode one token of each response. Returns a reply to each call of which prompts are complete now."""
        try:
            for call, groups in self._decode().items():
                self._replies.append(Reply(groups, more=self._unfinished[call] > 0, number=call))
        except Exception as error:  # noqa: BLE001  see `answer`
            self._drop(error)
        self._unfinished = +self._unfinished
        return self._take_replies()

    def info(self) -> Info:
        """The model, its limits and its state."""
        config = self._llm.llm_engine.vllm_config
        return Info(
            protocol=PROTOCOL,
            instance=self._instance,
            model=str(self._spec.model),
            **asdict(self._identity),
            dtype=self._spec.dtype,
            widens_logits=self._spec.widens_logits,
            quantization=config.model_config.quantization or "none",
            speculation=self._spec.speculation,
            routes=self._spec.routes,
            lora=self._spec.lora,
            vllm=dict(self._spec.vllm),
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            workers=config.parallel_config.world_size_across_dp,
            transfer=self._backend,
            holding=self._state.holding,
            base=self._state.base,
            unusable=self._state.unusable,
            generated=self._generated,
            cached=self._cached,
        )

    def sample(
        self,
        call: int,
        asked: Sequence[PromptRequest],
        holding: Holding | None = None,
        *,
        keep_prefixes: bool = False,
    ) -> None:
        """Sample G responses to each prompt.

        Each reply has the `Groups` that a decoding step has completed. The prefix cache is emptied before the first
        prompt: a cached prefix changes the last bits of the log-probs, and equal calls would return different values.

        Args:
            call: its number.
            asked: the prompts.
            holding: weights that the caller expects; None: whichever.
            keep_prefixes: do not empty the cache.

        Raises:
            Refusal: the engine holds other weights, or none that can be used.
            InvalidRequest: a response could be cut before `max_tokens`, or vLLM does not accept a prompt.
        """
        from vllm import TokensPrompt
        from vllm.exceptions import VLLMClientError

        if self._asleep:
            raise RunError(f"it is asleep ({', '.join(sorted(self._asleep))})")
        self._state.check_usable(holding)
        if not (self.sampling or keep_prefixes):
            self._settle()
            self._llm.reset_prefix_cache()
        if not asked:
            self._replies.append(Reply([], number=call))
        try:
            for one in asked:
                if one.request.routes and not self._spec.routes:
                    raise InvalidRequest("it was started without --moe-routing-replay, and returns no routes")
                self._check_room(one)
                parameters = sampling_params(one.request, one.position, self._vocab_size, one.stop)
                name = str(one.number)
                prompt = TokensPrompt(prompt_token_ids=list(one.ids))
                self._llm.llm_engine.add_request(name, prompt, parameters, lora_request=self._lora)
                self._running[name] = call, one
                self._unfinished[call] += 1
        except Exception as error:  # any error: none of the prompts may stay
            self.abandon([one.number for one in asked])
            if isinstance(error, (ValueError, VLLMClientError)):
                raise InvalidRequest(str(error)) from error
            raise

    def abandon(self, numbers: Sequence[int] | None = None) -> None:
        """Stop sampling these prompts, or all; nobody waits for them."""
        names = [name for name in self._running if numbers is None or int(name) in numbers]
        for name in names:
            call, _ = self._running.pop(name)
            self._unfinished[call] -= 1
        self._llm.llm_engine.abort_request(names)
        parents = self._llm.llm_engine.output_processor.parent_requests  # of groups: vLLM 0.32 keeps those it aborts
        for key in [key for key, parent in parents.items() if parent.external_req_id in names]:
            del parents[key]

    def open_push(self, init_info: dict[str, Any]) -> None:
        """Pass the transport's parameters to vLLM."""
        with _refusals():
            call_workers(self._llm, "init_weight_transfer_engine", init_info=init_info)

    def start_push(self, holding: Holding, manifest: Manifest) -> None:
        """Begin to replace the weights; nothing is sampled until `finish_push`. Unfinished responses are dropped."""
        reason = f"push {holding.version} has not ended"
        self.abort_push(reason)
        self._drop(Refusal(reason))
        with self._state.begin(holding, manifest), _refusals():
            if self._spec.lora is not None:
                self._on_models(partial(stage, manifest=manifest if self._state.adapts else None))
            self._names = frozenset(spec.name for spec in manifest)
            call_workers(self._llm, "start_weight_update")

    def update_push(self, holding: Holding, update_info: dict[str, Any]) -> None:
        """Load one bucket."""
        try:
            parts = parts_of(update_info)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"this describes no bucket: {error!r}") from error
        with self._state.bucket(parts, holding), _refusals():
            call_workers(self._llm, "update_weights", update_info=update_info)

    def finish_push(self, holding: Holding) -> None:
        """Serve the new weights, provided that all of them have come, and that they are all that the engine holds."""
        with self._state.finish(holding), _refusals():
            call_workers(self._llm, "finish_weight_update")  # it removes adapters
            self._llm.update_weight_version(str(holding.version))
            if self._state.adapts:
                self._on_models(install)
                self._lora = lora_request()
            self._settle()
            check_reset(self._llm.reset_prefix_cache())
            if not self._state.adapts and not self._state.holding.version:  # later pushes have the same tensors
                self._check_written()

    def abort_push(self, reason: str, holding: Holding | None = None) -> None:
        """Give up a push, if it is the open or the last one; None: whichever it is.

        The weights may be mixed until the next complete push.
        """
        self._state.fail(reason, holding)
        if self._state.leave_session():
            try:  # a failing update is the only way to end vLLM's update session early
                call_workers(self._llm, "update_weights", update_info={})
            except WorkerError:
                return
            raise AssertionError("vLLM accepted an empty update")

    def digests(self) -> list[dict[str, str]]:
        """Digests of the tensors of the last push in place, one dict per worker; see `weights.verify`."""
        from oblr_megatron.weights.verify import read_back

        with _refusals():
            return self._on_models(partial(read_adapter, names=self._names) if self._state.adapts else read_back)

    def speculation(self) -> DraftReport:
        """Drafts since the last call, and the bound; a `Refusal` if the engine does not speculate."""
        if self._spec.speculation == "none":
            raise Refusal("it was started without --speculation")
        core: Any = self._llm.llm_engine.engine_core  # in this process
        return core.engine_core.scheduler.collect_report()

    def sleep(self, level: int) -> None:
        """Free GPU memory. Level 1 moves the weights to host memory; level 2 drops them, so a push must follow."""
        self._settle()
        self._llm.sleep(level=level)
        self._asleep = {"weights", "kv_cache"}
        if level > 1:
            self._state.drop(f"its weights were dropped by sleep level {level}")

    def wake(self, tags: Sequence[str]) -> None:
        """Take GPU memory back. Only sleeping tags are passed on: vLLM wakes nothing if one of them is awake."""
        asleep = sorted(self._asleep & set(tags))
        if asleep:
            self._llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    @cached_property
    def _identity(self) -> ModelIdentity:
        """Only servers need it; their door asks for it at once."""
        return ModelIdentity.of(self._spec.model)

    def _check_written(self) -> None:
        """Refuse an engine that keeps a weight of its checkpoint which no push replaces."""
        reports = self._on_models(partial(unwritten, pushed=frozenset(self._shapes)))
        names = sorted({name for report in reports for name in report})
        if names:
            what = f"the engine computes with {len(names)} parameters that no push writes"
            raise WeightError(f"{what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")

    def _on_models(self, function: Callable[[Any], Any]) -> list[Any]:
        """A function of every worker's model."""
        return call_workers(self._llm, "apply_model", fn=function)

    def _settle(self) -> None:
        """Take the results of steps that vLLM has begun ahead, before the prefix cache is emptied.

        With asynchronous scheduling a step may be under way when the last response ends. Its routes would meet an
        emptied cache in the next step, where vLLM (0.32, `aux_output_connector.worker`) asserts that none are left.
        """
        core: Any = self._llm.llm_engine.engine_core  # in this process
        while core.engine_core.batch_queue:  # None if steps are not scheduled ahead
            self._llm.llm_engine.step()

    def _decode(self) -> dict[int, Groups]:
        """One decoding step: the groups that it has completed, by their calls."""
        outputs = [one for one in self._llm.llm_engine.step() if one.finished and one.request_id in self._running]
        # All are read before a call loses its last prompt: an error is answered to every call that samples.
        groups = [self._group(self._running[output.request_id][1], output) for output in outputs]
        complete: defaultdict[int, Groups] = defaultdict(list)
        for output, group in zip(outputs, groups, strict=True):
            call, one = self._running.pop(output.request_id)
            self._unfinished[call] -= 1
            complete[call].append((one.number, group))
        return complete

    def _group(self, one: PromptRequest, output: Any) -> list[Sample]:
        version, routes, recorded = self._state.holding.version, one.request.routes, one.request.recorded > 0
        read = partial(to_sample, routes=routes, recorded=recorded)
        group = [
            read(one.position, one.ids, response, version, self._tokenizer, self._vocab_size)
            for response in output.outputs
        ]
        self._generated += sum(len(sample.response_ids) for sample in group)
        self._cached += output.num_cached_tokens or 0
        return group * (one.request.group_size if one.request.greedy else 1)

    def _check_room(self, one: PromptRequest) -> None:
        """vLLM would silently cut a longer response, and report the end of one with `max_tokens`."""
        needed, most = len(one.ids) + one.request.max_tokens, self._spec.max_model_len
        if needed > most:
            raise InvalidRequest(f"a prompt and its response need {needed} tokens, but it takes {most} (max_model_len)")

    def _drop(self, error: Exception) -> None:
        """End all calls that sample with an error."""
        calls = {call for call, _ in self._running.values()} | {*(+self._unfinished)}
        self.failed = not isinstance(error, RunError)
        if not self.failed:  # or it could fail again, and nobody would be answered
            self.abandon()
        self._unfinished.clear()
        self._replies += [failure(error, call) for call in calls]

    def _take_replies(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies


def failure(error: Exception, number: int = 0, kind: type[RunError] = EngineLostError) -> Reply:
    """The reply to a call that ended with an error. One that no code of ours has raised is printed, and is a `kind`."""
    if isinstance(error, RunError):
        return Reply(error=str(error), kind=type(error), number=number)
    traceback.print_exception(error)
    return Reply(error=f"{type(error).__name__}: {error}", kind=kind, number=number)


@contextmanager
def _refusals() -> Iterator[None]:
    """A refusal of the workers becomes one of the engine.

    Raises:
        DamagedError: a bucket has another checksum than the trainer's.
        Refusal: the request does not fit for another reason.
    """
    try:
        yield
    except WorkerRefusal as error:
        kind = DamagedError if DAMAGED in str(error) else Refusal
        raise kind(str(error)) from error
