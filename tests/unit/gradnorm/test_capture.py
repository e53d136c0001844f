"""What one rank takes down of a gradient that stands in megatron-core's buffers, and that nothing is left there.

The gradient is random and no backward is run; tests/distributed does that. Not covered: CUDA.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.gradnorm.capture import MaterializeEngine, bytes_put_aside, touched_rows
from oblr_megatron.gradnorm.rules import Kind, classify
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.qwen3 import build_policy
from tests.tiny import tiny_config

TOKENS = [torch.tensor([9, 3, 9, 15]), torch.tensor([36, 0])]


@pytest.fixture
def policy():
    parallel = initialize(ParallelConfig())
    yield build_policy(tiny_config(), ModelConfig(path=".", make_vocab_size_divisible_by=8), parallel)
    shutdown()


def rules_of(policy):
    """As on a rank of TP 2: shards, copies and partials all occur; the embedding plays the end of a pipeline."""
    rules = classify([policy.module], tp_size=2, sequence_parallel=False)
    return [replace(rule, tied="word_embeddings" in rule.name) for rule in rules]


def engine_of(policy, rules, tp_rank):
    return MaterializeEngine(policy.chunks[0].buffers, rules, TOKENS, tp_rank, torch.device("cpu"))


def fill(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.named_parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_each_parameter_goes_where_its_rule_says(policy, tp_rank):
    rules = rules_of(policy)
    engine = engine_of(policy, rules, tp_rank)
    counted = (Kind.SHARD, Kind.COPY) if tp_rank == 0 else (Kind.SHARD,)
    expected, partials, rows = [], [], []
    for sample in (1, 0):  # samples may end in any order
        fill(policy, sample)
        expected.append(sum(r.grad.double().square().sum() for r in rules if r.kind in counted))
        partials.append(sum(r.grad.double().square().sum() for r in rules if r.kind is Kind.PARTIAL))
        grad = next(r.grad for r in rules if r.tied)
        rows.append(grad[touched_rows(TOKENS[sample], len(grad), tp_rank)].clone())
        engine(sample)
        assert not policy.chunks[0].buffers[0].grad_data.any()
    captured = engine.captured()
    torch.testing.assert_close(captured.sq_norms, torch.stack(expected[::-1]), rtol=1e-13, atol=0)
    put_aside = captured.partials[0].double().square().sum(1)
    torch.testing.assert_close(put_aside, torch.stack(partials[::-1]), rtol=1e-13, atol=0)
    assert torch.equal(captured.tied_rows.rows, torch.cat(rows[::-1]))
    assert captured.tied_rows.sample.tolist() == [0] * len(rows[1]) + [1] * len(rows[0])


def test_bytes_put_aside_are_what_is_held(policy):
    rules = rules_of(policy)
    captured = engine_of(policy, rules, 0).captured()
    held = captured.partials[0].nbytes + captured.tied_rows.rows.nbytes
    assert sum(bytes_put_aside(rules, ids, 0) for ids in TOKENS) == held


def test_touched_rows():
    ids = torch.tensor([9, 3, 9, 15])
    assert touched_rows(ids, 8, 0).tolist() == [3]
    assert touched_rows(ids, 8, 1).tolist() == [1, 7]
    assert touched_rows(ids, 8, 2).tolist() == []
    assert touched_rows(ids[:0], 8, 0).tolist() == []


def test_importing_the_package_loads_neither_megatron_nor_vllm():
    code = "import sys, oblr_megatron.gradnorm.reference; sys.exit(any(m in sys.modules for m in ('megatron', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
