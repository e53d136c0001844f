"""Two trainer ranks (tensor parallel 2) with an engine each: they split a batch, push together, and fail together.

The weights are megatron-core's own, gathered over both ranks for each tensor: a rank that left a push early would block
the other one. Not covered: engines of several GPUs.
"""

import os
import signal

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig
from oblr_megatron.errors import RunError
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import layout, run_ranks
from tests.e2e.forked_processes import fork_keeper
from tests.e2e.tiny_rollout import largest_error, make_config, make_prompts, sample
from tests.tiny import make_hf_dir

PROMPTS, GROUP = 7, 3


@pytest.mark.nightly
def test_two_ranks_with_an_engine_each(tmp_path):
    path = make_hf_dir(tmp_path / "model", head_dim=32)
    first, second = run_ranks(one_rank, 2, path, tmp_path / "run", first=fork_keeper)
    for key in ("samples", "after", "stats", "error", "after_error"):
        assert first[key] == second[key], f"{key} differs between the ranks"
    samples = first["samples"]
    assert [one.group for one in samples] == [n // GROUP for n in range(PROMPTS * GROUP)]
    assert [one.prompt_ids for one in samples[::GROUP]] == [prompt.token_ids for prompt in make_prompts(PROMPTS)]
    assert [one.response_ids for one in samples] == first["one_engine"], "the split does not change the draws"
    model = Qwen3ForCausalLM.from_pretrained(path)
    assert largest_error(model, samples) < 1e-4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert largest_error(model, first["after"]) < 1e-4 and {one.version for one in first["after"]} == {1}
    assert all(part in first["error"] for part in ("engine 1", "SIGKILL", "rank 1", "push 2"))
    assert "push 2 did not reach every engine" in first["after_error"]


def one_rank(path, run_dir):
    """What each rank does; rank 1 kills its engine just before a push."""
    with layout(tp=2) as parallel:
        engines = ColocatedEngines(make_config(path, run_dir, num_engines=2, max_restarts=0), parallel)
        policy = build_policy(Qwen3Config.from_pretrained(path), ModelConfig(path=path), parallel)
        load_hf_weights(policy, path)
        result = {"stats": engines.push(MegatronWeights(policy), version=0).bytes}
        result["samples"] = sample(engines, PROMPTS, GROUP)
        result["one_engine"] = sample_on_one(engines)
        with torch.no_grad():
            for _, parameter in policy.named_parameters():
                parameter.mul_(1.5)
        engines.push(MegatronWeights(policy), version=1)
        result["after"] = sample(engines, PROMPTS, GROUP)
        source = MegatronWeights(policy)
        if parallel.rank == 1:
            os.kill(engines._engine.pid, signal.SIGKILL)
        result["error"] = error_of(lambda: engines.push(source, version=2))
        result["after_error"] = error_of(lambda: sample(engines, PROMPTS, GROUP))
        engines.close()
        return result


def sample_on_one(engines):
    """The same request, sent to this rank's own engine alone."""
    from oblr_megatron.engine.protocol import SamplingRequest

    request = SamplingRequest(group_size=GROUP, temperature=1.0, max_tokens=32, seed=3)
    ids = [prompt.token_ids for prompt in make_prompts(PROMPTS)]
    groups = dict(engines._engine.stream(ids, range(PROMPTS), request))
    return [one.response_ids for position in range(PROMPTS) for one in groups[position]]


def error_of(call):
    try:
        call()
    except RunError as error:
        return str(error)
    raise AssertionError("nothing was raised")
