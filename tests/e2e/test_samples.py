"""Real vLLM samples from the true vocabulary, stops at stop tokens and filters as asked; a lost engine costs no state.

One engine has a model with nearly uniform logits, so that padding rows of the vocabulary would be drawn as often as
tokens. transformers is the oracle of log-probs. Not covered: temperature alone, greedy decoding, frequencies
(test_rollout.py); restarts (test_recovery.py).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    Qwen3ForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oblr_megatron.checkpoint.store import check_contents, checkpoints_of, read_manifest
from oblr_megatron.config.run import TIES
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.engine.samples import to_sample
from oblr_megatron.errors import RunError
from oblr_megatron.norms.oracle import oracle_logprobs
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.types import Sample
from tests.e2e.conftest import ROOT, environment, records, torchrun, wait_for_lines
from tests.e2e.tiny_rollout import EOS, VOCAB, make_prompts, start
from tests.tiny import make_hf_dir

OTHER_STOP = 5
TEMPERATURE, TOP_P, TOP_K, MIN_P = 0.8, 0.6, 9, 0.7


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ColocatedEngines, Qwen3ForCausalLM]]:
    """An engine on a model with a weak output layer, and two stop tokens in its generation config."""
    path = make_hf_dir(tmp_path_factory.mktemp("flat") / "model", head_dim=32)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] *= 0.1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, OTHER_STOP]}))
    engines = start(path, path.parent / "run")
    yield engines, Qwen3ForCausalLM.from_pretrained(path)
    engines.close()


def ask(engines: ColocatedEngines, count: int, request: SamplingRequest) -> list[Sample]:
    """Ask the one engine, with filters that the run's config does not set."""
    prompts = [prompt.token_ids for prompt in make_prompts(count)]
    assert engines._engine is not None
    groups = dict(engines._engine.stream(prompts, range(count), request))
    return [sample for position in range(count) for sample in groups[position]]


def scores(model: Qwen3ForCausalLM, sample: Sample) -> torch.Tensor:
    """[T, V] log-probs of the response's positions at TEMPERATURE 1, unfiltered."""
    tokens = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        return model(tokens).logits[0, len(sample.prompt_ids) - 1 : -1].double()


def test_padding_of_the_vocabulary_is_never_drawn_and_every_stop_token_ends(flat) -> None:
    """vLLM pads 37 rows to 64: if it drew from all rows, 4,000 of 10,000 tokens would not exist."""
    engines, model = flat
    samples = ask(engines, 24, SamplingRequest(group_size=48, temperature=1.0, max_tokens=32, seed=1))
    drawn = torch.bincount(torch.tensor([token for sample in samples for token in sample.response_ids]))
    assert drawn.sum() > 10_000
    assert len(drawn) <= VOCAB and (drawn > 0).sum() == VOCAB, "every token of the vocabulary, and no other"
    probabilities = scores(model, samples[0]).softmax(-1)
    assert probabilities.max() < 4 / VOCAB, "nearly uniform, or the test shows nothing"
    for sample in samples:
        *before, last = sample.response_ids
        assert not {EOS, OTHER_STOP} & set(before)
        assert sample.finish_reason == ("stop" if last in (EOS, OTHER_STOP) else "length")
        assert sample.finish_reason == "stop" or len(sample.response_ids) == 32
    ends = {sample.response_ids[-1] for sample in samples if sample.finish_reason == "stop"}
    assert ends == {EOS, OTHER_STOP} and {sample.finish_reason for sample in samples} == {"stop", "length"}


@pytest.mark.parametrize("min_p", [0.0, MIN_P])
def test_logprobs_are_renormalised_over_what_the_filters_leave(flat, min_p: float) -> None:
    """min-p, then top-k, then top-p over the rest, at the temperature: transformers' model and its logits warpers.

    The trainer's log-probs, by their oracle, are over the recorded tokens.
    """
    engines, model = flat
    request = SamplingRequest(8, TEMPERATURE, 24, seed=2, top_p=TOP_P, top_k=TOP_K, min_p=min_p, recorded=TOP_K + TIES)
    warpers = [TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)]
    warpers[1:1] = [MinPLogitsWarper(min_p)] if min_p else []
    warp, weights = LogitsProcessorList(warpers), dict(model.named_parameters())
    samples = ask(engines, 12, request)
    worst, plain, least = 0.0, 0.0, 1.0
    for number, sample in enumerate(samples):
        unfiltered = (scores(model, sample) / TEMPERATURE).log_softmax(-1)
        kept = warp(torch.tensor([sample.response_ids]), scores(model, sample)).log_softmax(-1)
        ids = torch.tensor(sample.response_ids)[:, None]
        found = torch.tensor(sample.logprobs, dtype=torch.float64)
        assert sample.recorded is not None
        for row, recorded in zip(kept, sample.recorded, strict=True):  # the tokens that each draw could take
            possible = recorded[recorded["logprob"] > -torch.inf]
            assert len(possible) < len(recorded) and {*possible["id"]} == {*(row > -torch.inf).nonzero()[:, 0].tolist()}
            least = min(least, np.exp(possible["logprob"].min() - possible["logprob"].max()))
        worst = max(worst, (kept.gather(-1, ids)[:, 0] - found).abs().max().item())
        plain = max(plain, (unfiltered.gather(-1, ids)[:, 0] - found).abs().max().item())
        if number < 8:
            trained = oracle_logprobs(weights, model.config, sample, TEMPERATURE)
            torch.testing.assert_close(trained.double(), kept.gather(-1, ids)[:, 0], rtol=0, atol=1e-5)
    assert worst < 1e-4
    assert plain > 0.5, "the filters take away more than a third of the probability"
    assert (least > MIN_P - 1e-5) == bool(min_p), "the tokens that min_p leaves out pass the other filters"


def test_an_id_out_of_the_vocabulary_is_refused() -> None:
    """Only the check, on vLLM's own record: vLLM itself never gives such an id."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    logprobs = FlatLogprobs()
    logprobs.append_fast([VOCAB], [-1.0], itertools.chain([1]), [None])
    spans = [WeightVersionSpan("0", 0, 1)]
    completion = CompletionOutput(0, "", [VOCAB], None, logprobs, finish_reason="stop", weight_versions=spans)
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    with pytest.raises(RunError, match=f"token {VOCAB}.*{VOCAB}") as caught:
        to_sample(0, (2,), completion, 0, tokenizer, VOCAB)
    assert "\n" not in str(caught.value)
    assert to_sample(0, (2,), completion, 0, tokenizer, VOCAB + 1).response_ids == (VOCAB,)


@pytest.mark.nightly
def test_a_run_that_loses_its_engine_saves_its_state(tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """SIGKILL of the engine without restarts: the cause is printed once, a checkpoint and the report are kept."""
    keys = overrides(tmp_path / "run", num_steps=100_000, rollout__max_restarts=0)
    job = subprocess.Popen(
        torchrun(2, keys), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_lines(2, tmp_path / "run" / "metrics.jsonl", job)
        family = psutil.Process(job.pid).children(recursive=True)
        engine = next(child for child in family if "oblr_megatron.engine.worker" in " ".join(child.cmdline()))
        engine.kill()
        stdout, stderr = job.communicate(timeout=120)
    finally:
        if job.poll() is None:
            os.kill(job.pid, signal.SIGKILL)
    assert job.returncode == 1, stderr[-2000:]
    causes = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(causes) == 1 and "SIGKILL" in causes[0], stderr[-2000:]  # both ranks raise it, the first one prints it
    assert "[rank0]:" not in stderr, "a traceback"
    steps = records(tmp_path / "run")
    updates = int(stdout.split("the run cannot go on; checkpoint of step ")[1].split(":")[0])
    assert updates == len(steps), "the step in which the engine was lost counts, with a record, if its update was done"
    newest = checkpoints_of(tmp_path / "run")[0]
    manifest = read_manifest(newest)
    check_contents(newest, manifest, manifest.files)
    assert manifest.step == updates == manifest.state["step"]
    assert manifest.state["data"]["index"] == updates * 8, "no prompt of the lost step is skipped"
    assert (tmp_path / "run" / "report.html").exists()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", updates)
    assert not (tmp_path / "run" / "hf").exists(), "only a run that ended well exports there"
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
