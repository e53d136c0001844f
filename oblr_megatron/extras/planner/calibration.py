"""Fit the constants of the cost model to measured runs: bounded least squares of log seconds. Imports no torch.

    fitted = fit([observation_of(run_dir, "h100") for run_dir in runs], machine.constants, names)
    fitted.constants, fitted.rms, fitted.rows

The fit minimises over x = log c of the chosen constants

    sum rho(log predicted - log measured) + RIDGE sum (x - x_0)^2,      x_0 the initial constants

The ridge keeps constants that the runs do not determine at their defaults. Errors are ratios, so that short and long
phases weigh equally. rho is quadratic up to ratios of about 1.2 (FAR) and linear beyond, so that one disturbed run does
not dominate. Needs scipy (the extra "study").
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

from oblr_megatron.checkpoint.hf_dir import model_config
from oblr_megatron.checks.machine import suits_transformer_engine
from oblr_megatron.config import parse_config
from oblr_megatron.errors import UserError
from oblr_megatron.extras.planner.constants import Constants, PlannerMachine, cpu_machine
from oblr_megatron.extras.planner.sampling_cost import push_phase, rollout_phase
from oblr_megatron.extras.planner.setting import Setting
from oblr_megatron.extras.planner.training_cost import training_phases
from oblr_megatron.metrics import ENVIRONMENT_FILE, read_metrics, write_whole
from oblr_megatron.observe.performance.hardware import device_named

RIDGE = 1e-3
FAR = 0.2
WARM_UP = 1  # steps that do not count: compilation, caches, allocation of optimizer state
EFFICIENCIES = ("product", "product_fp8", "attention", "memory", "link", "hidden", "decode", "prefill")
BOUNDS = dict.fromkeys(EFFICIENCIES, (1e-3, 1.0))
OTHER_BOUNDS = (1e-7, 1e4)  # seconds, tokens, widths
TRAINING = ("product", "attention", "memory", "link", "message_s", "layer_s", "step_s")
SAMPLING = ("decode", "decode_step_s")
CPU_TRAINING = (*TRAINING, "half_tokens", "mixture_s", "run_s")


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured run. Example: Observation("tp2", setting, {"gradient": 1.92, "optimizer": 0.05})."""

    name: str
    setting: Setting  # its constants are ignored
    seconds: Mapping[str, float]  # by phase: gradient (norms included), optimizer, rollout, push


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of a fit."""

    constants: Constants
    names: tuple[str, ...]  # of the fitted constants
    rows: list[tuple[str, str, float, float]]  # run, phase, measured, predicted
    rms: float  # of log predicted - log measured: 0.1 is about 10%

    def table(self) -> str:
        """One line per phase, then the constants."""
        lines = [
            f"{name:24} {phase:10} measured {measured:9.4g} s   predicted {predicted:9.4g} s   "
            f"{predicted / measured:.2f}x"
            for name, phase, measured, predicted in self.rows
        ]
        values = ", ".join(f"{name} {getattr(self.constants, name):.3g}" for name in self.names)
        return "\n".join([*lines, f"residual {self.rms:.3f} (root mean square of log ratios)", f"constants: {values}"])


def fit(observations: Sequence[Observation], start: Constants, names: Sequence[str]) -> Fitted:
    """Fit the constants `names` to the observations; the others keep their values.

    Raises:
        UserError: scipy is not installed, or no phase was measured.
    """
    from oblr_megatron.checks.packages import require_for_studies

    require_for_studies("scipy")
    from scipy.optimize import least_squares

    if not any(observation.seconds for observation in observations):
        raise UserError("no measured phases", where="calibration", fix="give runs of 2 steps or more")
    bounds = [BOUNDS.get(name, OTHER_BOUNDS) for name in names]
    first = [log(min(max(getattr(start, name), low), high)) for name, (low, high) in zip(names, bounds, strict=True)]

    def errors(x: Sequence[float]) -> list[float]:
        constants = moved(start, names, x)
        ratios = [log(predicted / measured) for _, _, measured, predicted in compare(observations, constants)]
        return ratios + [sqrt(RIDGE) * (value - begin) for value, begin in zip(x, first, strict=True)]

    limits = [log(low) for low, _ in bounds], [log(high) + 1e-9 for _, high in bounds]
    solved = least_squares(errors, first, bounds=limits, loss="soft_l1", f_scale=FAR)
    constants = moved(start, names, solved.x)
    rows = compare(observations, constants)
    return Fitted(constants, tuple(names), rows, root_mean_square([log(row[3] / row[2]) for row in rows]))


def moved(start: Constants, names: Sequence[str], x: Sequence[float]) -> Constants:
    """`start` with the constants `names` at exp(x)."""
    return replace(start, **{name: exp(value) for name, value in zip(names, x, strict=True)})


def compare(observations: Sequence[Observation], constants: Constants) -> list[tuple[str, str, float, float]]:
    """(run, phase, measured, predicted) of every measured phase."""
    rows = []
    for observation in observations:
        predicted = predicted_phases(observation, constants)
        rows += [(observation.name, phase, seconds, predicted[phase]) for phase, seconds in observation.seconds.items()]
    return rows


def predicted_phases(observation: Observation, constants: Constants) -> dict[str, float]:
    """Predicted seconds of the phases of an observation."""
    setting = replace(observation.setting, machine=replace(observation.setting.machine, constants=constants))
    training = training_phases(setting)
    predicted = {
        "gradient": training["norms"].seconds + training["gradient"].seconds,
        "optimizer": training["optimizer"].seconds,
    }
    if "rollout" in observation.seconds:
        predicted["rollout"] = rollout_phase(setting).seconds
    if "push" in observation.seconds:
        predicted["push"] = push_phase(setting).seconds
    return predicted


def root_mean_square(values: Sequence[float]) -> float:
    """Root mean square; 0 for no values."""
    return sqrt(sum(value * value for value in values) / len(values)) if values else 0.0


def observation_of(run_dir: Path, gpu: str) -> Observation:
    """Read a finished run: medians over all steps but the first, with all responses at the mean length.

    Args:
        run_dir: holds config.json, environment.json, metrics.jsonl.
        gpu: name of the device; ignored for a run on a CPU.

    Raises:
        UserError: files are missing, or the run has fewer than two steps.
    """
    fix = "give the run_dir of a finished run"
    try:
        config = parse_config(json.loads((run_dir / "config.json").read_text(encoding="utf-8")), str(run_dir))
        environment = json.loads((run_dir / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"not a run directory: {error}", where=str(run_dir), fix=fix) from error
    since = int(environment.get("since", 0))  # earlier attempts may have had other ranks and another layout
    steps = [record for record in read_metrics(run_dir) if (record["step"] or 0) > since][WARM_UP:]
    if not steps:
        what = "the run has fewer than two steps" + (f" since its resume after step {since}" if since else "")
        raise UserError(what, where=str(run_dir), fix=fix)
    on_cpu = str(environment["device"]).startswith("CPU")
    machine = cpu_machine(cores_named(environment["device"])) if on_cpu else PlannerMachine(device_named(gpu))
    setting = Setting(
        model_config(config.model.path),
        config,
        int(environment["world_size"]),
        machine,
        mean_response_tokens=round(median(steps, "response_length/mean")),
        transformer_engine=not on_cpu
        and environment["versions"].get("transformer-engine") is not None
        and suits_transformer_engine(config.model),
    )
    rollout = config.rollout  # overlapped, its time is a wait; servers are of an unknown number
    sampled = rollout.replay is None and rollout.overlap == "none" and not rollout.servers
    return Observation(run_dir.name, setting, measured_phases(steps, sampled=sampled))


def measured_phases(steps: Sequence[Mapping[str, Any]], *, sampled: bool) -> dict[str, float]:
    """Median seconds of each phase, norms and gradient together; rollout and push only if engines `sampled` alone."""
    gradient = [(step.get("timing_s/gradnorm") or 0.0) + (step.get("timing_s/gradient") or 0.0) for step in steps]
    medians = {"gradient": statistics.median(gradient), "optimizer": median(steps, "timing_s/optimizer")}
    if sampled:
        medians |= {phase: median(steps, f"timing_s/{phase}") for phase in ("rollout", "push")}
    return {phase: seconds for phase, seconds in medians.items() if seconds > 0}


def median(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    """Median of a metric over steps; 0 if no step has it."""
    values = [float(step[name]) for step in steps if step.get(name) is not None]
    return statistics.median(values) if values else 0.0


def cores_named(device: str) -> int | None:
    """Number of cores in a description like "CPU (x86_64, 2 cores)"; None if it has none."""
    words = device.replace(")", "").split()
    return int(words[-2]) if len(words) > 1 and words[-1].startswith("core") and words[-2].isdigit() else None


def calibrate(runs: Sequence[Path], gpu: str, out: Path) -> str:
    """`plan --calibrate`: fit, write the file for `--calibration`, and return the report.

    Sampling is fitted to runs with engines of their own that sample while the trainer waits.

    Raises:
        UserError: a directory holds no run, or CPU and GPU runs are mixed.
    """
    observations = [observation_of(run, gpu) for run in runs]
    machines = {observation.setting.machine.on_gpu for observation in observations}
    if len(machines) > 1:
        raise UserError("runs on CPUs and on GPUs", where="plan --calibrate", fix="calibrate them separately")
    names = (TRAINING if machines.pop() else CPU_TRAINING) + SAMPLING
    unsampled = [observation.name for observation in observations if "rollout" not in observation.seconds]
    if len(unsampled) == len(observations):
        names = names[: -len(SAMPLING)]
    fitted = fit(observations, observations[0].setting.machine.constants, names)
    write_constants(fitted, out, [str(run) for run in runs])
    why = "without rollout and push, because of rollout.replay, rollout.overlap or rollout.servers"
    return "\n".join([*(f"{name}: {why}" for name in unsampled), fitted.table(), f"wrote {out}"])


def write_constants(fitted: Fitted, out: Path, runs: Sequence[str]) -> None:
    """Write {"constants": ..., "fitted": names, "rms": ..., "runs": ..., "rows": ...}."""
    record = {
        "constants": asdict(fitted.constants),
        "fitted": fitted.names,
        "rms": fitted.rms,
        "runs": list(runs),
        "rows": [dict(zip(("run", "phase", "measured", "predicted"), row, strict=True)) for row in fitted.rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(record, indent=2) + "\n")
