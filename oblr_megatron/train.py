"""The step loop of OBLR-PO: `torchrun --nproc-per-node N -m oblr_megatron.train CONFIG.toml [section.key=value ...]`.

One step, with Q prompts of G responses each (arXiv 2511.23310):

    A_i = r_i - b_i,  b_i = the other responses' rewards, weighted by their squared gradient norms w_j    (Theorem 7)
    g   = 1/(Q G) sum_i A_i grad_theta log pi(o_i)
    eta = eta_0 * signal / (signal + noise / Q), from averages over earlier steps                         (Theorem 4)
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from oblr_megatron.algo.baseline import active_groups
from oblr_megatron.config import load_config
from oblr_megatron.errors import EXIT_OK, RunError
from oblr_megatron.metrics import METRICS_FILE
from oblr_megatron.model.parallel import rank_from_environment
from oblr_megatron.observe.report import write_report
from oblr_megatron.observe.status import recorded
from oblr_megatron.run import Run, open_run
from oblr_megatron.runtime.stopping import die_with_launcher
from oblr_megatron.sampling import Sampling, open_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oblr_megatron.config import Config


def train(run: Run) -> None:
    """All steps of a run: each line is one arrow of the picture in docs/architecture.md."""
    config = run.config
    run.begin()
    for step in range(run.start, config.num_steps):
        prompts = run.stream.take(config.num_prompts)  # Q
        samples = run.rollout(prompts, step)  # N = Q * G responses with log-probs
        scored = run.score_batch(prompts, samples)  # rewards [Q, G]
        prompts, samples, scored = run.refill(prompts, samples, scored, step)  # only with rollout.dynamic_sampling
        run.save(prompts, samples, scored, step)  # only with rollout.save
        run.release()  # engines on the trainer's own GPUs give their memory back until the push
        active = active_groups(config.algo.baseline, scored.rewards)  # [Q]: the others have A = 0
        stats = run.gradient(samples, scored, active, step)  # w, exact; A = r - b(w); g in main_grad
        run.update(stats, step)  # clip, optimizer step at the lagged SNR rate
        run.push(version=step + 1)
        run.evaluate(step + 1)
        run.log(step + 1, samples, scored, stats)
        if run.checkpoint(step + 1):  # saves when due; true when the run is to stop here
            return
    run.export()


def sample(run: Sampling) -> None:
    """`rollout.only`: the steps of a run up to the point where the model would learn from them."""
    for step in range(run.config.num_steps):
        prompts = run.stream.take(run.config.num_prompts)
        samples = run.rollout(prompts, step)
        scored = run.score_batch(prompts, samples)
        prompts, samples, scored = run.refill(prompts, samples, scored, step)
        run.save(prompts, samples, scored, step)
        run.log(step + 1, samples, scored)
        if run.stopped(step + 1):
            return


def run_training(config: Config) -> int:
    """Open a run, train (or sample alone), close it; the exit status."""
    try:
        if config.rollout.only:
            with open_sampling(config) as sampling, recorded(sampling):
                sample(sampling)
        else:
            with open_run(config) as run, recorded(run):
                train(run)
    except RunError:
        _report(config)  # of what there is until then
        raise
    _report(config)
    return EXIT_OK


def _report(config: Config) -> None:
    """RUN_DIR/report.html of what was logged, by rank 0; metrics.jsonl is closed, and empty if no step was done."""
    metrics = config.run_dir / METRICS_FILE
    if rank_from_environment()[0] == 0 and metrics.exists() and metrics.stat().st_size:
        write_report(config.run_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m oblr_megatron.train CONFIG.toml [section.key=value ...]`, one call a rank."""
    from oblr_megatron.runtime.command_line import add_run_arguments, guarded, parse, run_overrides

    parser = argparse.ArgumentParser(prog="oblr_megatron.train", description="one rank of a run")
    add_run_arguments(parser)
    options = parse(parser, arguments)
    die_with_launcher()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # in a trainer rank it only names what it will not use
    return guarded(lambda: run_training(load_config(options.config, run_overrides(options))))


if __name__ == "__main__":
    sys.exit(main())
