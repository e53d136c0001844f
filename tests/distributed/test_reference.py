"""The reference model keeps the weights it was made of, bit for bit in bf16, and leaves the policy unchanged.

Also its table of token values: replicas without samples, responses without tokens. Not covered: the use of the table
(test_penalty_gradient.py), resumed runs (test_resume.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.data.packing import microbatches
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.reference import Reference
from oblr_megatron.padding import padding_of
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_gradnorm_modes import make_samples
from tests.tiny import make_hf_dir

LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}


def on_ranks(start: str, now: str) -> dict[str, list[torch.Tensor]]:
    """For each layout, log pi of `start` by the reference of a changed policy, and of a fresh policy."""
    found: dict[str, list[torch.Tensor]] = {}
    samples = make_samples()
    for name, sizes in LAYOUTS.items():
        with layout(**sizes) as parallel:
            config = ModelConfig.model_validate({"path": start, "dtype": "bfloat16", "make_vocab_size_divisible_by": 8})
            options = ParallelConfig(context_parallel_size=parallel.cp_size, packing="packed")
            mine = list(range(len(samples))) if parallel.dp_rank == 0 else []  # of two replicas one has none
            padding = padding_of(ModelConfig(path="."), options)
            batches = microbatches(samples, mine, options, padding)
            found[name] = []
            for moved in (True, False):
                policy = build_policy(AutoConfig.from_pretrained(start), config, parallel)
                load_hf_weights(policy, Path(start))
                reference = Reference(policy)
                if moved:
                    load_hf_weights(policy, Path(now))
                before = [parameter.detach().clone() for _, parameter in policy.named_parameters()]
                found[name].append(reference.logprobs(samples, batches, temperature=0.8))
                with pytest.raises(RuntimeError, match="in between"), reference.in_place():
                    changed = [
                        not torch.equal(a, b) for a, (_, b) in zip(before, policy.named_parameters(), strict=True)
                    ]
                    assert all(changed) == moved
                    raise RuntimeError("in between")
                assert all(torch.equal(a, b) for a, (_, b) in zip(before, policy.named_parameters(), strict=True))
            silent = [replace(sample, response_ids=(), logprobs=(), mask=()) for sample in samples]
            nothing = reference.logprobs(silent, microbatches(silent, mine, options, padding), temperature=0.8)
            assert nothing.shape == (len(samples), 1) and not nothing.any()
    return found


def test_the_reference_keeps_the_weights_it_was_made_of(tmp_path: Path) -> None:
    start, now = (str(make_hf_dir(tmp_path / name, seed=seed, tied=True)) for name, seed in (("start", 1), ("now", 2)))
    lengths = torch.tensor([sample.length for sample in make_samples()])
    filled = torch.arange(int(lengths.max())) < lengths[:, None]
    for found in run_ranks(on_ranks, 2, start, now):
        for name, (of_moved, fresh) in found.items():
            assert torch.equal(of_moved, fresh), name
            assert (fresh[filled] < 0).all() and (fresh[~filled] == 0).all(), name
