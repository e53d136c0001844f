"""The norm mode of a run by layout, length and memory, and refused modes. Not covered: whether costs are accurate.

Sizes are Qwen3-0.6B's; nothing is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.memory import select_mode
from oblr_megatron.memory.buffer_sizes import BUCKET_BYTES
from oblr_megatron.memory.engine import device_bytes_held, outside_training
from oblr_megatron.memory.pass_plan import Layout, passes_of
from oblr_megatron.memory.peak import PassOnRank
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.memory.select_mode import ModeChoice, cgroup_left, free_memory, resolve, with_mode
from oblr_megatron.preflight.device_memory import RankDevice, rank_memory
from tests.unit.configs import config_with

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MOE = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
PLENTY = 2**45


def config_of(*, response: int = 2000, **sections: dict[str, Any]) -> Config:
    table: dict[str, Any] = {"rollout": {"max_response_tokens": response}, "algo": {"baseline": "optimal"}}
    return config_with(**{"num_prompts": 8, "group_size": 8, "data": {"max_prompt_tokens": 64}} | table | sections)


def choose(config: Config, world_size: int = 1, model: dict[str, Any] = DENSE, **options: Any) -> ModeChoice:
    return resolve(model, config, world_size, **{"free_bytes": PLENTY, **options})


def test_the_default_baseline_has_its_norms_in_the_plain_pass_and_two_with_a_penalty() -> None:
    assert choose(config_of(algo={})).mode == "inline"
    assert choose(config_of(algo={"kl_coefficient": 0.1})).mode == "two_pass"


def test_a_share_of_the_norms_costs_that_share_of_a_pass() -> None:
    whole, some = (choose(config_of(algo={}, gradnorm={"mode": "two_pass", "sample_fraction": s})) for s in (1, 0.25))
    assert some.cost - 1 == pytest.approx((whole.cost - 1) / 4)
    assert choose(config_of(algo={}, gradnorm={"sample_fraction": 0.25})).mode == "two_pass"


def test_estimates_of_fp8_mixtures_are_refused_only_where_exact_norms_check_them() -> None:
    """Where replicas share experts, FP8 layers have no exact norms."""

    def chosen(**gradnorm: Any) -> ModeChoice:
        parallel = {"expert_model_parallel_size": 2}
        fp8 = {"fp8": "hybrid", "dtype": "bfloat16"}
        config = config_of(model=fp8, parallel=parallel, algo={"baseline": "pooled"}, gradnorm=gradnorm)
        return choose(config, 2, MOE, on_gpu=True, transformer_engine=True)

    assert chosen(source="logit").reason.startswith("unused")
    for gradnorm in ({"source": "logit", "check_every": 10}, {"source": "exact"}):
        with pytest.raises(UserError, match="2 replicas share experts, but FP8 layers expose no factors"):
            chosen(**gradnorm)


@pytest.mark.parametrize(("response", "mode"), [(16, "bookkeep"), (2000, "stash"), (8000, "stash")])
def test_auto_depends_on_the_length(response: int, mode: str) -> None:
    choice = choose(config_of(response=response))
    assert choice.mode == mode
    assert f"{response + 64} tokens" in choice.reason and "two_pass" in choice.reason


@pytest.mark.parametrize(("algo", "mode"), [({}, "inline"), ({"baseline": "optimal"}, "bookkeep")])
def test_norms_of_adapters_cost_little_in_one_pass_and_a_step_in_two(algo: dict[str, Any], mode: str) -> None:
    model = {"model": {"path": "unused", "lora": {"rank": 16}}}
    choice = choose(config_of(algo=algo, **model))
    assert choice.mode == mode and choice.cost < 1.1
    assert choose(config_of(gradnorm={"mode": "two_pass"}, **model)).cost == 2.0


def test_gradients_of_adapters_fit_where_factors_do_not() -> None:
    config = config_of(response=8000, model={"path": "unused", "lora": {"rank": 16}})
    total = {mode: choose(with_mode(config, mode)).estimate.total for mode in ("stash", "bookkeep", "two_pass")}
    assert total["stash"] < total["bookkeep"] / 2
    free = outside_training(DENSE, config, 1, PLENTY, on_gpu=False) + 2 * total["stash"]
    assert choose(config, free_bytes=free).mode == "stash"


def test_moved_bytes_cost_more_flops_on_a_gpu() -> None:
    assert choose(config_of(response=700)).mode == "stash"
    assert choose(config_of(response=700), on_gpu=True).mode == "bookkeep"


def test_auto_takes_a_mode_that_fits() -> None:
    choice = choose(config_of(), free_bytes=2**34)
    assert choice.mode == "two_pass"
    assert "8 stashed gradients" in choice.reason and "12.7 GiB are free" in choice.reason  # without the engine


def outside(config: Config, size: int) -> int:
    return outside_training(DENSE, config, 1, size, on_gpu=True)


def test_buckets_of_pushes_to_servers_are_counted() -> None:
    """They stay on the GPU, at the size of the largest tensor: DENSE's embedding in bf16, twice."""
    model = {"dtype": "bfloat16"}
    alone, servers = (
        device_bytes_held(DENSE, config_of(model=model, rollout=rollout), on_gpu=True)
        for rollout in ({"sleep_level": 0}, {"servers": ["http://localhost:1"]})
    )
    assert servers - alone == 2 * max(BUCKET_BYTES, DENSE["vocab_size"] * DENSE["hidden_size"] * 2)
    assert device_bytes_held(DENSE, config_of(), on_gpu=False) == 0


@pytest.mark.parametrize("mode", ["two_pass", "stash"])
def test_fp8_norms_hold_a_second_gradient(mode: str) -> None:
    """FP8 layers have no taps: `main_grad` of their matrices is put aside while norms are measured."""

    def norms(fp8: str) -> int:
        model = {"dtype": "bfloat16", "fp8": fp8}
        config = config_of(model=model, algo={"baseline": "optimal"}, gradnorm={"mode": mode}, response=192)
        run = passes_of(DENSE, config, Layout(1, 1), 256, norms=True, transformer_engine=True)[0]
        sizes = RankSizes.of(DENSE, config, 0, on_gpu=True, transformer_engine=True)
        return PassOnRank(sizes, config, run, sizes.tokens(1, 256), 0, True).waiting()

    sizes = RankSizes.of(DENSE, config_of(), 0, on_gpu=True, transformer_engine=True)
    assert norms("hybrid") - norms("none") == sizes.layer_weights * 4


@pytest.mark.parametrize("rollout", [{}, {"sleep_level": 0}, {"servers": ["http://localhost:1"]}])
def test_a_gpu_is_shared_with_a_context_and_a_sleeping_engine(rollout: dict[str, Any]) -> None:
    """The bound is the one of the dry run: what a mode needs, the context and the sleeping engine."""
    config = config_of(rollout={"max_response_tokens": 2000} | rollout, gradnorm={"mode": "stash"})
    device = 10**11
    free = device - outside(config, device)
    ranks = rank_memory(DENSE, config, 1, RankDevice(on_gpu=True, num_bytes=device, transformer_engine=False))
    needed = choose(config, on_gpu=True).estimate.total
    assert ranks[0].training - device == needed - free
    least = next(gb for gb in range(1, 999) if needed <= (size := gb * 10**9) - outside(config, size))
    assert choose(config, on_gpu=True, free_bytes=least * 10**9).mode == "stash"
    with pytest.raises(UserError, match="mode 'stash'"):
        choose(config, on_gpu=True, free_bytes=(least - 1) * 10**9)


@pytest.mark.parametrize("world_size", [1, 2])
def test_more_memory_of_a_cpu_never_makes_a_run_impossible(world_size: int) -> None:
    """Ranks and engines share the memory: a mode that "auto" takes also fits by the count of the dry run."""
    few = {"algo": {"baseline": "optimal"}, "parallel": {"micro_batch_tokens": 512}, "group_size": 2}
    config = config_of(response=512, **few)  # type: ignore[arg-type]
    fits, modes = [], set()
    for gb in range(16, 48, 2):
        choice = choose(config, world_size, free_bytes=gb * 10**9)
        device = RankDevice(on_gpu=False, num_bytes=gb * 10**9, transformer_engine=False)
        ranks = rank_memory(DENSE, with_mode(config, choice.mode), world_size, device)
        fits.append(ranks[0].peak <= gb * 10**9)
        modes.add(choice.mode)
    assert fits == sorted(fits) and True in fits and len(modes) > 1


def test_auto_prefers_filled_pipelines() -> None:
    """The 2 samples of a prompt do not fill 4 stages; bookkeep runs all samples between two flushes."""
    parallel = {"pipeline_model_parallel_size": 4, "micro_batch_tokens": 2064}
    config = config_of(parallel=parallel, gradnorm={"window_tokens": 10**6}).model_copy(update={"group_size": 2})
    assert choose(config, 4).mode == "bookkeep"


@pytest.mark.parametrize(
    "sections", [{"algo": {"baseline": "rloo"}}, {"gradnorm": {"source": "length"}}, {"gradnorm": {"source": "logit"}}]
)
def test_runs_that_need_no_norms_say_so(sections: dict[str, Any]) -> None:
    assert "unused" in choose(config_of(**sections)).reason


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"algo": {"kl_coefficient": 0.1}}, "KL penalty"),
        ({"model": {"path": "m", "moe_z_loss_coeff": 0.1}}, "router losses"),
    ],
)
def test_auto_takes_two_passes_if_one_number_cannot_scale_a_sample(sections: dict[str, Any], why: str) -> None:
    choice = choose(config_of(**sections, gradnorm={"always": True}))
    assert choice.mode == "two_pass" and why in choice.reason


def test_auto_if_replicas_share_experts() -> None:
    shared = config_of(parallel={"expert_model_parallel_size": 2})
    assert choose(shared, 2, MOE).mode == "two_pass"
    assert "2 replicas share experts" in choose(shared, 2, MOE).reason


REFUSED: list[tuple[dict[str, Any], dict[str, Any], int, dict[str, Any], str]] = [
    (DENSE, {"gradnorm": {"mode": "stash"}}, 1, {"free_bytes": 2**34}, "8 stashed gradients take 17.8 GiB"),
    (DENSE, {"gradnorm": {"mode": "bookkeep"}}, 1, {"free_bytes": 2**34}, "factors of 65536 tokens"),
    (MOE, {"gradnorm": {"mode": "stash"}, "parallel": {"expert_model_parallel_size": 2}}, 2, {}, "share experts"),
    (MOE, {"gradnorm": {"mode": "bookkeep"}, "parallel": {"expert_model_parallel_size": 2}}, 2, {}, "share experts"),
]


@pytest.mark.parametrize(("model", "sections", "world_size", "options", "what"), REFUSED)
def test_impossible_modes_are_refused_with_the_number(
    model: dict[str, Any], sections: dict[str, Any], world_size: int, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        choose(config_of(**sections), world_size, model, **options)
    assert caught.value.where == "config: gradnorm.mode"


def test_two_passes_are_no_advice_where_they_need_more() -> None:
    """They take several samples at a time, so that their activations can exceed four stashed gradients."""
    few = {"parallel": {"micro_batch_tokens": 8192}, "group_size": 4, "checkpoint": {"every_steps": 0}}
    config = config_of(response=1984, **few)  # type: ignore[arg-type]
    total = {m: choose(with_mode(config, m)).estimate.total for m in ("stash", "two_pass")}
    assert total["stash"] < total["two_pass"]
    with pytest.raises(UserError, match="mode 'stash'") as caught:
        choose(with_mode(config, "stash"), free_bytes=total["stash"] - 2**30)
    assert caught.value.fix == "lower parallel.micro_batch_tokens and use mode two_pass"
    alone = config_of(response=1984, **few | {"parallel": {"micro_batch_tokens": 2048}})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="mode 'stash'") as caught:
        choose(with_mode(alone, "stash"), free_bytes=2**34)
    assert caught.value.fix == "use mode two_pass"


def test_a_possible_mode_is_kept() -> None:
    for mode in ("two_pass", "stash", "bookkeep"):
        assert choose(config_of(gradnorm={"mode": mode})).mode == mode


def test_free_memory_is_shared_by_the_ranks_of_a_machine() -> None:
    whole, half = free_memory(1), free_memory(2)
    assert whole is not None and half is not None and 0.4 * whole < half < 0.6 * whole


@pytest.mark.parametrize("version", [1, 2])
def test_a_jobs_own_limit_bounds_its_memory(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of the job, above the step of this process. Files that it has read count as free."""
    top, limit, use, cache = {
        1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("", "memory.max", "memory.current", "inactive_file"),
    }[version]
    job = tmp_path / "sys/fs/cgroup" / top / "slurm/job_5"
    (job / "step_0").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    group = "4:cpuset:/other\n9:memory:/slurm/job_5/step_0\n" if version == 1 else "0::/slurm/job_5/step_0\n"
    (tmp_path / "proc/self/cgroup").write_text(group)
    assert cgroup_left(tmp_path) is None
    for directory, most, used, kept in ((job, "8000", 3000, 500), (job / "step_0", "max", 2000, 400)):
        (directory / limit).write_text(f"{most}\n")
        (directory / use).write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"anon 7\n{cache} {kept}\n")
    assert cgroup_left(tmp_path) == 8000 - 3000 + 500
    monkeypatch.setattr(select_mode, "cgroup_left", lambda: 5500)
    assert free_memory(2) == 2750
