"""Search over all layouts that the checks of a run accept, with their memory and predicted time.

    result = search(request)
    result.plans[0].prediction.seconds, result.plans[0].sections     # the fastest that fits
    result, request = best_split(request, "stream")                  # engines on GPUs of their own

The checks are a run's own (`checks.layout.check_layout`, `preflight.inputs.check_dealing`,
`memory.select_mode.resolve`).
Tensor parallelism stays within a node. The distributed optimizer is on if several ranks hold the same weights, because
it needs less memory and moves no more bytes. Sequence parallelism and `optimizer.offload` are tried on and off. Engines
get the largest share of a GPU's memory that the trainer leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from oblr_megatron.checks.layout import check_layout, heads_problem, num_experts
from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.checks.machine import suits_transformer_engine
from oblr_megatron.config import Config, ParallelConfig
from oblr_megatron.errors import UserError
from oblr_megatron.extras.planner.cost import predict
from oblr_megatron.extras.planner.sampling_cost import rollout_phase
from oblr_megatron.extras.planner.setting import Phase, Prediction, Request, Setting
from oblr_megatron.formatting import size
from oblr_megatron.memory.engine import engine_bytes, push_bytes, server_push_bytes
from oblr_megatron.memory.pass_plan import Layout, longest_sample
from oblr_megatron.memory.select_mode import MODES, resolve
from oblr_megatron.memory.training import MemoryEstimate
from oblr_megatron.preflight.checklist import Proposed, check
from oblr_megatron.preflight.inputs import check_dealing

ROWS = (1, 2, 4)  # longest samples per microbatch
MOST_STAGES, MOST_CONTEXT, MOST_SPLITS = 32, 8, 8
KEEP_FREE = 2 * 2**30  # bytes per GPU for CUDA, NCCL and fragmentation
UTILIZATIONS = tuple(step / 20 for step in range(18, 1, -1))  # 0.9 down to 0.1

Sections = dict[str, Any]
"""[parallel], [rollout], [gradnorm], [optimizer], [algo] of a config file."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One layout that fits."""

    sections: Sections
    config: Config
    prediction: Prediction
    memory: MemoryEstimate
    training_bytes: int  # per GPU during training, with the sleeping engine
    rollout_bytes: int  # per GPU during sampling, with what the trainer keeps

    @property
    def peak_bytes(self) -> int:
        """The larger of the two."""
        return max(self.training_bytes, self.rollout_bytes)

    @property
    def name(self) -> str:
        """The name, e.g. "TP4 PP2 SP, vLLM TP4, full recompute, two_pass, 8192 tokens"."""
        parallel = self.config.parallel
        sizes = {
            "TP": parallel.tensor_model_parallel_size,
            "PP": parallel.pipeline_model_parallel_size,
            "CP": parallel.context_parallel_size,
            "EP": parallel.expert_model_parallel_size,
        }
        words = [f"{name}{count}" for name, count in sizes.items() if count > 1] or ["DP only"]
        if parallel.expert_tensor_parallel_size:
            words.append(f"ETP{parallel.expert_tensor_parallel_size}")
        words += ["SP"] * parallel.sequence_parallel + ["short ends"] * parallel.account_for_embedding_and_loss
        recompute = [f"{parallel.recompute_granularity} recompute"] * (parallel.recompute_granularity != "none")
        norms = [self.config.gradnorm.mode] * self.config.measures_norms
        offload = ["offload"] * (self.config.optimizer.offload != "none")
        rest = [f"vLLM TP{self.config.rollout.tensor_parallel_size}", *recompute, *norms, *offload]
        return ", ".join([" ".join(words), *rest, f"{parallel.micro_batch_tokens} tokens"])


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    plans: list[Plan]  # the fastest first
    refused: int  # layouts that the checks refuse
    too_large: int


def best_split(request: Request, overlap: str) -> tuple[SearchResult, Request]:
    """The division of GPUs between engines and trainer with the fastest step, and its layouts.

    Args:
        request: its `gpus` are those of trainer and engines together.
        overlap: rollout.overlap, "stream" or "one_step".

    Raises:
        UserError: no division is possible, or nothing fits in any; says why of the middle one.
    """
    results: list[tuple[SearchResult, Request]] = []
    refused: list[tuple[Request, UserError]] = []
    for split in _splits(request, overlap):
        try:
            results.append((search(split), split))
        except UserError as error:
            refused.append((split, error))
    if not results and not refused:
        what = "one GPU cannot train and sample at the same time"
        raise UserError(what, where="plan", fix="use two or more GPUs")
    if not results:
        split, refusal = refused[len(refused) // 2]
        sizes = f"{split.engine_gpus} for engines and {split.gpus} for the trainer"
        what = f"no division of the {request.gpus} GPUs works; with {sizes}: {refusal.what}"
        raise UserError(what, where=refusal.where, fix=refusal.fix) from refusal
    return min(results, key=lambda each: each[0].plans[0].prediction.seconds)


def _splits(request: Request, overlap: str) -> Iterator[Request]:
    """Up to MOST_SPLITS - 1 divisions, in whole nodes where there are two or more."""
    node = request.machine.device.gpus_per_node
    unit = node if request.gpus >= 2 * node else 1
    rollout = {"overlap": overlap, "max_staleness": int(overlap == "one_step"), "sleep_level": 0}
    table = {**request.table, "rollout": {**request.table.get("rollout", {}), **rollout}}
    units = request.gpus // unit
    for engines in sorted({max(1, units * part // MOST_SPLITS) for part in range(1, MOST_SPLITS)}):
        if engines < units:
            trainer = request.gpus - engines * unit
            yield replace(request, gpus=trainer, engine_gpus=engines * unit, table=table)


def search(request: Request) -> SearchResult:
    """All layouts that fit, the fastest first.

    Raises:
        UserError: the run or all its layouts are refused, or none fits; says by how much the smallest is too large.
    """
    per_node = min(request.machine.device.gpus_per_node, request.gpus)
    engines = None if request.engine_gpus else request.table.get("rollout", {}).get("num_engines")
    width = max(1, request.gpus // engines) if engines else 1  # the search chooses their size, not the config
    run = request.config({"rollout": {"tensor_parallel_size": width, "num_engines": engines}})
    check(Proposed(run, request.hf_config, request.gpus, per_node, on_gpu=True), "device")
    tally = _Tally(request)
    plans = [plan for layout in layouts(request) for plan in tally.consider(layout)]
    if not plans:
        raise tally.nothing()
    plans.sort(key=lambda plan: (plan.prediction.seconds, plan.peak_bytes))
    return SearchResult(plans, tally.refused, tally.too_large)


def layouts(request: Request) -> Iterator[Sections]:
    """Candidates for section [parallel]; the checks refuse most of them."""
    hf, node = request.hf_config, request.machine.device.gpus_per_node
    sequence = request.config({})
    chunks = "virtual_pipeline_model_parallel_size"
    unset = {chunks: None} if chunks in request.table.get("parallel", {}) else {}
    shards = sequence.optimizer.name == "adam" and sequence.model.dtype != "float64"  # others are refused
    experts, longest = num_experts(hf), longest_sample(sequence)
    widths = powers(min(node, request.gpus))
    depths = [depth for depth in range(1, MOST_STAGES + 1) if not request.gpus % depth]
    spreads = powers(min(experts, request.gpus)) if experts else [1]
    for tp, pp, cp, ep in product(widths, depths, powers(min(MOST_CONTEXT, request.gpus)), spreads):
        if request.gpus % (tp * pp * cp) or request.gpus % (ep * pp):
            continue
        ends = bool(hf["num_hidden_layers"] % pp)
        if ends and (hf["num_hidden_layers"] + 2) % pp:
            continue
        replicas = request.gpus // (tp * pp * cp)
        splits = sorted({1, tp}) if experts else [None]
        parallel = ([True] if experts else [True, False]) if tp > 1 else [False]
        for etp, sp, granularity, rows in product(splits, parallel, ("none", "full"), ROWS):
            fields = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "sequence_parallel": sp,
                "recompute_granularity": granularity,
                "micro_batch_tokens": rows * longest,
                "use_distributed_optimizer": shards and replicas * cp > 1,
                "account_for_embedding_and_loss": ends,
            }
            yield fields | unset | ({"expert_tensor_parallel_size": etp} if etp is not None else {})


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**exponent for exponent in range(most.bit_length())]


class _Tally:
    """Checks one layout after another and counts the refused ones."""

    def __init__(self, request: Request) -> None:
        self.request, self.run = request, request.config({})
        self.memory_bytes = request.machine.device.memory_bytes
        self.limit = self.memory_bytes - KEEP_FREE
        self.refused = self.too_large = 0
        self.nearest: tuple[int, str] | None = None
        self.reasons: dict[str, str] = {}
        self._rollouts: dict[tuple[int, float], Phase] = {}

    def consider(self, parallel: Sections) -> list[Plan]:
        """The plans of a layout, for each place of the optimizer's state and each norm mode that is possible."""
        request, plans = self.request, []
        longest, optimizer = longest_sample(self.run), self.run.optimizer
        has_state = optimizer.keeps_moments or self.run.model.dtype == "bfloat16"
        modes = MODES[::-1] if self.run.measures_norms else ("",)
        for mode, offload in product(modes, ("none", "sampling") if has_state else ("none",)):
            if (
                mode not in ("", "two_pass")
                and parallel["micro_batch_tokens"] > longest
                and not self.run.model.lora.rank
            ):
                continue  # Transformer Engine's layers need one sample per microbatch, so a larger budget is pointless
            try:
                norms = {"gradnorm": {"mode": mode}} if mode else {}
                sections = {"parallel": parallel, **norms, "optimizer": {"offload": offload}}
                sections |= {"algo": self.folds(parallel)}
                config = request.config(sections)
                check_layout(request.hf_config, config, request.gpus)
                check_dealing(request.hf_config, config, request.gpus)
                choice = resolve(
                    request.hf_config,
                    config,
                    request.gpus,
                    on_gpu=True,
                    transformer_engine=suits_transformer_engine(config.model),
                )
            except UserError as error:
                self.refused += 1
                self.reasons.setdefault(error.where, str(error))
                continue
            plan = self.placed(sections, config, choice.estimate)
            plans += [plan] if plan else []
        return plans

    def folds(self, parallel: Sections) -> Sections:
        """Section [algo] with num_folds raised to the next number that divides among the replicas."""
        request, algo = self.request, self.request.table.get("algo", {})
        own = dict(algo.get("snr", {}))
        config = self.run.model_copy(update={"parallel": ParallelConfig.model_validate(parallel)})
        layout = Layout.of(request.hf_config, config, request.gpus)
        step, prompts = max(1, layout.replicas // layout.block), request.table["num_prompts"]
        wanted = own.get("num_folds", 4)
        fits = [count for count in range(step, prompts + 1, step) if prompts % count == 0]
        large = [count for count in fits if count >= wanted]
        return {**algo, "snr": {**own, "num_folds": (large or fits or [wanted])[0]}}

    def placed(self, sections: Sections, config: Config, memory: MemoryEstimate) -> Plan | None:
        """The layout with the engine size at which sampling is fastest; None if nothing fits."""
        request = self.request
        apart = bool(request.engine_gpus)
        total = memory.total + (server_push_bytes(request.hf_config, config) if apart else 0)
        self.note(total, config)
        held, training = (0, 0) if apart else (memory.between_steps, total)
        widths = powers(min(request.machine.device.gpus_per_node, request.engine_gpus or request.gpus))
        engines = (self.engine(config, width, held, training) for width in widths if total <= self.limit)
        fits = [fit for fit in engines if fit is not None]
        if not fits:
            self.too_large += 1
            return None
        config, sampling, training = min(fits, key=lambda fit: self.rollout(fit[0]).seconds)
        keys = ("tensor_parallel_size", "gpu_memory_utilization", *(("overlap", "max_staleness") if apart else ()))
        return Plan(
            sections | {"rollout": {key: getattr(config.rollout, key) for key in keys}},
            config,
            predict(self.setting(config), self.rollout(config)),
            memory,
            total if apart else training,
            sampling,
        )

    def engine(self, config: Config, width: int, held: int, training: int) -> tuple[Config, int, int] | None:
        """(run, bytes during sampling, bytes during training) with engines of `width` GPUs and as much memory as fits.

        None if the heads do not divide, `rollout.num_engines` is another number, or the KV cache does not hold one
        longest sequence.
        """
        request, hf = self.request, self.request.hf_config
        gpus, engines = request.engine_gpus or request.gpus, config.rollout.num_engines
        if heads_problem(hf, width, "tensor_parallel_size") or gpus % width or engines not in (None, gpus // width):
            return None
        for share in UTILIZATIONS:
            rollout = {"tensor_parallel_size": width, "gpu_memory_utilization": share}
            tried = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
            engine = engine_bytes(hf, tried, device_bytes=self.memory_bytes)
            asleep = engine.asleep(config.rollout.sleep_level)
            sampling = held + engine.total + push_bytes(hf, tried)
            if max(sampling, training + asleep) > self.limit:
                continue
            if engine.kv_tokens < max_model_len(config):
                return None
            return tried, sampling, training + asleep
        return None

    def setting(self, config: Config) -> Setting:
        """The input of the cost model."""
        request = self.request
        return Setting(
            request.hf_config,
            config,
            request.gpus,
            request.machine,
            request.mean_response_tokens,
            transformer_engine=suits_transformer_engine(config.model),
            engine_gpus=request.engine_gpus,
            speculation_acceptance=request.speculation_acceptance,
        )

    def rollout(self, config: Config) -> Phase:
        """Sampling; cached, because it depends only on the engines."""
        key = config.rollout.tensor_parallel_size, config.rollout.gpu_memory_utilization
        if key not in self._rollouts:
            self._rollouts[key] = rollout_phase(self.setting(config))
        return self._rollouts[key]

    def note(self, num_bytes: int, config: Config) -> None:
        """Remember the layout that needs the least memory."""
        if self.nearest is None or num_bytes < self.nearest[0]:
            parallel = config.parallel
            sizes = f"TP{parallel.tensor_model_parallel_size} PP{parallel.pipeline_model_parallel_size} "
            sizes += f"CP{parallel.context_parallel_size} EP{parallel.expert_model_parallel_size}"
            norms = f", {config.gradnorm.mode}" * config.measures_norms
            offload = ", offload" * (config.optimizer.offload != "none")
            self.nearest = num_bytes, f"{sizes}, {parallel.recompute_granularity} recompute{norms}{offload}"

    def nothing(self) -> UserError:
        """The error that says why there is no plan."""
        request = self.request
        where = f"{request.model} on {request.gpus} x {size(self.memory_bytes)}"
        if self.nearest is None:
            reason = next(iter(self.reasons.values()), "there are no candidates")
            return UserError(f"no layout is allowed; for example: {reason}", where=where, fix="change the sizes")
        smallest, name = self.nearest
        excess = smallest - self.limit
        lack = f"{size(excess)} too much" if excess > 0 else "which leaves too little for a vLLM engine"
        return UserError(
            f"no layout fits: the smallest ({name}) needs {size(smallest)} per GPU, {lack}",
            where=where,
            fix="use more GPUs, GPUs with more memory, or a smaller --sequence-length",
        )
