"""Episodes with the real vLLM engine: turns, seeds, limits, and functions that raise, hang, die or return nonsense.

Log-probs of every turn are compared with transformers. Not covered: CUDA; the loop of tools, and whole runs
(test_environment_runs.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.types import Prompt, Sample
from tests.e2e.environments import BAD, DRAWN, LATE, NAP_S, OBSERVED, TURNS, WORK_S
from tests.e2e.tiny_rollout import VOCAB, command_of, make_prompts, start
from tests.tiny import make_hf_dir

Rollout = tuple[ColocatedEngines, Qwen3ForCausalLM]
# The limits are far above what a loaded machine makes a process wait for: a stall may not look like a blocked function.
OPTIONS = {"function": "tests.e2e.environments:turns", "deadline_s": 8.0, "max_turns": 8}
TOOLS = {"tools": ["tests.e2e.environments:naps"], "tool_workers": 1}


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    path = make_hf_dir(tmp_path_factory.mktemp("environments") / "model", head_dim=32)
    engines = start(path, path.parent / "run", environment=OPTIONS | TOOLS | {"in_rounds": True})
    yield engines, Qwen3ForCausalLM.from_pretrained(path)
    engines.close()
    left = [command_of(child) for child in psutil.Process().children(recursive=True)]  # a zombie has none
    assert not [command for command in left if "environments.process:plays" in command]


def sample(engines: ColocatedEngines, prompts: list[Prompt], group_size: int = 3, seed: int = 3) -> list[Sample]:
    request = SamplingRequest(group_size=group_size, temperature=1.0, max_tokens=40, seed=seed)
    return engines.generate(prompts, request)


def largest_error(model: Qwen3ForCausalLM, one: Sample) -> float:
    """max |log-prob - log_softmax of transformers' logits| over the tokens that the policy wrote."""
    tokens = torch.tensor([one.prompt_ids + one.response_ids])
    with torch.no_grad():
        table = model(tokens).logits[0, len(one.prompt_ids) - 1 : -1].float().log_softmax(-1)
    wanted = table.gather(-1, tokens[0, len(one.prompt_ids) :, None])[:, 0]
    return float((wanted - torch.tensor(one.logprobs))[torch.tensor(one.mask)].abs().max())


def test_episodes_of_several_turns(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    engines, model = rollout
    assert engines._episodes is not None
    engines._episodes._told.clear()
    prompts = make_prompts(6)
    samples = sample(engines, prompts)
    assert [one.group for one in samples] == [n // 3 for n in range(18)]
    assert len({one.response_ids for one in samples}) == 18, "members of a group draw differently"
    for one in samples:
        assert one.prompt_ids == prompts[one.group].token_ids
        assert one.turns == TURNS and len(one.mask) == len(one.logprobs) == len(one.response_ids)
        observed = [token for token, own in zip(one.response_ids, one.mask, strict=True) if not own]
        assert observed == [*OBSERVED] * (TURNS - 1)
        assert all(value == 0 for value, own in zip(one.logprobs, one.mask, strict=True) if not own)
        assert largest_error(model, one) < 1e-4
        assert one.environment_reward is not None and 0 < one.environment_reward < VOCAB
        assert one.finish_reason in ("stop", "length") and one.version == 0
    again, other = sample(engines, prompts), sample(engines, prompts, seed=4)
    assert again == samples, "equal seeds give equal episodes, to the last bit, in rounds"
    assert [one.response_ids for one in other] != [one.response_ids for one in samples]
    assert sample(engines, prompts[:1]) != other[:3]
    assert caplog.text.count("which no reward of the run reads. Fix: ") == 1, "reward.name is another"


def test_a_bad_episode_costs_its_own_sample(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    """One prompt of each kind between good ones, which have the samples that they have without the bad ones."""
    engines, model = rollout
    assert engines._episodes is not None
    engines._episodes._told.clear()  # another test may have failed in one of these ways
    prompts = make_prompts(2 * len(BAD))
    alone = sample(engines, prompts, group_size=1)
    kinds = [name for name in BAD for _ in range(2)]
    mixed = [replace(p, answer=kinds[n]) if n % 2 else p for n, p in enumerate(prompts)]
    found = sample(engines, mixed, group_size=1)
    for n, one in enumerate(found):
        if n % 2 == 0:
            assert (one.finish_reason, one.response_ids) == (alone[n].finish_reason, alone[n].response_ids), caplog.text
            continue
        if kinds[n] in ("runaway", "catches"):
            assert one.finish_reason == ("stop" if kinds[n] == "catches" else "length")
            assert 0 < len(one.response_ids) <= 40
            assert one.environment_reward == (0.5 if kinds[n] == "catches" else None)
            assert largest_error(model, one) < 1e-4 and one.mask[-1], "cut at the end of a turn"
            assert one.turns == (8 if kinds[n] == "runaway" else 1)
            continue
        assert one.finish_reason == ("late" if kinds[n] in LATE else "failed"), kinds[n]
        assert one.text == "" and one.environment_reward is None
        assert len(one.mask) == len(one.logprobs) == len(one.response_ids)
        assert all(one.mask) and bool(one.response_ids) is (kinds[n] in DRAWN), "the tokens drawn so far"
        assert not one.response_ids or largest_error(model, one) < 1e-4
    assert sample(engines, prompts, group_size=1) == alone, "the engine and a new process go on"
    for what in ("environment process ended", "without an await", "did not end at its deadline", "\nSystemExit: 1"):
        assert caplog.text.count(what) == 1, f"{what}: each kind of failure is logged, once"


def test_the_wait_for_a_tool_is_not_the_episodes_time(rollout: Rollout) -> None:
    """One worker makes the calls of six episodes in turn: the last waits longer than the episodes' deadline."""
    engines, _ = rollout
    prompts = [replace(prompt, answer="calls") for prompt in make_prompts(6)]
    begun = time.monotonic()
    samples = sample(engines, prompts, group_size=1)
    assert [one.finish_reason for one in samples] == ["stop"] * 6
    assert [one.environment_reward for one in samples] == [NAP_S] * 6
    assert time.monotonic() - begun > OPTIONS["deadline_s"]


def test_the_work_of_other_episodes_is_not_an_episodes_time(rollout: Rollout) -> None:
    """One loop runs all of them. The last begins after more than the deadline."""
    engines, _ = rollout
    prompts = [replace(prompt, answer="works") for prompt in make_prompts(30)]
    begun = time.monotonic()
    samples = sample(engines, prompts, group_size=1)
    assert {one.finish_reason for one in samples} <= {"stop", "length"} and all(one.response_ids for one in samples)
    assert time.monotonic() - begun > 30 * WORK_S > OPTIONS["deadline_s"]


def test_a_function_that_always_dies_ends_soon(rollout: Rollout) -> None:
    """After a number of processes the remaining episodes fail without being run."""
    engines, _ = rollout
    prompts = [replace(prompt, answer="dies") for prompt in make_prompts(24)]
    samples = sample(engines, prompts, group_size=1)
    assert {one.finish_reason for one in samples} == {"failed"}
