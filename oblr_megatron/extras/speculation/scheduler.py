"""vLLM's scheduler, which verifies drafts only while so few sequences run that it pays (options.py).

vLLM loads the class by name (`scheduler_cls`) in the process of its engine core, in colocated engines and API servers.
"""

from __future__ import annotations

import time
from typing import Any, cast

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from oblr_megatron.engine.http_messages import DraftReport
from oblr_megatron.extras.speculation.options import BELOW, BreakEven


class TailScheduler(Scheduler):
    """Chooses before each step whether the drafts that it proposes will be verified by the next one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        assert config.speculative_config is not None, "only an engine that speculates has this scheduler"
        width, most = self.num_spec_tokens, self.scheduler_config.max_num_seqs
        below: int | None = cast(dict[str, Any], config.additional_config)[BELOW]
        # A step with drafts then has no more rows than the largest one without, for which vLLM has set memory aside.
        self._break_even = BreakEven(below, most=max(1, most // (1 + width)))
        # vLLM's table of draft tokens by batch size. "suffix" must see every token, so its drafts are dropped instead.
        dropped = width if config.speculative_config.method == "suffix" else 0
        self._widths = {True: [width] * (most + 1), False: [dropped] * (most + 1)}
        self._has_drafts = self._next_has_drafts = False
        self._began = 0.0
        self._drafts = self._proposed = self._accepted = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._began = time.perf_counter()
        sequences = min(len(self.running) + len(self.waiting), self.max_num_running_reqs)
        self._has_drafts, self._next_has_drafts = self._next_has_drafts, self._break_even.choose(sequences)
        self.dynamic_sd_lookup = self._widths[self._next_has_drafts]
        return super().schedule(throttle_prefills)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """See vLLM's `Scheduler`. Without this call a request has no drafts."""
        if self._next_has_drafts:
            super().update_draft_token_ids(draft_token_ids)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        for name, draft in scheduler_output.scheduled_spec_decode_tokens.items():
            self._drafts += 1
            self._proposed += len(draft)
            self._accepted += max(0, len(sampled[rows[name]]) - 1)
        tokens, sequences = sum(map(len, sampled)), len(scheduler_output.num_scheduled_tokens)
        prompts = scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # The search for drafts is part of the step before, so a step counts only among steps of its kind.
        if sequences and not prompts and self._has_drafts == self._next_has_drafts:
            seconds = time.perf_counter() - self._began
            self._break_even.record(sequences, drafts=self._has_drafts, seconds=seconds, tokens=tokens)
        return outputs

    def collect_report(self) -> DraftReport:
        """Results of speculation since the last call."""
        drafts, proposed, accepted = self._drafts, self._proposed, self._accepted
        self._drafts = self._proposed = self._accepted = 0
        return DraftReport(drafts=drafts, proposed=proposed, accepted=accepted, below=self._break_even.below)
