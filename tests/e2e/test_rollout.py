"""Real vLLM in its own process: samples and their log-probs, before and after pushes of changed weights.

Log-probs are compared with transformers. Not covered: deaths and deadlines (test_rollout_failures.py), several ranks
(test_rollout_ranks.py), CUDA, speed.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from oblr_megatron.errors import RunError
from oblr_megatron.rollout import push
from tests.e2e.tiny_rollout import EOS, VOCAB, Weights, change, engine_processes, largest_error, sample, start
from tests.tiny import make_hf_dir

PARITY = 1e-4


@pytest.fixture(scope="module", params=["untied", "tied"])
def rollout(request, tmp_path_factory):
    """(engines, the transformers model of the same directory, the directory)"""
    path = make_hf_dir(tmp_path_factory.mktemp(request.param) / "model", tied=request.param == "tied", head_dim=32)
    engines = start(path, path.parent / "run")
    yield engines, Qwen3ForCausalLM.from_pretrained(path), path
    engines.close()
    assert not engine_processes()


def test_the_checkpoint_is_served_as_version_0(rollout):
    engines, model, _ = rollout
    samples = sample(engines)
    assert engines.version == 0 and {one.version for one in samples} == {0}
    assert largest_error(model, samples) < PARITY


def test_pushed_weights_are_the_ones_that_are_served(rollout):
    """An engine that computed with a packed copy of old weights would have log-probs wrong by more than 1."""
    engines, model, _ = rollout
    before = sample(engines)
    assert [sample(engines), sample(engines)] == [before, before], "equal weights and seed, equal to the last bit"
    for version in (1, 2, 3):
        change(model, seed=version)
        assert largest_error(model, before) > 100 * PARITY, "the change is large enough to be seen"
        stats = engines.push(Weights(model), version)
        after = sample(engines)
        assert stats.bytes == sum(4 * parameter.numel() for parameter in model.parameters())
        assert engines.version == version and {one.version for one in after} == {version}
        assert largest_error(model, after) < PARITY
        assert after != before
        before = after
    engines.push(Weights(model), version=4)
    unchanged = sample(engines)
    assert [one.response_ids for one in unchanged] == [one.response_ids for one in before]
    assert [one.logprobs for one in unchanged] == [one.logprobs for one in before]


def test_logprobs_are_those_of_the_tempered_distribution(rollout):
    engines, model, _ = rollout
    samples = sample(engines, temperature=0.7)
    assert largest_error(model, samples, temperature=0.7) < PARITY
    assert largest_error(model, samples, temperature=1.0) > 100 * PARITY


def test_greedy_takes_the_most_likely_token(rollout):
    engines, model, _ = rollout
    samples = sample(engines, group_size=2, temperature=0.0)
    assert samples[0::2] == samples[1::2]
    assert largest_error(model, samples) < PARITY
    for one in samples:
        tokens = torch.tensor([one.prompt_ids + one.response_ids])
        with torch.no_grad():
            best = model(tokens).logits[0, len(one.prompt_ids) - 1 : -1].argmax(-1)
        assert tuple(best.tolist()) == one.response_ids


def test_records_are_in_prompt_major_order_and_end_as_they_say(rollout):
    engines, _, path = rollout
    tokenizer = AutoTokenizer.from_pretrained(path)
    samples = sample(engines, count=40, group_size=8)
    assert [one.group for one in samples] == [n // 8 for n in range(320)]
    assert len({one.response_ids for one in samples}) > 300, "members of a group draw differently"
    for one in samples:
        ended = one.response_ids[-1] == EOS
        assert one.finish_reason == ("stop" if ended else "length")
        assert ended or len(one.response_ids) == 32
        assert EOS not in one.response_ids[:-1]
        assert max(one.response_ids) < VOCAB, "vLLM pads the vocabulary to 64"
        assert one.text == tokenizer.decode(one.response_ids, skip_special_tokens=True)
        assert "<eos>" not in one.text
    assert {one.finish_reason for one in samples} == {"stop", "length"}


def test_a_prompts_samples_do_not_depend_on_the_rest_of_the_batch(rollout):
    engines, _, _ = rollout
    alone, together = sample(engines, count=1), sample(engines, count=12)
    assert [one.response_ids for one in alone] == [one.response_ids for one in together[:4]]
    other = sample(engines, count=1, seed=4)
    assert [one.response_ids for one in other] != [one.response_ids for one in alone]


def test_sampling_frequencies_are_the_probabilities(rollout):
    """First tokens of 4096 draws against the model's own distribution: chi-square with 36 degrees of freedom."""
    engines, model, _ = rollout
    draws = sample(engines, count=1, group_size=4096, max_tokens=1)
    counts = torch.bincount(torch.tensor([one.response_ids[0] for one in draws]), minlength=VOCAB).double()
    with torch.no_grad():
        probabilities = model(torch.tensor([draws[0].prompt_ids])).logits[0, -1].double().softmax(-1)
    expected = probabilities * len(draws)
    often = expected >= 5
    pooled = torch.cat([expected[often], expected[~often].sum()[None]])
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    chi_square = ((found - pooled) ** 2 / pooled.clamp(min=1e-9)).sum().item()
    assert chi_square < 75, "a true distribution exceeds this once in 10^4"


def test_a_source_that_breaks_off_leaves_no_half_model_in_use(rollout, monkeypatch):
    """With small buckets some tensors are in place already; their values must never be sampled from."""
    engines, model, _ = rollout
    expected = sample(engines)
    monkeypatch.setattr(push, "BUCKET_BYTES", 4096)

    class Broken(Weights):
        def __iter__(self):
            for index, (name, tensor) in enumerate(super().__iter__()):
                if index == 5:
                    raise ZeroDivisionError("the trainer's own mistake")
                yield name, tensor * 0

    with pytest.raises(ZeroDivisionError):
        engines.push(Broken(model), engines.version + 1)
    assert_refuses_until_a_full_push(engines, model, expected)


def assert_refuses_until_a_full_push(engines, model, expected):
    """The trainer's side refuses, the engine process refuses, and a complete push makes both usable again."""
    version = engines.version
    with pytest.raises(RunError, match=f"push {version + 1} did not reach every engine"):
        sample(engines)
    engines._unusable = None
    with pytest.raises(RunError, match=f"push {version + 1} failed"):
        sample(engines)
    engines.push(Weights(model), version + 1)
    samples = sample(engines)
    assert {one.version for one in samples} == {version + 1}
    assert [one.logprobs for one in samples] == [one.logprobs for one in expected]


def test_small_buckets_carry_the_same_weights(rollout, monkeypatch):
    engines, model, _ = rollout
    expected = sample(engines)
    monkeypatch.setattr(push, "BUCKET_BYTES", 4096)
    stats = engines.push(Weights(model), engines.version + 1)
    assert stats.buckets > 5
    assert [one.logprobs for one in sample(engines)] == [one.logprobs for one in expected]


def test_a_prompt_that_is_too_long_is_refused_and_the_next_call_works(rollout):
    engines, _, _ = rollout
    prompt = sample(engines, count=1)[0].prompt_ids
    with pytest.raises(RunError, match=r"engine 0 .* rank 0 waited for 2 x 1 samples: .*64"):
        list(engines._engine.stream([prompt, (5,) * 70], range(2), _request(engines)))
    assert len(sample(engines)) == 48


def test_shared_memory_has_no_name(rollout):
    """So nothing can be left behind, whichever side is killed, and whenever."""
    engines, model, _ = rollout
    engines.push(Weights(model), engines.version + 1)
    for pid in (os.getpid(), engines._engine.pid):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        assert any("/memfd:oblr-weights" in line for line in maps)


def _request(engines):
    from oblr_megatron.engine.protocol import SamplingRequest

    return SamplingRequest(group_size=1, temperature=1.0, max_tokens=4, seed=0)
