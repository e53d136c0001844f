"""Estimated norms in every layout: the logit energy is autograd's, length is length.

Not covered: how much variance an estimate costs the baseline (docs/evidence).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from oblr_megatron.norms.oracle import oracle_logits
from tests.distributed.gradnorm_cases import drawn
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_gradnorm_modes import GROUP, PROMPTS, config_of, make_samples, step_of
from tests.tiny import make_hf_dir

LAYOUTS: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_hf_dir(tmp_path_factory.mktemp("model"), tied=True, seed=5, dtype=torch.float64))


def of_sources(path: str, layouts: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Norms by every source in every layout."""
    results = []
    for sizes in layouts:
        with layout(**sizes) as parallel:
            found = {
                source: step_of(path, parallel, config_of(path, {"source": source, "mode": "two_pass"}, 4))["norms"]
                for source in ("logit", "length")
            }
        results.append(found)
    return results


def energies(path: str) -> torch.Tensor:
    """||d sum rho log pi / d logits||^2 of each sample of the active groups, by autograd on the oracle's logits."""
    config = Qwen3Config.from_pretrained(path)
    weights = {name: tensor.double() for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    found = torch.zeros(PROMPTS * GROUP, dtype=torch.float64)
    for n, sample in enumerate(make_samples()):
        if n // GROUP == 2:
            continue
        tokens = torch.tensor((*sample.prompt_ids, *sample.response_ids))
        logits = oracle_logits(weights, config, tokens).requires_grad_()
        logprobs = (logits[:-1] / 0.8).log_softmax(-1).gather(1, tokens[1:, None])[len(sample.prompt_ids) - 1 :, 0]
        logprobs = logprobs[torch.tensor(sample.mask)] if sample.mask else logprobs
        ratios = (logprobs - drawn(sample)).exp().clamp(max=1.1).detach()
        (ratios * logprobs).sum().backward()
        found[n] = logits.grad.square().sum()
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_sources(model: str, world_size: int) -> None:
    lengths = torch.tensor([s.length for s in make_samples()]).double()
    lengths[2 * GROUP : 3 * GROUP] = 0
    by_autograd = energies(model)
    for found in (
        layouts for ranks in run_ranks(of_sources, world_size, model, LAYOUTS[world_size]) for layouts in ranks
    ):
        assert torch.equal(found["length"], lengths)
        torch.testing.assert_close(found["logit"], by_autograd, rtol=1e-10, atol=0)
