"""The manifest against the checkpoint, and the ledger that follows a push bucket by bucket.

Not covered: their use in an engine's state (tests/unit/engine/test_state.py).
"""

import pytest
import torch
from safetensors.torch import load_file

from oblr_megatron.checkpoint.hf_dir import checkpoint_shapes
from oblr_megatron.errors import WeightError
from oblr_megatron.weights.manifest import Ledger, Part, TensorSpec, check_manifest
from tests.tiny import make_hf_dir

MODEL = {"a": (2, 3), "b": (4,), "c": (1,)}
WHOLE = tuple(TensorSpec(name, "float32", shape) for name, shape in MODEL.items())
PARTS = tuple(Part.whole(spec) for spec in WHOLE)


def test_bytes_and_text_of_a_tensor():
    spec = TensorSpec.of("w", torch.bfloat16, torch.Size((2, 3)))
    assert spec == TensorSpec("w", "bfloat16", (2, 3))
    assert (spec.num_bytes, str(spec)) == (12, "w bfloat16[2, 3]")
    assert TensorSpec("scalar", "float64", ()).num_bytes == 8


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_the_models_tensors_are_read_from_the_checkpoints_headers(tmp_path, tied, shard):
    path = make_hf_dir(tmp_path, tied=tied, max_shard_size=shard)
    stored = {name: tuple(t.shape) for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
    shapes = checkpoint_shapes(path)
    assert shapes == stored and ("lm_head.weight" in shapes) != tied


def test_a_stored_output_layer_of_a_tied_model_is_not_expected(tmp_path):
    from safetensors.torch import save_file

    path = make_hf_dir(tmp_path, tied=True)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    assert "lm_head.weight" not in checkpoint_shapes(path)


def test_the_whole_model_is_accepted_in_any_order():
    check_manifest(WHOLE, MODEL, "float32")
    check_manifest(WHOLE[::-1], MODEL, "float32")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        pytest.param(WHOLE[1:], "a is missing", id="missing"),
        pytest.param((), "a, b, c are missing", id="empty"),
        pytest.param((*WHOLE, TensorSpec("d", "float32", (1,))), "d is not in the model", id="unknown"),
        pytest.param((*WHOLE, WHOLE[1]), "b is given twice", id="twice"),
        pytest.param(
            (WHOLE[0], TensorSpec("b", "float32", (5,)), WHOLE[2]), r"b \[5\], the model has \[4\]", id="shape"
        ),
        pytest.param((TensorSpec("d", "float32", (1,)), *WHOLE[1:]), "a is missing; d is not in", id="two-problems"),
    ],
)
def test_anything_else_is_refused_by_name(manifest, message):
    with pytest.raises(WeightError, match=message):
        check_manifest(manifest, MODEL, "float32")


def test_a_dtype_other_than_the_engines_is_refused():
    half = (WHOLE[0], TensorSpec("b", "bfloat16", (4,)), WHOLE[2])
    with pytest.raises(WeightError, match=r"b bfloat16.*float32"):
        check_manifest(half, MODEL, "float32")


def test_a_long_list_of_names_is_shortened():
    manifest = tuple(TensorSpec(f"t{index}", "float32", (1,)) for index in range(9))
    with pytest.raises(WeightError, match="t0, t1, t2 and 6 more"):
        check_manifest((), {spec.name: spec.shape for spec in manifest}, "float32")


def test_a_ledger_takes_the_manifest_in_buckets_of_any_size():
    """Buckets begin and end anywhere, also within a tensor; one tensor has no elements."""
    empty = TensorSpec("e", "float32", (0, 2))
    manifest = (*WHOLE, empty)
    elements = [Part(spec, first, 1) for spec in WHOLE for first in range(spec.numel)]
    for cuts in (
        [*PARTS, Part.whole(empty)],
        [*elements, Part.whole(empty)],
        [*elements[:6], *PARTS[1:], Part.whole(empty)],
    ):
        for middle in range(len(cuts)):
            ledger = Ledger(manifest)
            ledger.count(cuts[:middle])
            ledger.count(cuts[middle:])
            ledger.finish()
