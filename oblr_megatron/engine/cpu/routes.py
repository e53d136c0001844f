"""vLLM's CPU worker with routes: its capture of routed experts, in the first model runner (see `engine.routes`).

vLLM's second runner calls its connector at three points of a step, and so does the runner here:

    begin_step        before the forward pass: requests and block hashes that are new to the worker
    prepare_output    after it: a copy of the rows, with the requests and positions of the batch
    process_output    after sampling: rows of rejected drafts are dropped, the others leave with the step's output
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class RoutesRunner(CPUModelRunner):
    """The first model runner, which also returns the routed experts of each step. vLLM runs no async steps on CPUs."""

    _routes: AuxOutputWorkerConnector | None = None
    _step: tuple[Any, Any] | None = None  # vLLM's SchedulerOutput and PendingAuxOutput, until the step is sampled

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, kv_cache_allocation_context: Any = None
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
        if not is_profiling:
            self._routes = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        assert self._routes is not None, "vLLM sets the KV cache up before the first step"
        self._routes.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if scheduler_output.total_num_scheduled_tokens:
            requests = self.input_batch.num_reqs
            batch: Any = SimpleNamespace(
                req_ids=self.input_batch.req_ids,
                query_start_loc_np=self.query_start_loc.np[: requests + 1].copy(),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:requests].copy(),
            )
            self._step = scheduler_output, self._routes.prepare_output(batch)
        return output

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:  # type: ignore[override]
        """See vLLM's runner."""
        output: Any = super().sample_tokens(grammar_output)
        if self._step is not None:
            (scheduled, pending), self._step = self._step, None
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            drafts = scheduled.scheduled_spec_decode_tokens
            rows = np.array([1 + len(drafts.get(name, ())) for name in pending.request_ids])  # that could be sampled
            pending.enqueue_cpu_copy(sampled, np.where(sampled > 0, rows - sampled, 0))
            output.aux_output_connector_output = pending.process_output()
        return output


class RoutesWorker(cpu_worker.CPUWorker):
    """vLLM's CPU worker with this runner."""

    def init_device(self) -> None:
        cpu_worker.CPUModelRunner = RoutesRunner  # type: ignore[misc]
        super().init_device()
        assert isinstance(self.model_runner, RoutesRunner), "vLLM chose another runner"
