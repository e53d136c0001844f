"""The step loop of OBLR-PO: `torchrun --nproc-per-node N -m oblr_megatron.train CONFIG.toml [section.key=value ...]`.

One step, with Q prompts of G responses each (arXiv 2511.23310):

    A_i = r_i - b_i,  b_i = the other responses' rewards, weighted by their squared gradient norms w_j    (Theorem 7)
    g   = 1/(Q G) sum_i A_i grad_theta log pi(o_i)
    eta = eta_0 * signal / (signal + noise / Q), from averages over earlier steps                         (Theorem 4)
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from oblr_megatron.algo.baseline import active_groups
from oblr_megatron.config import load_config
from oblr_megatron.errors import EXIT_OK
from oblr_megatron.report import write_report
from oblr_megatron.run import Run, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oblr_megatron.config import Config


def train(run: Run) -> None:
    """All steps of a run: each line is one arrow of the picture in docs/architecture.md."""
    config = run.config
    run.push(version=0)
    run.evaluate(step=0)
    run.begin()
    for step in range(config.num_steps):
        prompts = run.stream.take(config.num_prompts)  # Q
        samples = run.rollout(prompts, step)  # N = Q * G responses with log-probs
        judged = run.judge(prompts, samples)  # rewards [Q, G]
        active = active_groups(config.algo.baseline, judged.rewards)  # [Q]: the others have A = 0
        stats = run.gradient(samples, judged, active, step)  # w, exact; A = r - b(w); g in main_grad
        run.update(stats, step)  # clip, optimizer step at the lagged SNR rate
        run.push(version=step + 1)
        run.evaluate(step + 1)
        run.log(step + 1, samples, judged, stats)
    run.export()


def run_training(config: Config) -> int:
    """Open a run, train, close it; the exit status."""
    with open_run(config) as run:
        train(run)
        writes_report = run.parallel.rank == 0
    if writes_report:  # metrics.jsonl is closed now
        write_report(config.run_dir)
    return EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m oblr_megatron.train CONFIG.toml [section.key=value ...]`, one call a rank."""
    from oblr_megatron.cli import guarded

    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # in a trainer rank it only names what it will not use
    return guarded(lambda: run_training(load_config(arguments[0], arguments[1:])))


if __name__ == "__main__":
    sys.exit(main())
