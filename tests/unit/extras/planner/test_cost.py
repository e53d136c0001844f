"""The cost model against sums by hand, and consequences of its formulas.

Not covered: whether its constants describe a GPU. `study scaling` compares it with measured steps on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oblr_megatron.extras.planner.constants import Constants, PlannerMachine
from oblr_megatron.extras.planner.cost import predict
from oblr_megatron.extras.planner.exchange import Links
from oblr_megatron.extras.planner.sampling_cost import push_phase, rollout_phase
from oblr_megatron.extras.planner.setting import Setting
from oblr_megatron.extras.planner.stage import Stage
from oblr_megatron.extras.planner.training_cost import log_prob_phase, training_phases
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.observe.performance.hardware import Device, device_named
from tests.unit.extras.planner.settings import run_config, setting

PLAIN = Constants(
    product=1.0,
    half_tokens=0.0,
    half_width=0.0,
    attention=1.0,
    memory=1.0,
    link=1.0,
    message_s=0.0,
    node_message_s=0.0,
    layer_s=0.0,
    mixture_s=0.0,
    run_s=0.0,
    step_s=0.0,
    decode=1.0,
    decode_step_s=0.0,
    rollout=1.0,
    prefill=1.0,
)
ROUND = Device("round", 1000.0, 2000.0, 100, 1000, 100, 10, 8)  # 1e15 FLOP/s, 1e12 bytes/s, 1e11 and 1e10 of links
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def training(found: Setting) -> float:
    return sum(phase.seconds for phase in training_phases(found).values())


def stage(config: Any, constants: Constants = PLAIN, model: str = "Qwen3-8B", world_size: int = 1) -> Stage:
    machine = PlannerMachine(ROUND, constants)
    hf = setting(world_size, model=model).hf_config
    return Stage(RankSizes.of(hf, config, 0), config, Links.of(machine, config.parallel, world_size), machine)


def test_products_are_the_flops_over_the_peak() -> None:
    found = stage(run_config())
    weights = 4096 * (6144 + 4096 + 3 * 12288) * 36 + 4096 * 151936
    assert found.forward(found.sizes.tokens(1, 2048))["products"] == pytest.approx(2 * 2048 * weights / 1e15)


def test_efficiency_halves_at_its_half_sizes() -> None:
    slow = stage(run_config(), replace(PLAIN, half_tokens=2048.0, half_width=1024.0))
    assert slow.product(2048, 4096, 1024) == pytest.approx(4 * stage(run_config()).product(2048, 4096, 1024))


def test_attention_counts_half_of_all_pairs_and_the_rest_moved_bytes() -> None:
    found = stage(run_config())
    terms = found.layers(found.sizes.tokens(2, 100))
    assert terms["attention"] == pytest.approx(36 * 2 * 4 * 4096 * 100 * 101 / 2 / 1e15)
    moved = 200 * (8 * 4096 + 4 * 6144 + 3 * 12288) * 2
    assert terms["elementwise"] == pytest.approx(36 * moved / 1e12)


def test_collectives_of_a_layer_by_hand() -> None:
    found = stage(run_config(**TP2), world_size=2)
    terms = found.layers(found.sizes.tokens(1, 2048))
    gather = 0.5 * 2048 * 4096 * 2 / 1e11
    assert terms["tensor"] == pytest.approx(36 * 4 * gather)
    backward = found.backward(found.sizes.tokens(1, 2048))["tensor"]
    assert backward == pytest.approx(1.5 * found.forward(found.sizes.tokens(1, 2048))["tensor"])


def test_a_mixtures_layer_gathers_over_tensor_ranks_for_its_attention_alone() -> None:
    """megatron-core's dispatcher gathers over the ranks that share an expert, and nothing else."""
    for sizes, sent in (((2, 1), 1024 * 8), ((1, 2), 1024 * 2 * 8)):
        split: dict[str, Any] = dict(
            zip(("expert_model_parallel_size", "expert_tensor_parallel_size"), sizes, strict=True)
        )
        found = stage(run_config(**TP2, **split), model="Qwen3-30B-A3B", world_size=2)
        terms = found.layers(found.sizes.tokens(1, 2048))
        assert terms["tensor"] == pytest.approx(48 * 2 * 0.5 * 2048 * 2048 * 2 / 1e11)
        assert terms["experts"] == pytest.approx(48 * 2 * 0.5 * sent * 2048 * 2 / 1e11)


@pytest.mark.parametrize(
    ("mode", "baseline", "rows"),
    [("inline", "pooled", 1), ("inline", "pooled", 2), ("bookkeep", "optimal", 1), ("stash", "optimal", 1)],
)
def test_ranks_that_share_a_sequence_sum_each_samples_gradient(mode: str, baseline: str, rows: int) -> None:
    sections: dict[str, dict[str, Any]] = {
        "gradnorm": {"mode": mode},
        "algo": {"baseline": baseline, "snr": {"num_folds": 1}},
    }
    sizes = {"context_parallel_size": 2, "micro_batch_tokens": 2048 * rows}
    found = training_phases(setting(2, sections, machine=PlannerMachine(ROUND, PLAIN), **sizes))
    matrices = RankSizes.of(setting(2).hf_config, run_config(sections, **sizes), 0).matrices
    summed = 128 * 0.5 * 4 * sum(p * d * count for p, d, count in matrices) / 1e11
    assert found["norms"].terms["context"] == pytest.approx(summed)
    if mode == "inline":  # several samples of a microbatch have their products formed again
        again = found["gradient"].terms["products"] / 3 if rows > 1 else 0.0
        assert found["norms"].terms.get("products", 0.0) == pytest.approx(again)


def test_copies_of_experts_are_summed_for_each_sample() -> None:
    sections = {"algo": {"baseline": "pooled", "snr": {"num_folds": 1}}, "gradnorm": {"mode": "two_pass"}}
    machine, copies = PlannerMachine(ROUND, PLAIN), TP2 | {"expert_tensor_parallel_size": 1}
    found = training_phases(setting(2, sections, machine=machine, model="Qwen3-30B-A3B", **copies))
    experts = 48 * 128 * 3 * 768 * 2048 * 4
    assert found["norms"].terms["context"] == pytest.approx(128 * 0.5 * experts / 1e11)
    assert found["gradient"].terms["context"] == pytest.approx(2 * 0.5 * experts / 1e11)  # of the one fold
    shared = training_phases(setting(2, sections, machine=machine, model="Qwen3-30B-A3B", **TP2))
    assert shared["norms"].terms.get("context", 0.0) == shared["gradient"].terms["context"] == 0


def test_energies_of_logits_cost_a_forward_pass_unless_the_gradient_pass_gives_them() -> None:
    def phases(**options: Any) -> Any:
        gradnorm = {"mode": "two_pass", "source": options.pop("source", "logit")}
        algo = {"baseline": "pooled", "snr": {"num_folds": 1}} | options
        found = setting(1, {"gradnorm": gradnorm, "algo": algo}, machine=PlannerMachine(ROUND, PLAIN))
        return training_phases(found)["norms"].terms.get("products", 0.0), log_prob_phase(found).terms["products"]

    norms, forward = phases(baseline="optimal")
    assert norms == pytest.approx(forward) and forward > 0
    assert phases()[0] == phases(baseline="optimal", source="length")[0] == 0


def test_groups_beyond_a_node_use_the_links_between_nodes() -> None:
    machine = PlannerMachine(ROUND, replace(PLAIN, message_s=1.0, node_message_s=3.0))
    near = Links(machine, tp=2, cp=1, dp=4, pp=1, ep=1, etp=1)
    far = Links(machine, tp=2, cp=1, dp=8, pp=1, ep=1, etp=1)
    assert near.data(1e11) == pytest.approx(0.75 + 2 * 1.0)
    assert far.data(1e11) == pytest.approx(7 / 8 * 10 / 4 + 2 * 1.0 + 3.0)  # four ranks and cards a node, two nodes
    alone = Links(machine, tp=8, cp=1, dp=2, pp=1, ep=1, etp=8)
    assert alone.data(1e11) == pytest.approx(0.5 * 10 + 3.0)  # one rank a node
    wide = Links(machine, tp=1, cp=16, dp=1, pp=1, ep=1, etp=1)
    assert wide.context(1e11) == pytest.approx(15 / 16 * 10 / 8 + 3 * 1.0 + 3.0)
    assert wide.ring(1e11) == pytest.approx(15 / 16 * 10 + 3 * 1.0 + 3.0)  # the last rank of a node sends alone
    quick = replace(wide, machine=replace(machine, device=replace(ROUND, inter_node_gb_s=50)))
    assert quick.context(1e11) == pytest.approx(15 / 16 + 3 * 1.0 + 3.0)  # the cards together are faster than the node
    assert near.tensor(1e11) == far.tensor(1e11) == pytest.approx(0.5 + 1.0)
    assert replace(near, tp=1).tensor(1e11) == 0


def test_an_all_to_all_uses_the_links_of_a_node_and_those_between_nodes_at_once() -> None:
    """ROUND has 8 GPUs a node, 100 GB/s within and 10 GB/s between nodes."""
    machine = PlannerMachine(ROUND, replace(PLAIN, message_s=1.0, node_message_s=3.0))
    near = Links(machine, tp=1, cp=1, dp=8, pp=1, ep=8, etp=1)
    far = Links(machine, tp=1, cp=1, dp=16, pp=1, ep=16, etp=1)
    assert near.expert(1e11) == pytest.approx(7 / 8 + 3 * 1.0)
    assert far.expert(1e11) == pytest.approx(8 / 16 * 10 + 3 * 1.0 + 3.0)
    once = replace(far, machine=replace(machine, constants=replace(machine.constants, node_copies=0.02)))
    assert once.expert(1e11) == pytest.approx(7 / 16 + 3 * 1.0 + 3.0)  # now the node's own links are the slower part
    assert replace(far, etp=2, ep=8).expert(1e11) == pytest.approx(4 / 8 * 10 + 2 * 1.0 + 3.0)
    assert replace(near, ep=1).expert(1e11) == 0


def test_a_pipeline_of_equal_stages_idles_for_pp_minus_one_microbatches() -> None:
    """16 microbatches; a tiny vocabulary keeps the head small, so that the stages are equal."""
    hf = dict(setting(1).hf_config) | {"vocab_size": 128}
    machine = PlannerMachine(replace(ROUND, intra_node_gb_s=1e9), PLAIN)
    config = run_config({"algo": {"baseline": "rloo", "snr": {"num_folds": 8}}}, pipeline_model_parallel_size=4)
    terms = training_phases(Setting(hf, config, 4, machine))["gradient"].terms
    busy = terms["products"] + terms["attention"] + terms["elementwise"]
    assert terms["pipeline"] / busy == pytest.approx(3 / 16, rel=0.01)


def test_ranks_share_cores_and_use_those_of_idle_stages() -> None:
    """Four ranks take twice as long on two cores as on four; on two cores the pipeline has no bubble."""
    config = run_config({"algo": {"baseline": "rloo", "snr": {"num_folds": 4}}})
    hf = setting(1).hf_config
    two, four = (PlannerMachine(ROUND, PLAIN, cores=cores) for cores in (2, 4))
    assert training(Setting(hf, config, 4, two)) == pytest.approx(2 * training(Setting(hf, config, 4, four)))
    deep = run_config(pipeline_model_parallel_size=4)
    assert training_phases(Setting(hf, deep, 4, four))["gradient"].terms["pipeline"] > 0
    assert training_phases(Setting(hf, deep, 4, two))["gradient"].terms["pipeline"] == pytest.approx(
        2 * (128 + 3) * 2048 * 4096 * 2 / 1e11
    )
    assert [two.stretch(ranks) for ranks in (1, 2, 4)] == [1.0, 1.0, 2.0]


def test_costs_of_norm_modes_match_select_mode() -> None:
    """With products alone: two_pass (2 + r) / 3 of a gradient, bookkeep r / 3, stash moved bytes, inline nothing."""
    from oblr_megatron.memory.select_mode import BYTES_MOVED, norm_over_product

    alone = replace(PLAIN, attention=1e9, memory=1e9)
    machine, ratio = PlannerMachine(ROUND, alone), norm_over_product(setting(1).hf_config, 2048)

    def phases(mode: str, baseline: str = "optimal", **options: float) -> Any:
        sections: dict[str, dict[str, Any]] = {
            "gradnorm": {"mode": mode, **options},
            "algo": {"baseline": baseline, "snr": {"num_folds": 1}},
        }
        return training_phases(setting(1, sections, machine=machine))

    gradient = phases("two_pass")["gradient"].terms["products"]
    assert phases("two_pass")["norms"].terms["products"] == pytest.approx((2 + ratio) / 3 * gradient)
    some = phases("two_pass", "pooled", sample_fraction=0.25)["norms"].terms["products"]
    assert some == pytest.approx((2 + ratio) / 12 * gradient)
    assert phases("inline", "pooled")["norms"].seconds == 0
    assert phases("bookkeep")["norms"].terms["products"] == pytest.approx(ratio / 3 * gradient)
    parameters = RankSizes.of(setting(1).hf_config, run_config(), 0).parameters
    moved = BYTES_MOVED * parameters * 128 / 1e21
    assert phases("stash")["norms"].seconds == pytest.approx(moved)
    assert training_phases(setting(1, machine=machine))["norms"].seconds == 0


@pytest.mark.parametrize(("model", "tokens_of_mlp"), [("Qwen3-8B", 1), ("Qwen3-30B-A3B", 8)])
def test_adapters_leave_out_the_gradients_of_the_weights(model: str, tokens_of_mlp: int) -> None:
    """Two of three products with W, three with A and B; a second pass costs the same again; only A and B are moved."""
    machine = PlannerMachine(ROUND, replace(PLAIN, attention=1e9, memory=1e9))

    def phases(mode: str, **model_options: Any) -> Any:
        sections: dict[str, dict[str, Any]] = {
            "gradnorm": {"mode": mode},
            "algo": {"baseline": "optimal", "snr": {"num_folds": 1}},
            "model": model_options,
        }
        found = setting(1, sections, machine=machine, model=model)
        return training_phases(found), RankSizes.of(found.hf_config, found.config, 0)

    (plain, _), (lora, sizes) = phases("two_pass"), phases("two_pass", lora={"rank": 16})
    gradient, terms = plain["gradient"].terms["products"], lora["gradient"].terms
    assert terms["products"] == pytest.approx(2 / 3 * gradient)
    dense = sum(outputs + inputs for outputs, inputs, of_experts in sizes.adapted_matrices if not of_experts)
    mlp = sum(outputs + inputs for outputs, inputs, of_experts in sizes.adapted_matrices if of_experts)
    forward = 2 * 128 * 2048 * 16 * sizes.layers * (dense + tokens_of_mlp * mlp) / 1e15
    assert terms["adapters"] == pytest.approx(3 * forward)
    norms = lora["norms"].terms
    assert (norms["products"], norms["adapters"]) == pytest.approx((terms["products"], terms["adapters"]))
    assert phases("bookkeep", lora={"rank": 16})[0]["norms"].seconds == pytest.approx(forward)
    moved = lora["optimizer"].terms["memory"] / plain["optimizer"].terms["memory"]
    assert moved == pytest.approx(sizes.adapter_parameters / sizes.parameters)


def test_offloaded_state_crosses_the_hosts_link_twice() -> None:
    machine = PlannerMachine(ROUND, replace(PLAIN, host_gb_s=10.0))
    parameters = RankSizes.of(setting(1).hf_config, run_config(), 0).parameters
    for ranks, options in ((1, {}), (4, {"use_distributed_optimizer": True})):
        stays, moves = (
            training_phases(
                setting(
                    ranks,
                    {"optimizer": {"offload": offload}, "algo": {"snr": {"num_folds": 4}}},
                    machine=machine,
                    **options,
                )
            )["optimizer"]
            for offload in ("none", "sampling")
        )
        added = moves.seconds - stays.seconds
        assert moves.terms["offload"] == pytest.approx(added) == pytest.approx(2 * 12 * parameters / ranks / 1e10)


def test_updates_of_a_batch_repeat_all_but_the_samples_and_the_offload() -> None:
    """Four updates: the same products, log pi_old of three quarters, and fold sums and optimizer four times."""
    machine = PlannerMachine(ROUND, replace(PLAIN, host_gb_s=10.0))
    offload = {"offload": "sampling"}
    sections: tuple[dict[str, Any], ...] = ({}, {"updates_per_batch": 4})
    one, four = (
        setting(
            1, {"algo": {"baseline": "rloo", "snr": {"num_folds": 1}} | more, "optimizer": offload}, machine=machine
        )
        for more in sections
    )
    (gradient, update), (gradients, updates) = (
        [training_phases(found)[name].terms for name in ("gradient", "optimizer")] for found in (one, four)
    )
    forward = log_prob_phase(one).terms
    assert log_prob_phase(four).terms == pytest.approx(forward)
    assert gradients["products"] == pytest.approx(gradient["products"] + 0.75 * forward["products"])
    folds = 20 * RankSizes.of(one.hf_config, one.config, 0).parameters / 1e12
    assert gradients["memory"] - gradient["memory"] == pytest.approx(3 * folds)
    assert updates["memory"] == pytest.approx(4 * update["memory"])
    assert updates["offload"] == pytest.approx(update["offload"])


def test_the_distributed_optimizer_divides_the_update_and_gathers_the_weights() -> None:
    machine = PlannerMachine(ROUND, PLAIN)
    parameters = RankSizes.of(setting(1).hf_config, run_config(), 0).parameters
    whole, shared = (
        training_phases(setting(4, {"algo": {"snr": {"num_folds": 4}}}, machine=machine, use_distributed_optimizer=on))
        for on in (False, True)
    )
    assert whole["optimizer"].terms["memory"] == pytest.approx(34 * parameters / 1e12)
    assert shared["optimizer"].terms["memory"] == pytest.approx(34 * parameters / 4 / 1e12)
    assert shared["optimizer"].terms["data"] == pytest.approx(0.75 * 2 * parameters / 1e11)
    assert whole["gradient"].terms["data"] == pytest.approx(2 * shared["gradient"].terms["data"])


FOLDS: dict[str, dict[str, Any]] = {
    "algo": {"baseline": "optimal", "snr": {"num_folds": 16}},
    "gradnorm": {"mode": "two_pass"},
}
LAYOUTS: tuple[dict[str, Any], ...] = ({}, TP2, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_more_replicas_and_better_devices_are_not_slower(layout: dict[str, Any]) -> None:
    times = [training(setting(gpus, FOLDS, **layout)) for gpus in (2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)
    found = setting(8, FOLDS, **layout)
    for better in ("bf16_tflops", "memory_gb_s", "intra_node_gb_s", "inter_node_gb_s"):
        device = replace(found.machine.device, **{better: 2 * getattr(found.machine.device, better)})
        assert predict(replace(found, machine=PlannerMachine(device))).seconds <= predict(found).seconds


def test_recomputation_longer_samples_and_more_of_them_cost_time() -> None:
    plain = training(setting(8, FOLDS))
    assert training(setting(8, FOLDS, recompute_granularity="full")) > 1.2 * plain
    assert training(setting(8, FOLDS, recompute_granularity="selective")) > plain
    longer: dict[str, dict[str, Any]] = FOLDS | {"rollout": {"max_response_tokens": 3072}}
    assert training(setting(8, longer)) > 1.5 * plain
    assert training(replace(setting(8, FOLDS), mean_response_tokens=512)) < plain


@pytest.mark.parametrize(
    ("model", "module", "terms"),
    [
        ("Qwen3-8B", "core_attn", {"attention": 0.28}),  # backward has 2.5 times the products of a causal forward
        ("Qwen3-8B", "mlp", {"products": 0.2}),
        ("Qwen3-8B", "layernorm", {"elementwise": 0.04}),
        ("Qwen3-30B-A3B", "moe", {"products": 0.15, "experts": 0.3}),
        ("Qwen3-30B-A3B", "moe_act", {"elementwise": 0.04}),
    ],
)
def test_a_recomputed_module_runs_forward_once_more(model: str, module: str, terms: dict[str, float]) -> None:
    """Shares of the gradient's terms, of which forward is a third: at least these, and at most that third."""
    keys: dict[str, Any] = {"recompute_granularity": "selective"}
    without, with_it = (
        training_phases(setting(8, FOLDS, model=model, **more))["gradient"].terms
        for more in ({}, keys | {"recompute_modules": [module]})
    )
    changed = {name: with_it[name] / without[name] - 1 for name in with_it if with_it[name] > 1.0001 * without[name]}
    assert terms.keys() <= changed.keys() <= terms.keys() | {"elementwise"}
    for name, share in terms.items():
        assert share * 0.999 <= changed[name] <= 1 / 2, name


def test_the_routing_of_experts_costs_time_for_any_number_of_tokens() -> None:
    experts: dict[str, Any] = {"expert_model_parallel_size": 8}
    small, large = (
        training_phases(setting(8, model="Qwen3-30B-A3B", **experts | {"micro_batch_tokens": tokens}))
        for tokens in (2048, 8192)
    )
    assert small["gradient"].terms["experts"] > 2 * large["gradient"].terms["experts"]
    assert small["gradient"].bound_by == "experts"


def test_mfu_is_below_one_and_tokens_are_counted_once() -> None:
    found = predict(setting(8, FOLDS))
    assert 0 < found.mfu < 0.5 and found.setting.tokens == 128 * 2048
    assert found.tokens_per_s == pytest.approx(128 * 2048 / found.seconds / 8)
    assert found.bound_by.split(":")[0] in found.phases


@pytest.mark.parametrize(("users", "prompt", "milliseconds"), [(1, 128, 6.86), (256, 128, 18.08), (40, 2048, 13.25)])
def test_published_seconds_of_a_decoding_step(users: int, prompt: int, milliseconds: float) -> None:
    """vLLM 0.30 on an H100: medians between tokens, of 1,024 or 2,048 (source: tools/bench/planner_rows.py)."""
    response = 1024 if prompt == 128 else 2048
    rollout = {"max_response_tokens": response, "max_num_seqs": users, "gpu_memory_utilization": 0.9}
    machine = PlannerMachine(device_named("h100"), Constants(rollout=1.0))
    one = setting(1, {"data": {"max_prompt_tokens": prompt}, "rollout": rollout}, machine=machine)
    one = replace(one, config=one.config.model_copy(update={"num_prompts": users, "group_size": 1}))
    terms = rollout_phase(one).terms
    decoding = sum(terms[name] for name in ("weights read", "KV cache read", "products", "tensor", "scheduler"))
    assert decoding / response == pytest.approx(milliseconds / 1e3, rel=0.06)


def test_decoding_reads_weights_and_cache_once_a_step() -> None:
    """One wave of 16 sequences of equal length per engine: 1536 steps."""
    machine = PlannerMachine(ROUND, PLAIN)
    found = rollout_phase(setting(8, machine=machine)).terms
    weights = 2 * 8_190_735_360
    assert found["weights read"] == pytest.approx(1536 * weights / 1e12, rel=0.01)
    cache = 16 * (512 + 1536 / 2) * 2 * 36 * 1024 * 2
    assert found["KV cache read"] == pytest.approx(1536 * cache / 1e12)
    assert found["longest response"] == 0
    short = rollout_phase(replace(setting(8, machine=machine), mean_response_tokens=768)).terms
    assert short["weights read"] == pytest.approx(found["weights read"] / 2) and short["longest response"] > 0


def test_speculation_shortens_the_longest_response_alone() -> None:
    """6 drafts of chance 1/2 gain 2 - 1/64 tokens a step; a dense model reads its weights once for all of them."""
    plain, half, never = (
        rollout_phase(replace(setting(8, machine=PlannerMachine(ROUND, PLAIN)), mean_response_tokens=768, **more)).terms
        for more in ({}, {"speculation_acceptance": 0.5}, {"speculation_acceptance": 0.0})
    )
    assert never == plain
    assert plain["longest response"] / half["longest response"] == pytest.approx(2 - 1 / 64, rel=0.01)
    assert {name: plain[name] for name in plain if name != "longest response"} == {
        name: half[name] for name in half if name != "longest response"
    }


def test_a_mixture_gains_less_from_speculation_because_drafts_read_more_experts() -> None:
    ratios = []
    for model in ("Qwen3-8B", "Qwen3-30B-A3B"):
        base = replace(setting(64, model=model, machine=PlannerMachine(ROUND, PLAIN)), mean_response_tokens=256)
        found = [rollout_phase(replace(base, speculation_acceptance=p)).terms["longest response"] for p in (0.0, 0.8)]
        ratios.append(found[0] / found[1])
    assert ratios[0] > ratios[1] >= 1


def test_more_sequences_than_an_engine_takes_make_waves() -> None:
    machine = PlannerMachine(ROUND, PLAIN)
    one = rollout_phase(setting(8, {"rollout": {"max_num_seqs": 16}}, machine=machine)).terms["weights read"]
    two = rollout_phase(setting(8, {"rollout": {"max_num_seqs": 8}}, machine=machine)).terms["weights read"]
    assert two == pytest.approx(2 * one)


def test_an_fp8_engine_reads_less_and_experts_are_read_only_if_needed() -> None:
    plain = rollout_phase(setting(8)).terms["weights read"]
    quantized = rollout_phase(setting(8, {"rollout": {"quantization": "fp8"}})).terms["weights read"]
    assert 0.5 < quantized / plain < 0.6
    few, many = (
        rollout_phase(setting(8, {"rollout": {"max_num_seqs": seqs}}, model="Qwen3-30B-A3B")).terms["weights read"]
        for seqs in (1, 16)
    )
    assert many < 16 * few and few * 16 / many > 1.5  # a step of 16 reads more than one of 1, but not 16 times


def test_a_push_gathers_the_parts_of_other_ranks() -> None:
    machine = PlannerMachine(device_named("h100"), PLAIN)
    assert push_phase(setting(8, machine=machine)).terms["gather"] == 0
    halves = push_phase(setting(8, machine=machine, **TP2)).terms["gather"]
    assert halves == pytest.approx(0.5 * 2 * 8_190_735_360 / 450e9)
