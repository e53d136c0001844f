"""The norms' library on one rank: what it refuses, what it leaves as it was, and what it loads.

Not covered: layouts and modes against autograd (tests/distributed/test_norms_library.py).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch import Tensor, nn

from oblr_megatron.errors import UserError
from oblr_megatron.model.parallel import shutdown
from oblr_megatron.norms import (
    TokenBatch,
    clipped_grad_sum,
    per_sample_sq_grad_norms,
    products,
    tapped,
    weighted_grad_sum,
)
from oblr_megatron.norms.attach import REFUSED
from oblr_megatron.norms.products import Tiles
from tests.distributed.user_models import Batch, build, groups, mean_cross_entropy, rows, samples

ROOT = Path(__file__).resolve().parents[3]
ONES = torch.ones(4, dtype=torch.float64)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with groups():
        yield
    shutdown()


def ddp(model: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("moe", "moe_aux_loss_coeff", 0.01),
        ("moe", "moe_z_loss_coeff", 1e-3),
        ("moe", "moe_token_dispatcher_type", "allgather"),
        ("moe", "moe_expert_capacity_factor", 1.0),
        ("moe", "moe_router_load_balancing_type", "sinkhorn"),
        ("gpt", "fp16", True),
        ("gpt", "hidden_dropout", 0.1),
        ("gpt", "attention_dropout", 0.1),
        ("gpt", "mtp_num_layers", 1),
        ("gpt", "multi_latent_attention", True),
        ("gpt", "defer_embedding_wgrad_compute", True),
        ("gpt", "cpu_offloading", True),
        ("gpt", "mlp_chunks_for_training", 2),
        ("gpt", "use_transformer_engine_op_fuser", True),
        ("gpt", "enable_autocast", True),
        ("gpt", "fp4", "e2m1"),
        ("gpt", "experimental_attention_variant", "gated_delta_net"),
        ("moe", "moe_router_force_load_balancing", True),
    ],
)
def test_a_field_that_the_passes_cannot_measure_is_named(family: str, field: str, value: Any) -> None:
    (model,) = build(family)
    setattr(model.config, field, value)
    with pytest.raises(UserError, match=field) as error:
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    assert error.value.where == "TransformerConfig" and error.value.fix


def test_refused_fields_have_their_names_in_megatron() -> None:
    """A field that no version has would never be refused."""
    if Version(version("megatron-core")) >= Version("0.19"):
        assert set(REFUSED) <= {field.name for field in fields(TransformerConfig)}


def test_an_unknown_fp8_recipe_is_refused() -> None:
    (model,) = build("gpt")
    model.config.fp8, model.config.fp8_recipe = "hybrid", "custom"
    with pytest.raises(UserError, match="fp8_recipe is 'custom'"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)


def test_dropout_is_accepted_where_it_does_nothing() -> None:
    (model,) = build("gpt")
    model.config.hidden_dropout = 0.1
    model.eval()
    assert bool((per_sample_sq_grad_norms(model, samples(), mean_cross_entropy) > 0).all())


def test_other_models_and_wrappers_are_refused() -> None:
    with pytest.raises(UserError, match="Linear") as error:
        per_sample_sq_grad_norms(nn.Linear(2, 2), samples(), mean_cross_entropy)
    assert error.value.where == "model"
    with pytest.raises(UserError, match="wrapped in a DataParallel"):
        per_sample_sq_grad_norms(nn.DataParallel(build("gpt")[0]), samples(), mean_cross_entropy)
    gathers = {"reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": True, "fp8_param_gather": True}
    patterns = {"param_name_patterns_for_fp32_local_accumulation": ("all",)}
    for options in ({"overlap_grad_reduce": True}, patterns, gathers):
        with pytest.raises(UserError) as error:
            per_sample_sq_grad_norms(ddp(build("gpt")[0], **options), samples(), mean_cross_entropy)
        assert error.value.where == "DistributedDataParallelConfig"
    inside = ddp(build("gpt")[0]).module
    with pytest.raises(UserError, match="main_grad, which belongs to a wrapper"):
        per_sample_sq_grad_norms(inside, samples(), mean_cross_entropy)
    assert all(param.main_grad is not None for param in inside.parameters())
    TEFusedMLP = type("TEFusedMLP", (nn.Linear,), {})
    (model,) = build("gpt")
    model.decoder.layers[0].mlp.fused = TEFusedMLP(2, 2)
    with pytest.raises(UserError, match="TEFusedMLP never calls"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)


def test_a_parameter_without_a_rule_is_refused_by_name_and_no_tap_stays() -> None:
    (model,) = build("gpt")
    model.decoder.layers[1].mlp.adapter = nn.Linear(3, 3)
    with pytest.raises(UserError, match=r"'decoder\.layers\.1\.mlp\.adapter\.weight'"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    assert not any({"forward", "_forward_impl"} & vars(module).keys() for module in model.modules())
    model.decoder.layers[1].mlp.adapter.requires_grad_(False)
    assert len(per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)) == 4


def test_a_parameter_of_two_modules_is_refused() -> None:
    """Its gradient is a sum over both, and the norm of a sum is not the sum of norms."""
    (model,) = build("gpt")
    first, second, *_ = model.decoder.layers
    second.mlp.linear_fc2.weight = first.mlp.linear_fc2.weight
    with pytest.raises(UserError, match=r"parameter .*layers\.0\.mlp\.linear_fc2\.weight in two places"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    (model,) = build("gpt")
    model.decoder.layers[1] = model.decoder.layers[0]
    with pytest.raises(UserError, match=r"parameter .*layers\.0\..* in two places"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)


def test_a_module_that_draws_is_refused_while_it_does() -> None:
    """In a layer's adapter, for example, where no field of the configuration tells."""
    (model,) = build("gpt")
    model.decoder.layers[1].mlp.dropout = nn.Dropout(0.1)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.dropout drops values"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    model.eval()
    assert len(per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)) == 4


def test_layers_keep_what_the_configuration_had_when_they_were_built() -> None:
    (model,) = build("gpt")
    model.decoder.layers[0].hidden_dropout = 0.1
    with pytest.raises(UserError, match=r"decoder\.layers\.0 drops values"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    model.eval()
    assert len(per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)) == 4
    (model,) = build("moe")
    model.decoder.layers[1].mlp.router.routing_type = "sinkhorn"
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.router was built for 'sinkhorn'"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)


def test_a_forward_that_a_tap_would_replace_is_refused() -> None:
    class Scaled(VocabParallelEmbedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    (model,) = build("gpt")
    model.embedding.word_embeddings.__class__ = Scaled
    with pytest.raises(UserError, match="word_embeddings is a Scaled with a forward of its own"):
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)


def test_between_calls_the_configuration_is_the_users() -> None:
    """A step inside the block finalizes its gradients."""
    (model,) = build("gpt")
    model.config.finalize_model_grads_func = finalize = object()
    with tapped(model) as handle:
        assert len(per_sample_sq_grad_norms(handle, samples(), mean_cross_entropy)) == 4
        assert model.config.finalize_model_grads_func is finalize


def test_autocast_is_refused() -> None:
    (model,) = build("gpt")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError) as error:
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    assert error.value.where == "torch.autocast"


def test_groups_must_exist() -> None:
    (model,) = build("gpt")
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    with pytest.raises(UserError) as error:
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    assert error.value.where == "parallel_state"


def scalar(logits: Tensor, batch: Batch) -> Tensor:
    return mean_cross_entropy(logits, batch).sum()


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("mode", {"mode": "one_pass"}),
        ("weights", {"weights": ONES[:3]}),
        ("weights", {"weights": ONES[:3], "mode": "inline"}),
        ("weighted_grad_sum", {"weights": torch.sqrt, "mode": "inline"}),
        ("loss", {"loss": scalar}),
        ("weights", {"weights": ONES / torch.tensor([1.0, 0.0, 1.0, 1.0])}),
        ("weights", {"weights": lambda w: w * math.nan, "mode": "stash"}),
        ("weights", {"weights": lambda groups, w: w[:, :1], "mode": "stash", "groups": 2}),
        ("groups", {"groups": 3}),
        ("groups", {"groups": 0, "mode": "bookkeep"}),
    ],
)
def test_wrong_arguments_are_refused(where: str, options: dict[str, Any]) -> None:
    arguments = {"loss": mean_cross_entropy, "weights": ONES} | options
    with pytest.raises(UserError) as error:
        weighted_grad_sum(build("qwen2")[0], samples(), **arguments)
    assert error.value.where == where


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_clipping_norm_must_be_a_positive_number(max_norm: float) -> None:
    with pytest.raises(UserError, match="max_norm is"):
        clipped_grad_sum(build("gpt")[0], samples(), mean_cross_entropy, max_norm)


def test_a_handle_ends_with_its_block() -> None:
    (model,) = build("gpt")
    with tapped(model) as handle:
        pass
    with pytest.raises(UserError, match="after its `with"):
        per_sample_sq_grad_norms(handle, samples(), mean_cross_entropy)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(wrong: int) -> None:
    batches = samples()
    batches[2].input_ids[0, 1] = wrong
    with pytest.raises(UserError, match="outside the vocabulary"):
        per_sample_sq_grad_norms(build("gpt")[0], batches, mean_cross_entropy)


@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 4, 2, 5]])
def test_packed_bounds_that_do_not_cover_the_row_are_refused(bounds: list[int]) -> None:
    row = torch.ones(1, 5, dtype=torch.int64)
    batch = TokenBatch(row, row, torch.ones(1, 5), cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    with pytest.raises(UserError, match="do not cut the 1 row of 5 tokens"):
        per_sample_sq_grad_norms(build("gpt")[0], [batch], mean_cross_entropy)


def test_fp8_layers_have_no_factors_to_keep() -> None:
    (model,) = build("gpt")
    with tapped(model) as handle:
        model.config.fp8 = "hybrid"
        with pytest.raises(UserError, match="whole gradient of every sample"):
            clipped_grad_sum(handle, samples(), mean_cross_entropy, 1.0, mode="bookkeep")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_without_an_eps_computes_as_before(dtype: torch.dtype) -> None:
    (model,) = build("qwen2")
    model = model.to(dtype)
    norms = [child for child in model.modules() if isinstance(child, nn.RMSNorm)]
    x = torch.linspace(-0.02, 0.02, norms[0].weight.numel(), dtype=dtype)
    for norm in norms:
        norm.eps = None
    plain = [norm(x) for norm in norms if norm.weight.shape == x.shape]
    with tapped(model):
        found = [norm(x) for norm in norms if norm.weight.shape == x.shape]
    assert len(plain) > 2 and all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


@pytest.mark.parametrize("mode", ["two_pass", "stash", "bookkeep", "inline"])
def test_bf16_weights_whose_gradients_are_added_up_in_bf16(mode: Any) -> None:
    """The wrapper's default. What is summed over ranks is buffered in fp32. The embedding is tied."""
    (exact,) = build("qwen2")
    (model,) = build("qwen2")
    model.bfloat16()
    model.config.params_dtype = model.config.pipeline_dtype = torch.bfloat16
    model.config.bf16 = True
    wanted = per_sample_sq_grad_norms(exact, samples(), mean_cross_entropy)
    found = weighted_grad_sum(ddp(model), [rows(samples())], mean_cross_entropy, ONES, mode=mode)
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=0)


@pytest.mark.parametrize("mode", ["two_pass", "stash", "bookkeep", "inline"])
def test_gradients_are_added_and_norms_leave_them_alone(mode: Any) -> None:
    for family in ("gpt", "qwen2"):  # biases of the first get their gradient from autograd
        model = ddp(build(family)[0])
        weighted_grad_sum(model, samples(), mean_cross_entropy, ONES, mode=mode)
        once = [param.main_grad.clone() for param in model.parameters()]
        per_sample_sq_grad_norms(model, samples(), mean_cross_entropy, mode=mode)
        assert all(torch.equal(param.main_grad, grad) for param, grad in zip(model.parameters(), once, strict=True))
        weighted_grad_sum(model, [rows(samples())], mean_cross_entropy, ONES, mode=mode)
        for param, grad in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(param.main_grad, 2 * grad, rtol=1e-10, atol=1e-12)


def test_mode_inline_forms_one_product_for_each_long_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of a product costs nothing: every sample is long. Oracle: mode two_pass with its own tiles."""
    weights, results = torch.tensor([0.5, 0.0, -2.0, 1.0], dtype=torch.float64), []
    for mode in ("two_pass", "inline"):
        model = ddp(build("qwen2")[0])
        norms = weighted_grad_sum(model, [rows(samples())], mean_cross_entropy, weights, mode=mode)
        results.append([norms, *(param.main_grad.clone() for param in model.parameters())])
        monkeypatch.setattr(products, "CPU_TILES", Tiles(side=16, strip=4, element_flops=0, call_flops=0))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("window_tokens", "asked"), [(None, [[0, 1, 2, 3]]), (20, [[0, 1], [2, 3]]), (1, [[0], [1], [2], [3]])]
)
def test_a_window_holds_whole_groups_up_to_its_tokens(window_tokens: int | None, asked: list[list[int]]) -> None:
    """Mode bookkeep asks for the weights of a window at a time; the rows are padded to nine tokens."""
    calls: list[list[int]] = []

    def rule(groups: Any, norms: Tensor) -> Tensor:
        calls.append(list(groups))
        return torch.ones_like(norms)

    gradients = []
    for weights, options in ((ONES, {}), (rule, {"groups": 1, "window_tokens": window_tokens})):
        model = ddp(build("qwen2")[0])
        weighted_grad_sum(model, [rows(samples())], mean_cross_entropy, weights, mode="bookkeep", **options)
        gradients.append([param.main_grad.clone() for param in model.parameters()])
    assert calls == asked
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["two_pass", "stash", "bookkeep", "inline"])
def test_no_samples_add_nothing(mode: Any) -> None:
    """The embedding is tied."""
    model = ddp(build("qwen2")[0])
    assert weighted_grad_sum(model, [], mean_cross_entropy, ONES[:0], mode=mode).shape == (0,)
    if mode != "inline":
        assert weighted_grad_sum(model, [], mean_cross_entropy, lambda norms: 1 / norms, mode=mode).shape == (0,)
    assert not any(param.main_grad.any() for param in model.parameters())


def test_a_bare_model_keeps_its_gradients() -> None:
    (model,) = build("gpt")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    per_sample_sq_grad_norms(model, samples(), mean_cross_entropy)
    assert all(bool((param.grad == 1).all()) for param in model.parameters())
    weighted_grad_sum(model, samples(), mean_cross_entropy, 0 * ONES)
    assert all(bool((param.grad == 1).all()) and not hasattr(param, "main_grad") for param in model.parameters())


def broken(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of the sample of nine tokens is not finite."""
    assert batch.lengths is not None
    return mean_cross_entropy(logits, batch) * torch.where(batch.lengths == samples()[2].lengths, math.nan, 1.0)


@pytest.mark.parametrize("mode", ["two_pass", "stash", "bookkeep"])
def test_a_sample_that_is_not_finite_spoils_no_other(mode: Any) -> None:
    found = {}
    for name, loss, batch in (
        ("broken", broken, samples()),
        ("left out", mean_cross_entropy, samples()[:2] + samples()[3:]),
    ):
        (model,) = build("qwen2")
        norms = clipped_grad_sum(model, [rows(batch)], loss, 1.0, mode=mode)
        found[name] = norms, [param.grad for param in model.parameters()]
    assert found["broken"][0].isfinite().tolist() == [True, True, False, True]
    for one, other in zip(found["broken"][1], found["left out"][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_no_samples_have_no_norms() -> None:
    with tapped(build("qwen2")[0]) as handle:
        assert per_sample_sq_grad_norms(handle, [], mean_cross_entropy).shape == (0,)


USE = """
import json, sys
import torch.distributed as dist
from oblr_megatron.norms import clipped_grad_sum
from tests.distributed.user_models import build, groups, mean_cross_entropy, samples
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with groups():
    for mode in ("two_pass", "stash", "bookkeep"):
        assert bool((clipped_grad_sum(build("moe")[0], samples(), mean_cross_entropy, 1.0, mode=mode) > 0).all())
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.slow
def test_its_use_loads_neither_vllm_nor_the_trainer() -> None:
    out = subprocess.run([sys.executable, "-c", USE], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(out.splitlines()[-1]))
    foreign = {"vllm", "transformers"} | {
        f"oblr_megatron.{name}" for name in ("config", "rewards", "rollout", "engine", "weights", "gradient", "run")
    }
    assert not foreign & loaded
    assert "oblr_megatron.norms.bookkeep" in loaded
