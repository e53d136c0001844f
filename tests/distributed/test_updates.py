"""Several clipped updates on a batch: whole runs of the real trainer are the oracle's, in several layouts.

The oracle takes autograd sample by sample with transformers' weights, and writes out mini-batches, ratios, clipping and
SGD. fp64; weights at 1e-10. Not covered: resuming (test_resume.py), the losses of TRL
(tests/unit/studies/test_trl_clipping.py), CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from oblr_megatron.config import Config
from oblr_megatron.norms.oracle import oracle_gradient, oracle_logprobs
from oblr_megatron.rollout.step_file import read_step, step_path
from oblr_megatron.types import Sample
from tests.distributed.replayed import GROUP, PROMPTS, certain, config_of, exported, make_inputs, train

UPDATES, LR, STEPS = 2, 0.5, 2
COMMON = (
    *("model.dtype=float64", f"num_steps={STEPS}", "checkpoint.every_steps=0", "gradnorm.mode=two_pass"),
    *("optimizer.name=sgd", f"optimizer.lr={LR}", "optimizer.clip_grad=0", f"algo.updates_per_batch={UPDATES}"),
    *("rollout.importance_sampling=token", "rollout.importance_cap=1.5"),
)
ARMS: dict[str, tuple[str, ...]] = {
    "dapo": ("algo.preset=dapo",),
    "gspo": ("algo.preset=gspo", "algo.clip_low=0.05", "algo.clip_high=0.05"),
    "cispo": ("algo.preset=cispo", "algo.clip_low=0.1", "algo.clip_high=0.1"),
    "kl": ("algo.preset=dapo", "algo.kl_coefficient=0.3"),
}
LAYOUTS = {
    "dp2": (),
    "tp2": ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "pp2": ("parallel.pipeline_model_parallel_size=2",),
    "cp2": ("parallel.context_parallel_size=2",),
    "cp2 packed": ("parallel.context_parallel_size=2", "parallel.packing=packed"),
}
IN: dict[str, tuple[str, ...]] = {  # "dapo" proves that every layout takes weights of tokens
    "dapo": tuple(LAYOUTS),
    "gspo": ("cp2", "cp2 packed"),
    "cispo": ("cp2 packed",),
    "kl": ("dp2", "cp2 packed"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), dtype=torch.float64)


def weights_of_tokens(config: Config, now: Tensor, old: Tensor, drawn: Tensor, advantage: float) -> Tensor:
    """Correction times clipped ratio of one response, [T]."""
    algo = config.algo
    ratios = (now - old).exp()
    if algo.ratio == "sequence":
        ratios = ratios.log().mean().exp().expand(len(ratios))
    low, high = 1 - (algo.clip_low or torch.inf), 1 + (algo.clip_high or torch.inf)
    if algo.surrogate == "cispo":
        ratios = ratios.clamp(low, high)
    else:
        ratios = ratios * ~((ratios > high) if advantage > 0 else (ratios < low))
    return (old - drawn).exp().clamp(max=config.rollout.importance_cap) * ratios


def by_hand(config: Config, inputs: Path) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights after the run; the share of clipped tokens and the mean of log pi_old / pi of each step."""
    hf_config, temperature = AutoConfig.from_pretrained(inputs / "model"), config.rollout.temperature
    weights = {name: value.double() for name, value in load_file(inputs / "model" / "model.safetensors").items()}
    reference, beta = dict(weights), config.algo.kl_coefficient

    def logprobs(sample: Sample, of: dict[str, Tensor] = weights) -> Tensor:
        return oracle_logprobs(of, hf_config, sample, temperature)

    shares, drifts = [], []
    for step in range(1, STEPS + 1):
        saved = read_step(step_path(inputs / "rollouts", step))
        right = [float(sample.text == saved.prompts[n // GROUP].answer) for n, sample in enumerate(saved.samples)]
        rewards = torch.tensor(right, dtype=torch.float64).view(PROMPTS, GROUP)
        centred = rewards - rewards.mean(-1, keepdim=True)
        advantages = (centred / (rewards.std(-1, keepdim=True) + 1e-6)).flatten().tolist()
        old = [logprobs(sample) for sample in saved.samples]
        clipped, tokens, drift = 0, 0, 0.0
        size = PROMPTS * GROUP // UPDATES
        for start in range(0, PROMPTS * GROUP, size):
            own = range(start, start + size)
            lengths = [len(saved.samples[n].response_ids) for n in own]
            total = {name: torch.zeros_like(value) for name, value in weights.items()}
            for n in own:
                sample, length = saved.samples[n], len(saved.samples[n].response_ids)
                if advantages[n] == 0 and not beta:
                    continue
                divisor = size * length if config.algo.aggregation == "sample_mean" else sum(lengths)
                drawn, now = torch.tensor(sample.logprobs, dtype=torch.float32).double(), logprobs(sample)
                rho = weights_of_tokens(config, now, old[n], drawn, advantages[n])
                untouched = (old[n] - drawn).exp().clamp(max=config.rollout.importance_cap) * (now - old[n]).exp()
                if advantages[n] != 0 and config.algo.ratio == "token":
                    clipped += int((rho != untouched).sum())
                drift += float((old[n] - now).sum())
                tokens += length  # with a penalty also those of responses without an advantage
                pull = beta * (1 - (logprobs(sample, reference) - now).exp())  # the slope of k3
                per_token = advantages[n] * rho - pull
                for name, value in oracle_gradient(weights, hf_config, sample, temperature, per_token).items():
                    total[name] += value / divisor
            for name, value in weights.items():
                weights[name] = value + LR * total[name]
        shares.append(clipped / tokens)
        drifts.append(drift / tokens)
    return weights, shares, drifts


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_is_the_oracles_in_its_layouts(arm: str, inputs: Path, tmp_path: Path) -> None:
    config = config_of(inputs, tmp_path / "one", *ARMS[arm], *COMMON)
    wanted, shares, drifts = by_hand(config, inputs)
    train(config)
    for name in IN[arm]:
        train(config_of(inputs, tmp_path / name, *ARMS[arm], *COMMON, *LAYOUTS[name]), 2)
    one = certain(tmp_path / "one")
    if arm != "gspo":  # the oracle counts tokens, not sequences
        assert [record["actor/pg_clipfrac"] for record in one] == pytest.approx(shares, rel=1e-12)
    assert [record["actor/ppo_kl"] for record in one] == pytest.approx(drifts, rel=1e-9)
    assert any(0.01 < record["actor/pg_clipfrac"] < 0.9 for record in one), "some are clipped, some not"
    assert [record["weights/version"] for record in one] == [1, 2], "one push a step"
    for name in ("one", *IN[arm]):
        weights = exported(tmp_path / name)
        for key, tensor in wanted.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-10, atol=1e-10, msg=f"{name}: {key}")
        for record, other in zip(certain(tmp_path / name), one, strict=True):
            for key in ("grad_norm", "loss", "entropy", "actor/pg_clipfrac", "actor/ppo_kl", "snr/signal_sq"):
                assert record[key] == pytest.approx(other[key], rel=1e-9, abs=1e-12), (name, key)
