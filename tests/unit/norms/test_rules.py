"""The kind of every parameter of a real megatron-core model, and the parameters that are refused.

The model is built on one rank. Its attributes are those of several ranks, except `sequence_parallel`, which the tests
set. tests/distributed compares the rules with the oracle. Not covered: Transformer Engine's modules.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.errors import UserError
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.norms.rules import Kind, Rule, classify, untapped_aside
from tests.tiny import tiny_config, tiny_moe_config

SHARDS = ("word_embeddings", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")
HEAD_NORMS = ("q_layernorm", "k_layernorm")
NORMS = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm")


@pytest.fixture
def policy():
    parallel = initialize(ParallelConfig())
    yield build_policy(tiny_config(), ModelConfig(path="."), parallel)
    shutdown()


@pytest.fixture
def model(policy):
    return policy.modules[0]


def rules_of(policy, *, tp_size=2, sequence_parallel=False):
    parallel = replace(policy.parallel, tp_size=tp_size, sequence_parallel=sequence_parallel)
    return classify(replace(policy, parallel=parallel))


def kinds(policy, **layout):
    return {rule.name: rule.kind for rule in rules_of(policy, **layout)}


def names_of(table, kind):
    return {name for name, found in table.items() if found is kind}


def names_with(model, parts):
    return {name for name, _ in model.named_parameters() if any(part in name for part in parts)}


def test_every_parameter_has_one_rule(policy, model):
    rules = rules_of(policy)
    assert [rule.name for rule in rules] == [name for name, _ in model.named_parameters()]
    assert len(rules) == 2 + 2 * 8 + 1  # embedding and head, eight a layer, final norm


def test_without_sequence_parallel_only_head_norms_are_partial(policy, model):
    table = kinds(policy)
    assert names_of(table, Kind.SHARD) == names_with(model, SHARDS)
    assert names_of(table, Kind.PARTIAL) == names_with(model, HEAD_NORMS)
    assert names_of(table, Kind.COPY) == names_with(model, NORMS)


def test_with_sequence_parallel_all_norms_are_partial(policy, model):
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.sequence_parallel = True
    table = kinds(policy, sequence_parallel=True)
    assert names_of(table, Kind.SHARD) == names_with(model, SHARDS)
    assert names_of(table, Kind.PARTIAL) == names_with(model, (*HEAD_NORMS, *NORMS))
    # With the attribute but without a split sequence it is a copy: megatron does not reduce it either.
    assert names_of(kinds(policy), Kind.COPY) == names_with(model, NORMS)


def test_on_one_rank_nothing_is_partial(policy):
    assert Kind.PARTIAL not in kinds(policy, tp_size=1).values()


def test_tied_are_embedding_and_output_layer_of_a_tied_model(policy, model):
    assert not any(rule.tied for rule in rules_of(policy))
    model.share_embeddings_and_output_weights = True
    assert {r.name for r in rules_of(policy) if r.tied} == {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_untapped_parameters_are_marked(policy, model):
    assert all(rule.tapped for rule in rules_of(policy))
    policy.tap.weights.discard(id(model.decoder.final_layernorm.weight))
    assert [rule.name for rule in rules_of(policy) if not rule.tapped] == ["decoder.final_layernorm.weight"]


def test_frozen_parameters_need_no_attributes(policy, model):
    model.decoder.adapter = torch.nn.Linear(3, 3)
    model.decoder.adapter.requires_grad_(False)
    table = kinds(policy)
    assert names_of(table, Kind.FROZEN) == {"decoder.adapter.weight", "decoder.adapter.bias"}


def test_a_parameter_without_attributes_is_refused_by_name(policy, model):
    model.decoder.layers[1].mlp.adapter = torch.nn.Linear(3, 3, bias=False)
    with pytest.raises(UserError, match=r"'decoder\.layers\.1\.mlp\.adapter\.weight'") as error:
        kinds(policy)
    assert error.value.where == "gradnorm"


@pytest.mark.parametrize(
    ("mark", "value"), [("allreduce", False), ("average_gradients_across_tp_domain", True)], ids=["expert", "averaged"]
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_parameter_with_conflicting_attributes_is_refused(policy, model, mark, value, tp_size):
    setattr(model.decoder.layers[0].mlp.linear_fc1.weight, mark, value)
    with pytest.raises(UserError, match=r"decoder\.layers\.0\.mlp\.linear_fc1\.weight"):
        kinds(policy, tp_size=tp_size)


def test_a_shared_parameter_is_listed_once(policy, model):
    model.decoder.again = model.decoder.layers[0].mlp.linear_fc1
    assert len(rules_of(policy)) == 2 + 2 * 8 + 1


def test_untapped_gradients_survive_a_pass():
    """Also one that fails: its own gradient is dropped then."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.main_grad = torch.tensor([1.0, 2.0])
    rules = [Rule("router", parameter, Kind.COPY, tapped=False)]
    with untapped_aside(rules):
        assert not parameter.main_grad.any()
        parameter.main_grad += 4
    assert parameter.main_grad.tolist() == [5.0, 6.0]
    with pytest.raises(KeyError), untapped_aside(rules):
        parameter.main_grad += 4
        raise KeyError
    assert parameter.main_grad.tolist() == [5.0, 6.0]


@pytest.mark.parametrize("name", ["adapter", "linear_fc1_adapter"])
def test_weights_that_experts_share_are_refused(name):
    """Their gradient is a sum over experts and ranks, not a shard of its own."""
    policy = build_policy(tiny_moe_config(), ModelConfig(path="."), initialize(ParallelConfig()))
    experts = policy.modules[0].decoder.layers[0].mlp.experts
    experts.add_module(name, nn.Linear(2, 2))
    with pytest.raises(UserError, match=rf"experts\.{name}\.weight' is not the weight or bias of one expert"):
        classify(policy)
    shutdown()


def test_experts_that_replicas_share_must_be_tapped():
    parallel = initialize(ParallelConfig())
    policy = build_policy(tiny_moe_config(), ModelConfig(path="."), parallel)
    shared = replace(policy, parallel=replace(parallel, block_size=2))
    assert all(rule.tapped for rule in classify(shared) if rule.expert)
    policy.tap.weights.clear()
    assert not any(rule.tapped for rule in classify(policy))
    with pytest.raises(UserError, match=r"experts.* 2 replicas") as error:
        classify(shared)
    assert error.value.where == "gradnorm"
    shutdown()
