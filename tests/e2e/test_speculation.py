"""Speculation in real vLLM draws what plain sampling draws, to the token, with the policy's log-probs.

Every engine has the same tiny model with 8 tokens, so that n-grams repeat all the time and many drafts are wrong. The
oracles are an engine without speculation, and transformers' probabilities. Not covered: CUDA, other processors, time.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2
from transformers import Qwen3ForCausalLM

from oblr_megatron.engine.http_messages import DraftReport
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.errors import UserError
from oblr_megatron.extras.speculation.options import METHODS
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.rollout.server_checks import check_servers
from oblr_megatron.rollout.servers import ServerEngines
from oblr_megatron.rollout.step_file import read_step, step_path
from oblr_megatron.types import Prompt, Sample
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.conftest import records
from tests.e2e.forked import forked
from tests.e2e.tiny_rollout import EOS, ONE_RANK, largest_error, make_config, start
from tests.tiny import make_hf_dir

TOKENS, SEQUENCES = 8, 96
BOUND = 2e-5
"""Of reported log-probs against the policy's."""
TEXT = Prompt(row=0, id="0", text="", token_ids=(2, 3, 4, 2, 3, 5, 2, 3), answer="", source="")
PROMPTS = [replace(TEXT, row=n, id=str(n), token_ids=(*TEXT.token_ids[n % 5 :], 2 + n % 6)) for n in range(12)]
REQUEST = SamplingRequest(group_size=4, temperature=0.8, max_tokens=40, seed=3)
REQUESTS = {
    "greedy": replace(REQUEST, temperature=0.0),
    "sampled": REQUEST,
    "filtered": replace(REQUEST, temperature=1.3, top_p=0.8, top_k=5),
}
MISSING = importlib.util.find_spec("arctic_inference") is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("speculation") / "model", head_dim=32, vocab_size=TOKENS)


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[Sample]]:
    """Samples of each request, from an engine without speculation."""
    engines = start(model, model.parent / "plain", max_num_seqs=SEQUENCES)
    found = {name: engines.generate(PROMPTS, request) for name, request in REQUESTS.items()}
    engines.close()
    return found


@pytest.fixture(scope="module", params=METHODS)
def engines(model: Path, request: pytest.FixtureRequest) -> Iterator[ColocatedEngines]:
    """All sequences get drafts."""
    if request.param == "suffix" and MISSING:
        pytest.skip("arctic-inference is not installed (docs/speculation.md)")
    run_dir = model.parent / request.param
    made = start(model, run_dir, max_num_seqs=SEQUENCES, speculation=request.param, speculation_below=SEQUENCES)
    yield made
    made.close()


def report(engines: ColocatedEngines) -> DraftReport:
    (found,) = engines.reports()
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_samples_are_those_without_speculation(
    engines: ColocatedEngines, model: Path, plain: dict[str, list[Sample]], name: str
) -> None:
    report(engines)
    samples = engines.generate(PROMPTS, REQUESTS[name])
    assert [one.response_ids for one in samples] == [one.response_ids for one in plain[name]]
    difference = max(
        abs(ours - theirs)
        for one, other in zip(samples, plain[name], strict=True)
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True)
    )
    assert difference < BOUND
    if name != "filtered":
        oracle = Qwen3ForCausalLM.from_pretrained(model)
        assert largest_error(oracle, samples, REQUESTS[name].temperature or 1.0) < BOUND
    seen = report(engines)
    assert 0 < seen.accepted < seen.proposed, "drafts were right, and drafts were wrong"
    assert seen.below == SEQUENCES


def test_tokens_have_the_policys_probabilities(engines: ColocatedEngines, model: Path) -> None:
    """Chi-square of the first four tokens together against transformers; the seeds are fixed."""
    request = replace(REQUEST, group_size=1500, max_tokens=4)
    samples = engines.generate([TEXT] * 8, request)
    assert report(engines).accepted > 1000
    expected = outcomes(Qwen3ForCausalLM.from_pretrained(model), request)
    assert math.isclose(sum(expected.values()), 1, abs_tol=1e-5)
    assert p_value(samples, expected) > 1e-3
    shifted = {
        tokens: expected[other] for tokens, other in zip(expected, [*expected][1:] + [*expected][:1], strict=True)
    }
    assert p_value(samples, shifted) < 1e-9, "the test sees another distribution"


def outcomes(oracle: Qwen3ForCausalLM, request: SamplingRequest) -> dict[tuple[int, ...], float]:
    """The probability of every response to TEXT."""
    found: dict[tuple[int, ...], float] = {}
    open_ = {(): 1.0}
    for length in range(1, request.max_tokens + 1):
        with torch.no_grad():
            logits = oracle(torch.tensor([TEXT.token_ids + start for start in open_])).logits[:, -1].double()
        chances = (logits / request.temperature).softmax(-1).tolist()
        longer = {
            (*start, token): chance * row[token]
            for (start, chance), row in zip(open_.items(), chances, strict=True)
            for token in range(TOKENS)
        }
        ends = {tokens for tokens in longer if tokens[-1] == EOS or length == request.max_tokens}
        found |= {tokens: longer[tokens] for tokens in ends}
        open_ = {tokens: chance for tokens, chance in longer.items() if tokens not in ends}
    return dict(sorted(found.items()))


def p_value(samples: list[Sample], expected: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's test. Responses that are expected fewer than 5 times count as one."""
    counts, total = Counter(one.response_ids for one in samples), len(samples)
    common = {tokens: chance * total for tokens, chance in expected.items() if chance * total >= 5}
    rest = total - sum(common.values())
    assert len(common) > 100
    pairs = [(counts[tokens], mean) for tokens, mean in common.items()]
    pairs.append((total - sum(count for count, _ in pairs), rest))
    return float(chi2.sf(sum((count - mean) ** 2 / mean for count, mean in pairs), len(pairs) - 1))


def test_a_bound_that_is_measured_changes_no_draw(model: Path, plain: dict[str, list[Sample]]) -> None:
    """The engine measures while it samples; whichever steps had drafts, the samples are the same."""
    run_dir = model.parent / "measured"
    engines = start(model, run_dir, max_num_seqs=SEQUENCES, speculation="ngram")
    tail = [PROMPTS[:1], PROMPTS[:1], PROMPTS[:2], PROMPTS]
    for prompts in tail * 4:
        samples = engines.generate(prompts, REQUESTS["sampled"])
        assert [one.response_ids for one in samples] == [
            one.response_ids for one in plain["sampled"][: len(prompts) * REQUEST.group_size]
        ]
    found = engines.metrics()
    assert found["rollout/restarts"] == 0
    assert 0 <= found["rollout/speculation_below"] <= SEQUENCES // 7, "steps with drafts have at most 96 rows"
    assert 0 < found["rollout/speculation_accepted"] < 6
    engines.close()


def test_a_run_trains_on_the_same_samples(tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """The trainer's own log-probs are the oracle, under a filter; weights are pushed between the steps."""
    keys = {"num_steps": 2, "group_size": 2, "rollout__top_k": 12, "rollout__top_p": 0.9}
    speculation = {"rollout__speculation": "ngram", "rollout__speculation_below": 64}
    found = []
    for name, more in (("plain", {}), ("ngram", speculation)):
        result = forked(1, [*overrides(tmp_path / name, **keys, **more), "--save-rollouts"])
        assert result.returncode == 0, result.stderr[-3000:]
        found.append([read_step(step_path(tmp_path / name / "rollouts", step)).samples for step in (1, 2)])
    assert [[one.response_ids for one in step] for step in found[0]] == [
        [one.response_ids for one in step] for step in found[1]
    ]
    assert [supports(step) for step in found[0]] == [supports(step) for step in found[1]]
    for step in records(tmp_path / "ngram"):
        assert step["rollout/logprob_abs_diff"] < BOUND
        assert step["rollout/speculation_below"] == 64
    assert "rollout/speculation_below" not in records(tmp_path / "plain")[0]


def supports(samples: list[Sample]) -> list[set[int]]:
    """The tokens that each draw could take."""
    tables = [one.recorded for one in samples if one.recorded is not None]
    assert len(tables) == len(samples)
    return [{*row["id"][row["logprob"] > -math.inf].tolist()} for table in tables for row in table]


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", ["stream", "one_step"])
def test_a_run_that_overlaps_draws_the_same(tmp_path: Path, overrides: Callable[..., list[str]], overlap: str) -> None:
    """Prompts are handed over while others are sampled with drafts; the first step's weights are those of any run."""
    keys = {"num_steps": 2, "group_size": 2, "algo__baseline": "rloo", "rollout__overlap": overlap}
    keys |= {"rollout__max_staleness": 1} if overlap == "one_step" else {"rollout__wave_tokens": 1}
    found = []
    for name in ("none", "ngram"):
        more = {"rollout__speculation": name, "rollout__speculation_below": 64}
        result = forked(1, [*overrides(tmp_path / name, **keys, **more), "--save-rollouts"])
        assert result.returncode == 0, result.stderr[-3000:]
        found.append([one.response_ids for one in read_step(step_path(tmp_path / name / "rollouts", 1)).samples])
    assert found[0] == found[1]
    first, second = records(tmp_path / "ngram")
    assert first["rollout/logprob_abs_diff"] < BOUND and second["rollout/speculation_below"] == 64
    if overlap == "stream":
        assert second["rollout/waves"] > 1 and second["rollout/logprob_abs_diff"] < BOUND


@pytest.mark.nightly
def test_servers_speculate(model: Path, plain: dict[str, list[Sample]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    options = ("--speculation", "ngram", "--speculation-below", str(SEQUENCES))
    with ApiServer(model, model.parent / "server.log", options=options) as server:
        config = make_config(model, model.parent / "served", servers=[server.url], speculation="ngram")
        check_servers(config)
        with pytest.raises(UserError, match="speculation 'ngram'"):
            check_servers(make_config(model, model.parent / "served", servers=[server.url]))
        served = ServerEngines(config, ONE_RANK)
        served._holder, served._behind = "", False  # the server holds the checkpoint
        samples = served.generate(PROMPTS, REQUESTS["greedy"])
        assert [one.response_ids for one in samples] == [one.response_ids for one in plain["greedy"]]
        found = served.metrics()
        assert found["rollout/speculation_below"] == SEQUENCES and found["rollout/speculation_accepted"] > 0
        served.close()
