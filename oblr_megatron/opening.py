"""Opens the sampling half of a run: checks, lock of the run directory, process group, engines, logs.

Cheap failures come first. A mistake that one rank finds is raised on all ranks, before an engine is started. An opened
run changes no file of its directory until `started`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from oblr_megatron.checkpoint.resume import Checkpoint, changes, choose
from oblr_megatron.checks.layout import check_port
from oblr_megatron.checks.run_dir import EVALUATIONS, ROLLOUTS, check_run_dir, check_shared
from oblr_megatron.config.checks import biases
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.evaluation.items import RunItems
from oblr_megatron.formatting import flatten
from oblr_megatron.memory.pass_plan import Layout, idle_replicas
from oblr_megatron.memory.select_mode import ModeChoice, with_mode
from oblr_megatron.metrics import METRICS_FILE, MetricsWriter, Record, logged_until
from oblr_megatron.model import parallel as process_groups
from oblr_megatron.model.precision import slow_bfloat16
from oblr_megatron.observe.alarm_window import planned
from oblr_megatron.observe.alarms import LiveAlarms
from oblr_megatron.observe.console import open_display, waiting
from oblr_megatron.observe.performance.hardware import this_device
from oblr_megatron.observe.performance.profiler import open_profiler
from oblr_megatron.observe.performance.ranks import RankLog
from oblr_megatron.observe.performance.utilization import Utilization, peak_flops
from oblr_megatron.observe.prompt_log import PromptLog
from oblr_megatron.observe.report import write_report
from oblr_megatron.observe.status import recorded
from oblr_megatron.observe.trackers.feed import Trackers
from oblr_megatron.preflight.inputs import Inputs, check_same, preflight, write_config
from oblr_megatron.rewards.registry import build_reward
from oblr_megatron.rewards.shared import FailedSteps, SharedReward
from oblr_megatron.rollout import open_engines
from oblr_megatron.rollout.replay import ReplayEngine
from oblr_megatron.runtime.collectives import Collectives, attempt, raise_first
from oblr_megatron.runtime.run_lock import run_lock
from oblr_megatron.runtime.stopping import StopRequest
from oblr_megatron.sampling import Sampling
from oblr_megatron.timing import PhaseTimer

SEEN_S = 90.0  # for a file of rank 0 to appear on every node

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.data.prompts import PromptStream


@contextmanager
def open_sampling(config: Config) -> Iterator[Sampling]:
    """Check, start and finally close everything that sampling needs; cheap failures come first.

    Raises:
        UserError: bad input, found before the process group or any engine is started.
    """
    rank, world_size = process_groups.checked_rendezvous()
    process_groups.select_device()
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(config.checkpoint))
        own = attempt(lambda: _inputs(config, rank, world_size, stack))
        if world_size == 1:
            raise_first([own], own)
        with waiting(_absent(rank, world_size), partial(print, flush=True)):
            process_groups.join(config.parallel)
        stack.push(process_groups.leave)
        collectives = Collectives(rank)
        collectives.settle(own, what="their checks", seconds=config.parallel.distributed_timeout_s)
        inputs: Inputs = own.value
        norms = _compared(config, inputs, collectives)
        parallel = process_groups.initialize(config.parallel, seed=config.seed)
        resumed = choose(inputs.checkpoints, parallel.rank, world_size)
        warned = [] if config.rollout.only else [f"warning: {line}" for line in biases(config)]  # of the mode as given
        if norms is not None:
            config = with_mode(config, norms.mode)
        first = parallel.tp_rank == parallel.pp_rank == parallel.cp_rank == 0  # the first rank of a replica
        share = parallel.dp_rank if first else None
        scoring = build_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
        reward = stack.enter_context(
            SharedReward(scoring, share, parallel.dp_size, timeout_s=config.parallel.distributed_timeout_s)
        )
        display = open_display(config.num_steps, rank=parallel.rank)
        engines = open_engines(config, parallel, display.waiting, lambda: stop.terminated)
        stack.callback(engines.close)
        stack.enter_context(display)
        for line in (
            *_opening_lines(config, inputs.model.config, world_size, norms, resumed),
            *warned,
            *(inputs.warnings(config) if parallel.rank == 0 else ()),
        ):
            display.message(line)
        until = None if config.checkpoint.resume == "none" else -1  # the step up to which metrics.jsonl is kept
        if resumed is not None:  # a run that never saved starts over
            until = resumed.step
        metrics = stack.enter_context(
            MetricsWriter(config.run_dir, rank=parallel.rank, world_size=world_size, resume_step=until)
        )
        trackers = stack.enter_context(Trackers(config, display.message, rank=parallel.rank, resume_step=until))
        stream: PromptStream | ReplayEngine | None = engines if isinstance(engines, ReplayEngine) else inputs.stream
        assert stream is not None, "only a replay has no data stream"
        settings = past_settings = planned(flatten(config.model_dump(mode="json")).get)
        past: list[Record] = []
        if resumed is not None:
            past_settings = planned(flatten(resumed.state["config"]).get)
            stream.load_state_dict(resumed.state["data"])
            past = logged_until(config.run_dir, resumed.step) if parallel.rank == 0 else []
            for record in past:
                display.recall(record)
            display.first_step = display.last_step = resumed.step
        profiler = stack.enter_context(open_profiler(config, parallel.rank, display.message))
        control_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=parallel.timeout_s))
        alarms = None if rank else LiveAlarms(
            config.run_dir, settings, display.message, past, past_settings,
            changed=resumed is not None and bool(changes(resumed, config)),
        )  # fmt: skip
        own_clock = None if torch.cuda.is_available() else time.thread_time  # it excludes waits for other ranks
        yield Sampling(
            config=config,
            parallel=parallel,
            model=inputs.model,
            engines=engines,
            reward=reward,
            stream=stream,
            held_out=inputs.held_out,
            evaluations=RunItems(config.run_dir / EVALUATIONS if rank == 0 else None),
            metrics=metrics,
            trackers=trackers,
            display=display,
            alarms=alarms,
            prompt_log=PromptLog(config.run_dir, until) if rank == 0 else None,
            timer=PhaseTimer(
                display.phase, _synchronize, own_clock=own_clock, context=None if profiler is None else profiler.phase
            ),
            profiler=profiler,
            utilization=Utilization(inputs.model.config, config, world_size, peak_flops(config, this_device())),
            ranks=RankLog(config.run_dir, control_group, until),
            failed_steps=FailedSteps(config.reward),
            stop=stop,
            collectives=collectives,
            control_group=control_group,
            resumed=resumed,
            evaluation_s=next((s for record in reversed(past) if (s := record.get("timing_s/evaluate"))), 0.0),
        )


def _compared(config: Config, inputs: Inputs, collectives: Collectives) -> ModeChoice | None:
    """Check that all ranks have the same inputs and run directory; the norms' mode, which rank 0 chooses.

    Ranks may see different amounts of free memory.
    """
    seconds = config.parallel.distributed_timeout_s
    shared = collectives.objects((inputs.facts(config), inputs.norms), what="inputs", seconds=seconds)
    check_same([facts for facts, _ in shared])
    collectives.together(partial(check_shared, config.run_dir, SEEN_S), what="the run directory", seconds=seconds)
    norms: ModeChoice | None = shared[0][1]
    return norms


def _absent(rank: int, world_size: int) -> str:
    """For whom a rank waits at the rendezvous, and where its number comes from."""
    store = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    others = "rank 0" if rank else f"ranks 1 to {world_size - 1}"
    return f"rank {rank} waits for {others} at {store} (RANK and WORLD_SIZE {world_size} of the environment)"


@contextmanager
def started(sampling: Sampling) -> Iterator[None]:
    """Write the config and status of an open run, and its report at the end. A refused opening changes no file."""
    if sampling.parallel.rank == 0:
        write_config(sampling.config)
        if sampling.alarms is not None:
            sampling.alarms.start()
        if sampling.config.checkpoint.resume != "none" and not sampling.config.rollout.only:
            remove_later_steps(sampling.config.run_dir, sampling.start)
    sampling.trackers.start()
    try:
        with recorded(sampling):
            try:
                yield
            finally:
                sampling.stop.closing = True
    except (RunError, KeyboardInterrupt):
        _report(sampling)  # about the steps so far
        raise
    _report(sampling)


def remove_later_steps(run_dir: Path, last: int) -> None:
    """Remove the samples and evaluations of steps that a resumed run does again, or never reaches.

    Otherwise a replay could mix them with the run's own, which other weights drew.
    """
    for path in [*(run_dir / ROLLOUTS).glob("step_*.parquet"), *(run_dir / EVALUATIONS).glob("step_*")]:
        step = path.stem.removeprefix("step_")
        if not step.isdecimal() or int(step) <= last:
            continue
        if path.is_file():
            path.unlink()
        elif path.parent.name == EVALUATIONS:
            shutil.rmtree(path)


def _report(sampling: Sampling) -> None:
    """Rank 0 writes RUN_DIR/report.html, unless no step was logged."""
    run_dir = sampling.config.run_dir
    metrics = run_dir / METRICS_FILE
    if sampling.parallel.rank == 0 and metrics.exists() and metrics.stat().st_size:
        command, failed = f"oblr-megatron report {run_dir}", "warning: cannot write the report: "
        try:
            sampling.trackers.file(write_report(run_dir))
        except OSError as error:
            sampling.display.message(f"{failed}{error}. Fix: free space, then call {command}")
        except UserError as error:
            sampling.display.message(f"{failed}{error}")
        except Exception as error:  # noqa: BLE001  a bug in the report must neither end a run nor hide why it ended
            sampling.display.message(f"{failed}{error!r}. Fix: call {command}, and report the traceback as a bug")


def _inputs(config: Config, rank: int, world_size: int, stack: ExitStack) -> Inputs:
    """This rank's part of the checks; rank 0 also takes the lock of the run directory."""
    if rank != 0:
        return preflight(config, world_size, owns_run_dir=False)
    if world_size > 1 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        check_port(int(os.environ["MASTER_PORT"]))  # under torchrun the agent holds it already
    check_run_dir(config.run_dir, holds_run=config.checkpoint.resume != "none")
    stack.enter_context(run_lock(config.run_dir))
    return preflight(config, world_size)


def _opening_lines(
    config: Config, hf_config: Mapping[str, Any], world_size: int, norms: ModeChoice | None, resumed: Checkpoint | None
) -> Iterator[str]:
    """Messages at the start of a run: what it continues from, its recipe, how norms are computed, its memory."""
    if resumed is not None:
        yield f"continues after step {resumed.step}, from {resumed.path}"
        yield from (f"changed: {change}" for change in changes(resumed, config))
    elif config.checkpoint.resume != "none":
        yield f"no checkpoint in {config.run_dir}: the run starts at step 0"
    algo = config.algo
    if algo.preset is not None:
        yield f"recipe {algo.preset}: {algo.baseline} baseline, {algo.aggregation} loss, {algo.schedule} rate"
    if norms is not None:
        yield f"norms by {norms.mode}: {norms.reason}"
        yield f"memory: {norms.estimate.table()}"
    if slow := slow_bfloat16(config.model):
        yield f"warning: {slow}"
    idle = None if config.rollout.only else idle_replicas(config, Layout.of(hf_config, config, world_size))
    if idle is not None:
        yield idle
    if config.rollout.only:
        yield f"rollout.only: samples {config.num_steps} batches from {config.model.path}, trains and evaluates nothing"
    if config.rollout.replay is not None:
        yield f"replay: samples come from {config.rollout.replay}; nothing is sampled or evaluated"


def _synchronize() -> None:
    """Wait for the GPU at the end of a phase, so that its kernels are not counted in the next phase."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
