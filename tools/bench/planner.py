"""Compare the planner's predictions, with its default constants, to published throughputs.

    python tools/bench/planner.py --json run/bench/planner.json     half a minute

The rows and their sources: tools/bench/planner_rows.py. Rows of a dispatcher "hybrid" are from releases with HybridEP,
which launches experts without waiting for counts and sends a token to each node once. They are predicted with
HYBRID_S and `node_copies` instead of the default constants. Ours is the plain one.

The column `left_out` is the prediction with constants that were fitted to all rows but this one, over the published
figure. The fit starts from the defaults and holds them with a prior (SPREAD), because rows are few.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from planner_rows import NOT_FITTED, OVERLAPPED, Case, cases, left
from record import publish
from scipy.optimize import least_squares

from oblr_megatron.config import Config, parse_config
from oblr_megatron.extras.planner.constants import DEFAULT, Constants, PlannerMachine
from oblr_megatron.extras.planner.cost import hidden_seconds, predict
from oblr_megatron.extras.planner.sampling_cost import rollout_phase
from oblr_megatron.extras.planner.setting import Phase, Setting
from oblr_megatron.extras.planner.stage import added, scaled
from oblr_megatron.extras.planner.training_cost import log_prob_phase, training_phases
from oblr_megatron.observe.performance.hardware import device_named

HYBRID_S = 0.9e-3
"""`mixture_s` of a dispatcher that does not wait for counts; set from the row marked "mixture_s"."""
FITTED = ("product", "product_fp8", "attention", "memory", "link", "mixture_s", "decode", "decode_step_s", "rollout")
SPREAD = log(1.5)
"""Standard deviation of the prior of each constant's logarithm; that of a row is NOISE."""
NOISE = log(1.1)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Example: Row(source="NeMo RL 0.5", model="Qwen3-32B", devices="32 h100", dispatcher="plain", figure="step s",
                 published=376.0, predicted=317.0, ratio=0.84, left_out=0.88, used="no")
    """

    source: str
    model: str
    devices: str
    dispatcher: str
    figure: str
    published: float
    predicted: float
    ratio: float  # predicted over published
    left_out: float  # the same with constants that were fitted to the other rows
    used: str  # the constant that was chosen from this row, or "no"


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    rows = compared(cases())
    publish(rows, "planner", options.json)
    for other in left():
        print(f"not compared: {other.source}, {other.what}, {other.figure}: {other.reason}")
    fitted = [row for row in rows if row.used != NOT_FITTED]
    for name in ("ratio", "left_out"):
        errors = [abs(log(getattr(row, name))) for row in fitted]
        print(f"{name}: median factor {exp(median(errors)):.2f}, largest {exp(max(errors)):.2f}")


def machine_of(case: Case, constants: Constants) -> PlannerMachine:
    """The machine of a row, with the dispatcher's constants."""
    device = device_named(case.gpu)
    device = replace(device, gpus_per_node=72) if case.gpu == "gb200" else device
    if device.memory_gb == 80:
        device = replace(device, memory_gb=85)  # what CUDA shows of 80 GiB; vLLM takes its share of that
    if case.dispatcher == "plain":
        return PlannerMachine(device, constants)
    nodes, chosen = case.nodes_of_experts, case.hf["num_experts_per_tok"]
    reached = (1 - (1 - 1 / nodes) ** chosen) * nodes / chosen  # nodes that a token's experts are on, over experts
    waited = HYBRID_S * constants.mixture_s / DEFAULT.mixture_s
    return PlannerMachine(device, replace(constants, mixture_s=waited, node_copies=reached))


def predicted(case: Case, constants: Constants) -> float:
    """The planner's figure: seconds of a step, tokens/s of an engine, or tokens/s/GPU."""
    machine = machine_of(case, constants)
    if case.users:  # a benchmark, not a rollout
        machine = replace(machine, constants=replace(machine.constants, rollout=1.0))
        rollout = {"max_num_seqs": case.users, "gpu_memory_utilization": 0.9}
        config = run_config(1, case.users, 1, case.batch, case.length, {}, rollout=rollout)
        return case.users * (case.length - case.batch) / rollout_phase(Setting(case.hf, config, 1, machine)).seconds
    if case.is_step:
        return _step(case, machine)
    model = {"fp8": "hybrid"} if case.fp8 else {}
    config = run_config(case.gpus, case.batch, 1, 16, case.length, case.sizes, rows=case.rows, model=model)
    setting = Setting(case.hf, config, case.gpus, machine)
    phases = training_phases(setting)
    seconds = phases["gradient"].seconds + phases["optimizer"].seconds
    if case.dispatcher == OVERLAPPED:
        seconds -= machine.constants.hidden * phases["gradient"].terms["experts"]
    return setting.tokens / seconds / case.gpus


def _step(case: Case, machine: PlannerMachine) -> float:
    trainers = case.gpus - case.engine_gpus
    rollout: dict[str, Any] = {"tensor_parallel_size": case.width} | ({"quantization": "fp8"} if case.fp8 else {})
    if case.engine_gpus:
        rollout |= {"overlap": "one_step", "max_staleness": 1, "importance_sampling": "token", "sleep_level": 0}
        rollout |= {"gpu_memory_utilization": case.utilization}
    config = run_config(trainers, case.batch, case.group, 128, case.longest, case.sizes, rollout=rollout)
    setting = Setting(case.hf, config, trainers, machine, case.length - 128, engine_gpus=case.engine_gpus)
    phases = predict(setting).phases
    at_once = config.model_copy(update={"num_prompts": case.batch * case.ahead})
    phases["rollout"] = Phase(scaled(rollout_phase(replace(setting, config=at_once)).terms, 1 / case.ahead))
    log_probs = log_prob_phase(setting).terms
    phases["gradient"] = Phase(added(phases["gradient"].terms, log_probs, log_probs))
    return sum(phase.seconds for phase in phases.values()) - hidden_seconds(setting, phases)


def compared(found: Sequence[Case]) -> list[Row]:
    """Each case with the default constants, and with those fitted to the others."""
    rows, known = [], [case for case in found if case.used != NOT_FITTED]
    for case in found:
        own = predicted(case, DEFAULT)
        fitted = predicted(case, fit([other for other in known if other is not case]))
        rows.append(
            Row(
                source=case.source,
                model=case.model,
                devices=f"{case.gpus} {case.gpu}",
                dispatcher=case.dispatcher if "expert" in case.sizes else "",
                figure="step s" if case.is_step else "sampled tokens/s" if case.users else "tokens/s/GPU",
                published=case.figure,
                predicted=own,
                ratio=own / case.figure,
                left_out=fitted / case.figure,
                used=case.used,
            )
        )
    return rows


def fit(found: Sequence[Case]) -> Constants:
    """The constants FITTED that explain some rows best, near the defaults."""

    def constants(logs: np.ndarray) -> Constants:
        factors = dict(zip(FITTED, np.exp(logs), strict=True))
        return replace(DEFAULT, **{name: getattr(DEFAULT, name) * float(factors[name]) for name in FITTED})

    def residuals(logs: np.ndarray) -> np.ndarray:
        own = constants(logs)
        rows = [log(predicted(case, own) / case.figure) / NOISE for case in found]
        return np.array([*rows, *(logs / SPREAD)])

    return constants(least_squares(residuals, np.zeros(len(FITTED))).x)


def run_config(
    gpus: int,
    prompts: int,
    group: int,
    prompt: int,
    length: int,
    sizes: dict[str, int],
    *,
    rows: int = 1,
    **sections: dict[str, Any],
) -> Config:
    """Config of a run without norms, by default with one sequence per microbatch."""
    tensor = sizes.get("tensor", 1)
    context, pipeline = sizes.get("context", 1), sizes.get("pipeline", 1)
    replicas = gpus // (tensor * context * pipeline)
    folds = replicas // max(1, sizes.get("expert", 1) // (tensor * context))  # one per replicas that share experts
    parallel = {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_model_parallel_size": pipeline,
        "account_for_embedding_and_loss": "short" in sizes,
        "virtual_pipeline_model_parallel_size": sizes.get("chunks"),
        "expert_model_parallel_size": sizes.get("expert", 1),
        "expert_tensor_parallel_size": 1 if "expert" in sizes else None,
        "sequence_parallel": tensor > 1,
        "micro_batch_tokens": rows * length,
        "recompute_granularity": "full" if "recompute" in sizes else "none",
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
    }
    return parse_config(
        {
            "run_dir": "unused",
            "num_prompts": prompts,
            "group_size": group,
            "model": {"path": "unused", "dtype": "bfloat16", **sections.get("model", {})},
            "data": {"train": "unused", "max_prompt_tokens": prompt},
            "rollout": {
                "max_response_tokens": length - prompt,
                "gpu_memory_utilization": 0.6,
                **sections.get("rollout", {}),
            },
            "algo": {"baseline": "none", "snr": {"num_folds": folds, "estimator": "momentum"}},
            "parallel": {name: value for name, value in parallel.items() if value is not None},
        }
    )


if __name__ == "__main__":
    main()
