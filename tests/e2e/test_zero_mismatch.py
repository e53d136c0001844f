"""Whole runs under model.batch_invariant: the log-probs of trainer and engine are equal to the bit, in every step.

Real megatron-core and real vLLM on a CPU, all dense families. Not covered: GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oblr_megatron.data.packing import one_per_microbatch
from oblr_megatron.model.token_values import response_logprobs
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy
from tests.e2e.conftest import records
from tests.e2e.forked import forked
from tests.e2e.forked_processes import fork_keeper
from tests.e2e.test_push_parity import MODELS
from tests.e2e.tiny_rollout import make_config, sample
from tests.tiny import make_hf_dir

STEPS = 2  # the second has weights of a push
PACKED = {"parallel__packing": "packed", "parallel__micro_batch_tokens": 64}
LAYOUTS = {
    "one rank, packed, float32, filtered": (
        1,
        PACKED | {"rollout__top_p": 0.9, "rollout__top_k": 12, "rollout__min_p": 0.05},
    ),
    "two stages, rows, bfloat16": (
        2,
        {"parallel__pipeline_model_parallel_size": 2, "model__dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_has_no_mismatch(tmp_path: Path, overrides: Callable[..., list[str]], name: str) -> None:
    """Weights change and are pushed after every step. Exact norms weigh the baseline as ever."""
    ranks, layout = LAYOUTS[name]
    keys = {"num_steps": STEPS, "model__batch_invariant": "true", "algo__baseline": "optimal", "seed": 5}
    result = forked(ranks, overrides(tmp_path / "run", **keys, **layout))
    assert result.returncode == 0, result.stderr[-3000:]
    steps = records(tmp_path / "run")
    assert [step["rollout/logprob_abs_diff"] for step in steps] == [0.0] * STEPS
    assert all(step["grad_norm"] > 0 and step["gradnorm/sq_mean"] > 0 for step in steps)
    assert [step["weights/version"] for step in steps] == list(range(1, STEPS + 1))


def test_a_difference_ends_the_run(tmp_path: Path, overrides: Callable[..., list[str]], saved: Path) -> None:
    """Samples of an engine without the mode differ in the last bits, and the first step says so."""
    keys = overrides(tmp_path / "run", num_steps=3, model__batch_invariant="true")
    result = forked(1, [*keys, "--replay", str(saved / "rollouts")])
    assert result.returncode == 1
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "step 1" in error and "model.batch_invariant" in error
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("model", ["tied", "qwen2", "llama"])
def test_families_have_the_engines_bits(model: str, tmp_path: Path) -> None:
    """24 responses in one batch of the engine against the trainer's single rows, before and after a push."""
    path = make_hf_dir(tmp_path / "model", **MODELS[model])
    ((before, after),) = run_ranks(logprobs_of_both, 1, path, tmp_path / "run", first=fork_keeper)
    for ours, theirs in (before, after):
        assert torch.equal(ours, theirs)
    assert before[0].shape != after[0].shape or not torch.equal(before[0], after[0]), "the push changed the policy"


def logprobs_of_both(path: Path, run_dir: Path) -> list[tuple[Tensor, Tensor]]:
    """(the trainer's, the engine's) log-probs [N, T] of samples, for the loaded weights and for larger ones."""
    config = make_config(path, run_dir)
    config = config.model_copy(update={"model": config.model.model_copy(update={"batch_invariant": True})})
    found = []
    with layout() as parallel:
        engines = ColocatedEngines(config, parallel)
        policy = load_policy(path, parallel, dtype="float32", batch_invariant=True)
        for version in (1, 2):
            engines.push(MegatronWeights(policy), version)
            samples = sample(engines, count=6, temperature=0.7)
            batches = one_per_microbatch(samples, range(len(samples)))
            ours = response_logprobs(policy, samples, batches, 0.7)
            rows = [torch.tensor(one.logprobs, dtype=torch.float64) for one in samples]
            found.append((ours, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)))
            with torch.no_grad():
                for _, parameter in policy.named_parameters():
                    parameter.mul_(1.2)
        engines.close()
    return found
