"""The estimated memory of a step equals the bytes of the tensors alive at its fullest moment.

Sizes are small but far from degenerate. Not covered: memory that an allocator keeps beyond the tensors
(tools/bench/memory.py measures whole processes), parallel layouts (tests/distributed/test_memory.py), GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oblr_megatron.config import ParallelConfig
from oblr_megatron.config.run import TIES
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.memory.training import MemoryEstimate, estimate, resident_bytes
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from tests.live import WatchedSteps, peak_of_step, step_config
from tests.tiny import tiny_config, tiny_moe_config

TOKENS = 100
SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "vocab_size": 128}


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    yield initialize(ParallelConfig())
    shutdown()


def mode(name: str, **options: Any) -> dict[str, Any]:
    return {"gradnorm": {"mode": name, **options}}


def recompute(granularity: str) -> dict[str, Any]:
    return {"parallel": {"recompute_granularity": granularity}}


INLINE = mode("inline") | {"algo": {"baseline": "pooled"}}
STREAMED = {"prompts": 2, "algo": {"baseline": "pooled", "snr": {"num_folds": 1}}, "rollout": {"overlap": "stream"}}
BF16, LORA = {"model": {"dtype": "bfloat16"}}, {"model": {"lora": {"rank": 8}}}
LORA_BF16 = {"model": {"dtype": "bfloat16", "lora": {"rank": 8, "targets": ["q_proj", "v_proj", "o_proj"]}}}
LARGE, TIED = {"vocab_size": 2000}, {"vocab_size": 1000, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 96}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no norms": ({"algo": {"baseline": "rloo"}}, {}),
    "two_pass, rows, folds": (mode("two_pass") | {"rows": 2, "prompts": 2}, {}),
    "two_pass, packed": (mode("two_pass") | {"rows": 2, "parallel": {"packing": "packed"}}, {}),
    "two_pass, tied": (mode("two_pass"), TIED),
    "inline, rows, folds": (INLINE | {"rows": 2, "prompts": 2}, {}),
    "inline, packed": (INLINE | {"rows": 2, "parallel": {"packing": "packed"}}, {}),
    "inline, tied": (INLINE, TIED),
    "inline, large vocabulary": (INLINE, LARGE),
    "inline, full recomputation": (INLINE | recompute("full"), {"num_hidden_layers": 4}),
    "inline, weights in bf16": (INLINE | BF16, LARGE),
    "inline, experts": (INLINE, EXPERTS),
    "streamed, inline": (mode("inline") | STREAMED, {}),
    "streamed, stash": (mode("stash") | STREAMED, {}),
    "bookkeep, rows": (mode("bookkeep") | {"rows": 2}, {}),
    "bookkeep, windows": (mode("bookkeep", window_tokens=100) | {"prompts": 2, "algo": {"snr": {"num_folds": 1}}}, {}),
    "bookkeep, large vocabulary": (mode("bookkeep"), LARGE),
    "bookkeep, full recomputation": (mode("bookkeep") | recompute("full"), {"num_hidden_layers": 4}),
    "stash, tempered": (mode("stash") | {"algo": {"baseline": "pooled", "norm_power": 0.25}}, {}),
    "full recomputation": (mode("two_pass") | recompute("full"), {}),
    "selective recomputation": (mode("two_pass") | recompute("selective"), {}),
    "weights in bf16": (mode("two_pass") | BF16, LARGE),
    "weights in fp64": (mode("stash") | {"model": {"dtype": "float64"}}, {}),
    "offloaded state": (mode("two_pass") | BF16 | {"optimizer": {"offload": "sampling"}}, LARGE),
    "a reference": (mode("two_pass") | {"algo": {"kl_coefficient": 0.1}}, LARGE),
    "an average of gradients": (
        mode("two_pass") | {"algo": {"snr": {"estimator": "momentum", "num_folds": 1}}},
        {"hidden_size": 128},
    ),
    "sgd": (mode("two_pass") | {"optimizer": {"name": "sgd"}}, {}),
    "adapters": (mode("two_pass") | LORA | {"algo": {"kl_coefficient": 0.1}}, LARGE),
    "adapters, inline, bf16": (INLINE | LORA_BF16, TIED),
    "adapters, bookkeep": (mode("bookkeep") | LORA | {"rows": 2}, {}),
    "adapters, experts": (mode("two_pass") | LORA, EXPERTS | {"num_hidden_layers": 4}),
    "experts": (mode("two_pass"), EXPERTS),
    "experts, bookkeep": (mode("bookkeep"), EXPERTS),
}


@pytest.mark.parametrize("case", CASES)
def test_estimate_is_what_is_alive(case: str, parallel: Parallel) -> None:
    options, sizes = CASES[case]
    hf_config = (tiny_moe_config if "num_experts" in sizes else tiny_config)(**SIZES | sizes)
    config = step_config(TOKENS, **options)
    found = estimate(hf_config.to_dict(), config, 1, fixed_bytes=0)
    measured = peak_of_step(hf_config, config, parallel)
    assert found.total == pytest.approx(measured, rel=0.05), found.table()


HF = tiny_config(**SIZES).to_dict()


def estimated(tokens: int = TOKENS, *, hf: dict[str, Any] = HF, on_gpu: bool = False, **options: Any) -> MemoryEstimate:
    return estimate(hf, step_config(tokens, **options), 1, on_gpu=on_gpu, fixed_bytes=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_holds_offloaded_state_during_the_update_only(dtype: str) -> None:
    """The average of the "momentum" estimator stays."""
    options = {
        "model": {"dtype": dtype},
        "algo": {"baseline": "rloo", "snr": {"estimator": "momentum", "num_folds": 1}},
    }
    offload = {"optimizer": {"offload": "sampling"}}
    stays, moves = estimated(on_gpu=True, **options), estimated(on_gpu=True, **options, **offload)
    average = RankSizes.of(HF, step_config(TOKENS), 0).parameters * 4
    state = stays.optimizer - average
    assert state == average * (3 if dtype == "bfloat16" else 2)
    assert stays.between_steps - moves.between_steps == state
    assert moves.optimizer == (stays.optimizer if "update" in moves.moment else average)
    long = estimated(8192, on_gpu=True, **options, **offload)
    assert long.moment != "optimizer's update" and long.optimizer == average
    algo = {"algo": options["algo"]}
    assert estimated(**algo, **offload) == estimated(**algo), "on a CPU the host's memory is the rank's"


def test_transformer_engines_adam_needs_no_room_for_square_roots() -> None:
    config = step_config(16, algo={"baseline": "rloo"}, model={"dtype": "bfloat16"}, optimizer={"offload": "sampling"})
    of_torch, fused = (
        estimate(HF, config, 1, on_gpu=True, transformer_engine=one, fixed_bytes=0) for one in (False, True)
    )
    parameters = RankSizes.of(HF, config, 0).parameters
    assert (of_torch.moment, of_torch.work) == ("optimizer's update", 4 * parameters)
    of_update = of_torch.total - of_torch.work
    assert of_update <= fused.total < of_torch.total and (fused.moment != of_torch.moment or not fused.work)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_replayed_routes_are_counted(on_gpu: bool) -> None:
    """A GPU holds those of one microbatch, which is one sample; the host those of the whole pass."""
    hf = tiny_moe_config(**SIZES | {"num_hidden_layers": 3}).to_dict()

    def activations(replay: bool) -> int:
        model = {"moe_routing_replay": replay}
        return estimated(hf=hf, on_gpu=on_gpu, model=model, algo={"baseline": "rloo"}).activations

    samples = 1 if on_gpu else 4
    assert activations(True) - activations(False) == 2 * hf["num_experts_per_tok"] * 3 * TOKENS * samples


@pytest.mark.parametrize("on_gpu", [False, True])
def test_recorded_tokens_are_counted(on_gpu: bool) -> None:
    """As routes: a GPU holds those of one microbatch, the host those of the whole pass."""

    def activations(top_k: int) -> int:
        return estimated(on_gpu=on_gpu, rollout={"top_k": top_k}, algo={"baseline": "rloo"}).activations

    assert activations(20) - activations(0) == 8 * (20 + TIES) * TOKENS * (1 if on_gpu else 4)


def test_a_reference_model_s_logprobs_are_counted(parallel: Parallel) -> None:
    """Every rank holds those of the whole step."""
    hf_config = tiny_config(**SIZES | {"num_hidden_layers": 1})

    def peak(beta: float) -> tuple[int, int]:
        options = {"algo": {"baseline": "rloo", "kl_coefficient": beta}, **mode("two_pass")}
        config = step_config(TOKENS, prompts=8, **options)
        found = estimate(hf_config.to_dict(), config, 1, fixed_bytes=0)
        return found.total, peak_of_step(hf_config, config, parallel)

    (estimated_with, with_kl), (estimated_without, without) = peak(0.1), peak(0.0)
    weights = RankSizes.of(hf_config.to_dict(), step_config(TOKENS), 0).parameters * 4
    table = estimated_with - estimated_without - weights
    assert with_kl - without - weights == pytest.approx(table, rel=0.1)


def test_transformer_engines_attention_in_fp32_holds_its_probabilities() -> None:
    """It has flash kernels for bf16 alone: there activations grow as the length, in fp32 as its square."""

    def activations(tokens: int, dtype: str) -> int:
        config = step_config(tokens, algo={"baseline": "rloo"}, model={"dtype": dtype})
        return estimate(HF, config, 1, on_gpu=True, transformer_engine=True).activations

    assert activations(8192, "bfloat16") == pytest.approx(2 * activations(4096, "bfloat16"), rel=0.01)
    squares = HF["num_hidden_layers"] * HF["num_attention_heads"] * 4096**2 * 4
    grown = activations(8192, "float32") - 2 * activations(4096, "float32")
    assert grown == pytest.approx(2 * squares, rel=0.01)


def test_a_row_for_everything_that_is_held() -> None:
    found = MemoryEstimate(1, 2, 0, 3, 4, 5, 6, 7, checkpoint=9, fixed=8, stage=0, moment="loss")
    assert found.total == 45 and [num_bytes for _, num_bytes in found.rows()] == [1, 2, 0, 3, 4, 5, 6, 7, 9, 8]
    assert found.table().startswith("45 B on the fullest rank, at the loss: weights 1 B, main grad 2 B, optimizer 3 B")


def test_a_process_counts_without_a_model_on_a_cpu_only() -> None:
    config = step_config(TOKENS)
    assert 0.9 < estimate(HF, config, 1).fixed / resident_bytes() < 1.1
    assert estimate(HF, config, 1, on_gpu=True).fixed == 0


def test_the_longest_samples_are_expected() -> None:
    short, long = estimated(TOKENS), estimated(2 * TOKENS)
    assert 1.9 < long.activations / short.activations < 2.1 and long.weights == short.weights


@pytest.mark.parametrize("packing", ["rows", "packed"])
def test_shorter_samples_that_fill_a_microbatch_are_expected(packing: str) -> None:
    """A bound one token short of two longest samples admits two of nearly that length."""

    def activations(bound: int) -> int:
        parallel = {"packing": packing, "micro_batch_tokens": bound}
        return estimated(algo={"baseline": "rloo"}, parallel=parallel).activations

    one, short, two = (activations(bound) for bound in (TOKENS, 2 * TOKENS - 1, 2 * TOKENS))
    assert short == pytest.approx(two, rel=0.02) and two > 1.5 * one
    assert activations(TOKENS // 2) == one, "a longer sample is a microbatch of its own"


def test_shorter_samples_that_fill_a_window_are_expected() -> None:
    group = step_config(TOKENS).group_size

    def norms(tokens: int) -> int:
        return estimated(prompts=2, algo={"snr": {"num_folds": 1}}, **mode("bookkeep", window_tokens=tokens)).norms

    one, short, two = (norms(tokens) for tokens in (group * TOKENS, 2 * group * TOKENS - 1, 2 * group * TOKENS))
    assert short == pytest.approx(two, rel=0.02) and two > 1.5 * one


def test_buffers_that_are_given_back_are_gone_and_come_back(parallel: Parallel) -> None:
    """The next step allocates them again and gives the same gradient as a step that found them."""
    hf_config, config = tiny_config(**SIZES), step_config(TOKENS, **mode("stash"))
    steps = WatchedSteps(hf_config, config, parallel)
    steps.step(lr=0.0)
    steps.step(lr=0.0)
    kept, peak = steps.live.now, steps.live.peak
    grads = [parameter.main_grad.clone() for _, parameter in steps.policy.named_parameters()]
    steps.gradient.release()
    sizes = RankSizes.of(hf_config.to_dict(), config, 0, on_gpu=False, transformer_engine=False)
    stash = config.group_size * sizes.parameters * sizes.wide  # storages that only change their size are not seen
    assert kept - steps.live.now == pytest.approx(stash, rel=0.01)
    steps.step(lr=0.0)
    assert (steps.live.now, steps.live.peak) == (kept, peak)
    for (name, parameter), grad in zip(steps.policy.named_parameters(), grads, strict=True):
        assert torch.equal(parameter.main_grad, grad) and grad.any(), name


@pytest.mark.parametrize("overlap", ["none", "stream"])
def test_sums_of_folds_end_with_their_step(overlap: str, parallel: Parallel) -> None:
    """They stay until the next step begins, and hold no gradient by then."""
    rollout = {"max_response_tokens": TOKENS - 4, "overlap": overlap}
    config = step_config(TOKENS, prompts=2, rollout=rollout, **mode("two_pass"))
    steps = WatchedSteps(tiny_config(**SIZES), config, parallel)
    steps.step()
    kept = steps.live.now
    steps.gradient.begin(2)
    assert kept - steps.live.now < 1000, "a few scalars"


def test_what_is_kept_between_steps_where_engines_take_turns() -> None:
    """`main_grad` and the buffers of `stash` leave a GPU meanwhile, unless its engine never sleeps or is elsewhere."""

    def kept(rollout: dict[str, Any], *, on_gpu: bool = True) -> int:
        return estimated(on_gpu=on_gpu, **mode("stash"), rollout=rollout).between_steps

    config = step_config(TOKENS, **mode("stash"))
    sizes = RankSizes.of(HF, config, 0, on_gpu=True, transformer_engine=False)
    gradients = (1 + config.group_size) * sizes.parameters * sizes.wide
    assert kept({"sleep_level": 0}) == kept({"servers": ["http://localhost:1"]}) == kept({}) + gradients
    assert kept({}, on_gpu=False) == kept({"sleep_level": 0}, on_gpu=False)


def test_a_checkpoint_in_the_background_is_counted() -> None:
    """On a CPU the next step runs next to a copy of weights and moments; on a GPU the copy is in host memory."""

    def copied(every_steps: int, *, on_gpu: bool = False, **options: bool) -> int:
        return estimated(on_gpu=on_gpu, checkpoint={"every_steps": every_steps, **options}).checkpoint

    found = estimated()
    assert copied(50) == found.weights + found.optimizer > 0
    assert [copied(0), copied(100), copied(50, async_save=False), copied(50, on_gpu=True)] == [0, 0, 0, 0]
