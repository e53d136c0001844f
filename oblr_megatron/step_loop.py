"""The step loop of OBLR-PO: `torchrun --nproc-per-node N -m oblr_megatron.step_loop CONFIG.toml [key=value ...]`.

One step of the paper's recipe, preset `oblr_po`, with Q prompts of G responses each (arXiv 2511.23310):

    A_i = r_i - b_i,  b_i = mean of other responses' rewards, weighted by squared gradient norms w_j      (Theorem 7)
    g   = 1/(Q G L) sum_i A_i grad_theta log pi(o_i),  L = algo.token_scale
    eta = eta_0 * signal / (signal + noise / Q), estimated in the step before                             (Theorem 4)
"""

from __future__ import annotations

import argparse
import logging
from collections import deque
from typing import TYPE_CHECKING

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.config import load_config
from oblr_megatron.errors import EXIT_OK
from oblr_megatron.model.parallel import end_process, rank_from_environment
from oblr_megatron.observe.console import closing_lines
from oblr_megatron.observe.report import REPORT_FILE
from oblr_megatron.observe.status import finished
from oblr_megatron.opening import open_sampling, started
from oblr_megatron.run import Run, open_run, rescued
from oblr_megatron.runtime.command_line import add_run_arguments, guarded, parse, run_overrides
from oblr_megatron.runtime.processes import die_with_launcher, directory_last
from oblr_megatron.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oblr_megatron.config import Config


def train(run: Run) -> None:
    """All steps of a run. Each line is one arrow of the picture in docs/architecture.md."""
    config, sampling = run.config, run.sampling
    if run.begin():
        return
    for step in range(sampling.start, config.num_steps):
        record = sampling.begin_step(step)
        gradient = run.gradient(record)  # main_grad = 0
        for batch in sampling.batches(record):  # Q prompts, G responses each: once, or as engines finish them
            advantage = AdvantageRule(batch.scored, config, run.history(batch.prompts))  # w -> A = r - b(w)   Theorem 7
            gradient.add(batch, advantage)  # w; g += sum_i A_i grad log pi(o_i)
        for stats in gradient.updates(rewarded=not record.unrewarded):  # one, or algo.updates_per_batch
            run.update(stats, run.rate(), record)  # from earlier steps only                                   Theorem 4
        run.observe(gradient, record)  # signal, noise and mean w, for later steps
        run.push(version=step + 1, record=record)
        sampling.evaluate(record)
        sampling.log(record)
        if run.checkpoint(record):  # saves when due; true when the run stops here
            return
    run.export()


def sample(sampling: Sampling) -> None:
    """`rollout.only`: sample, score and save every step, train nothing."""
    if sampling.stopped(sampling.start):
        return
    for step in range(sampling.start, sampling.config.num_steps):
        record = sampling.begin_step(step)
        deque(sampling.batches(record), maxlen=0)
        sampling.log(record)
        if sampling.stopped(record.done):
            return


def run_training(config: Config) -> int:
    """Open a run, train it (or only sample), close it; returns the exit status. A finished run is not opened again."""
    if finished(config, rank=rank_from_environment()[0]):
        return EXIT_OK
    if config.rollout.only:
        with open_sampling(config) as sampling, started(sampling):
            sample(sampling)
    else:
        with open_run(config) as run, started(run.sampling), rescued(run):
            train(run)
    if rank_from_environment()[0] == 0:
        report = config.run_dir / REPORT_FILE
        for line in closing_lines(config, report if report.exists() else None):
            print(line, flush=True)
    return EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m oblr_megatron.step_loop CONFIG.toml [section.key=value ...]`, one call a rank."""
    parser = argparse.ArgumentParser(prog="oblr_megatron.step_loop", description="one rank of a run")
    add_run_arguments(parser)
    die_with_launcher()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # in a trainer rank its lines are only about unused features

    def run() -> int:
        options = parse(parser, arguments)
        return run_training(load_config(options.config, run_overrides(options)))

    return guarded(run)


if __name__ == "__main__":
    directory_last()  # a plain torchrun puts it first
    end_process(main)
