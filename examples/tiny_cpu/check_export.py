"""Compare the accuracy of a run's export in transformers with the run's last evaluation in vLLM.

    python examples/tiny_cpu/check_export.py run/tiny_cpu/demo

Loads RUN/hf and answers the held-out set greedily and sampled. If the greedy accuracies differ by more than
--tolerance, the export is not the trained model, and the status is 1. The sampled accuracies differ by chance.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from accuracy import accuracy, read_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from oblr_megatron.config import parse_config

GREEDY, SAMPLED = "eval/heldout/accuracy", "eval/heldout/mean_at_k"


def main() -> int:
    """The exit status: 0 if the greedy accuracies agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="directory of a finished run")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest allowed difference of greedy accuracies")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()

    config = parse_config(json.loads((options.run_dir / "config.json").read_text(encoding="utf-8")))
    recorded = last_evaluation(options.run_dir)
    rows = read_rows(Path(config.evaluate.data["heldout"].path))[: config.evaluate.num_prompts]
    model = AutoModelForCausalLM.from_pretrained(options.run_dir / "hf", dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(options.run_dir / "hf")
    limit = {"max_new_tokens": config.rollout.max_response_tokens}
    greedy = accuracy(model, tokenizer, rows, **limit)
    sampled = accuracy(model, tokenizer, rows, samples=config.evaluate.samples_per_prompt, **limit)

    print(f"{options.run_dir / 'hf'} on {len(rows)} held-out sums: export in transformers, the run's last evaluation")
    print(f"  greedy   {greedy:7.1%}  {recorded[GREEDY]:7.1%}")
    print(f"  sampled  {sampled:7.1%}  {recorded[SAMPLED]:7.1%}")
    if abs(greedy - recorded[GREEDY]) > options.tolerance:
        print(f"error: greedy accuracies differ by more than {options.tolerance:.0%}", file=sys.stderr)
        return 1
    return 0


def last_evaluation(run_dir: Path) -> dict[str, Any]:
    """The last record of metrics.jsonl that holds an evaluation."""
    records = read_rows(run_dir / "metrics.jsonl")
    evaluated = [record for record in records if GREEDY in record]
    if not evaluated:
        raise SystemExit(f"error: no evaluation of the set 'heldout' [{run_dir / 'metrics.jsonl'}]")
    return evaluated[-1]


if __name__ == "__main__":
    sys.exit(main())
