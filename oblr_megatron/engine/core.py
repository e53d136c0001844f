"""The engine process's side of every call: one `vllm.LLM`, and the state it may be used in.

An engine serves one complete set of weights or nothing. From the first byte of a push until its end it refuses to
generate, and so it does after a push that failed, until one succeeds; likewise after weights were dropped by a sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oblr_megatron.checkpoint.hf_dir import checkpoint_shapes
from oblr_megatron.engine.protocol import EngineSpec, SamplingRequest
from oblr_megatron.engine.samples import sampling_params, to_sample
from oblr_megatron.errors import RunError, WeightError
from oblr_megatron.types import Sample
from oblr_megatron.weights.manifest import Ledger, Manifest, check_manifest
from oblr_megatron.weights.names import HF_EMBEDDING


class EngineServer:
    """Holds the engine; the methods without an underscore are what the trainer may call, by name."""

    def __init__(self, spec: EngineSpec) -> None:
        import vllm

        self._spec = spec
        self._llm = vllm.LLM(**_llm_arguments(spec))
        self._tokenizer = self._llm.get_tokenizer()
        self._shapes = checkpoint_shapes(spec.model, quantized=True)  # for evaluation; no run pushes into one
        self._vocab_size = self._shapes[HF_EMBEDDING][0]
        self._version = 0
        self._ledger: Ledger | None = None
        self._unusable: str | None = None
        self._asleep: set[str] = set()
        self._llm.update_weight_version("0")
        # What vLLM finds out only in its first forward pass, a head_dim without a kernel for one, shall fail the start.
        self.generate([(0,)], SamplingRequest(group_size=1, temperature=0.0, max_tokens=1, seed=0))

    def generate(self, prompts: Sequence[Sequence[int]], request: SamplingRequest) -> list[list[Sample]]:
        """Sample a group for each prompt.

        Every call starts with no cached prefix, since a prefix read from the cache instead of computed changes the last
        bits of the log-probs, and equal calls would differ.
        """
        from vllm import TokensPrompt

        self._check_usable()
        self._llm.reset_prefix_cache()
        parameters = [sampling_params(request, request.first_group + position) for position in range(len(prompts))]
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts], parameters, use_tqdm=False
        )
        copies = request.group_size if request.greedy else 1
        return [
            [
                to_sample(
                    request.first_group + position, prompt, completion, self._version, self._tokenizer, self._vocab_size
                )
                for completion in output.outputs
            ]
            * copies
            for position, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Hand the data plane its parameters."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_push(self, manifest: Manifest, version: int) -> None:
        """Begin to replace the weights; from here on nothing is generated until `finish_push`."""
        self.abort_push(f"push {version} has not ended")
        check_manifest(manifest, self._shapes, self._spec.dtype)
        self._llm.start_weight_update()
        self._ledger = Ledger(manifest)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take in one bucket."""
        from oblr_megatron.engine.transfer import parts_of

        self._open_ledger().take(parts_of(update_info))
        self._llm.update_weights({"update_info": update_info})

    def finish_push(self, version: int) -> None:
        """Serve the new weights, if all of them have come."""
        self._open_ledger().finish()
        self._llm.finish_weight_update(weight_version=str(version))
        self._ledger = None
        self._llm.reset_prefix_cache()
        self._version, self._unusable = version, None

    def read_back(self) -> list[dict[str, str]]:
        """Digests of the weights that are in place, worker by worker; see `weights.verify`."""
        from oblr_megatron.weights.verify import read_back

        return self._llm.apply_model(read_back)

    def abort_push(self, reason: str) -> None:
        """Give a push up: its weights may be half in place. A later complete one mends that."""
        self._unusable = reason
        if self._ledger is None:
            return
        self._ledger = None
        try:
            self._llm.update_weights({"update_info": {}})
        except Exception:  # noqa: BLE001  vLLM ends an update session when an update fails, and has no other way to
            return
        raise AssertionError("vLLM accepted an empty update")

    def sleep(self, level: int) -> None:
        """Free GPU memory: at level 1 the weights move to host memory, at level 2 they are gone until a push."""
        self._llm.sleep(level=level)
        self._asleep = {"weights", "kv_cache"}
        if level > 1:
            self._unusable = f"its weights were dropped by sleep level {level}"

    def wake(self, tags: list[str] | None) -> None:
        """Take GPU memory back; vLLM would take none at all if asked for a tag that is not asleep."""
        asleep = sorted(self._asleep if tags is None else self._asleep & set(tags))
        if asleep:
            self._llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    def _check_usable(self) -> None:
        if self._asleep:
            raise RunError(f"it sleeps ({', '.join(sorted(self._asleep))})")
        if self._unusable:
            raise RunError(f"{self._unusable}; it generates again after a complete push")

    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            raise WeightError("no push is open")
        return self._ledger


def _llm_arguments(spec: EngineSpec) -> dict[str, Any]:
    """vLLM's own options for a spec."""
    from vllm.config import WeightTransferConfig

    from oblr_megatron.engine.plugin import IPC_BACKEND, SHM_BACKEND

    on_gpu = spec.device == "cuda"
    common = {
        "model": str(spec.model),
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "seed": spec.seed,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, temperature applied
        "weight_transfer_config": WeightTransferConfig(backend=IPC_BACKEND if on_gpu else SHM_BACKEND),
    }
    if on_gpu:
        return common | {
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "tensor_parallel_size": spec.tensor_parallel_size,
            "enable_sleep_mode": spec.sleep_mode,
            "quantization": spec.vllm_quantization,
        }
    return common | {
        "enforce_eager": True,
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": spec.cpu_step_tokens,
    }
