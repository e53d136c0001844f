"""FP8 (E4M3) with nvidia-modelopt: a static scale for each weight and for the input of each linear layer.

    model = load_model(source, torch.device("cpu"))
    calibrate(model, batches)
    with original(model):
        logits = model(...)                      # the weights as they were; without the block, those of FP8 simulated
    written = write(model, source, target)       # the model is used up; target is what vLLM loads as "modelopt"
    check_written(target, written)

A tensor x with scale s is stored as q = e4m3(x / s), s = max |x| / 448, and stands for q s. vLLM multiplies
query, key and value in one product, gate and up in another, and rounds their weights anew if their scales differ; so
they are given one scale here, and what vLLM computes with is what was measured.
"""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES, copy_description
from oblr_megatron.checkpoint.store import sync
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.quantize.calibration import PackedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Advance = Callable[[int], None]
"""Told how many rows are done."""

LARGEST = 448.0  # of E4M3
MULTIPLIED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
OFF = [{"quantizer_name": "*", "enable": False}]  # modelopt's words for: no quantizer


@dataclass(frozen=True, slots=True)
class Written:
    """What the file must hold of one weight. Example: Written("99aa06d3014798d8...", 0.0013, 0.0107)"""

    xxh3: str  # of the E4M3 bytes
    weight_scale: float
    input_scale: float


def load_model(source: Path, device: torch.device) -> PreTrainedModel:
    """The transformers model in bf16, as vLLM will run it; experts are computed one by one, as modelopt needs it."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
        )
        return cast("PreTrainedModel", model.to(device))


@torch.no_grad()
def calibrate(model: PreTrainedModel, batches: Sequence[PackedRows], advance: Advance = lambda rows: None) -> None:
    """Insert quantizers, and set their scales from the weights and from these rows.

    Args:
        model: is changed; the output layer, the embedding, norms and routers stay as they are.
        batches: at least one.
        advance: is called after each batch.

    Raises:
        RunError: a layer that is to be quantised saw no token.
    """
    with quiet():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    def forward(calibrated: nn.Module) -> None:
        for batch in batches:
            calibrated(**batch.arguments(model.device), logits_to_keep=1)
            advance(batch.num_rows)

    with quiet():
        mtq.quantize(model, mtq.FP8_DEFAULT_CFG, forward)
    for module in model.modules():
        for names in MULTIPLIED_TOGETHER:
            parts = [getattr(module, name, None) for name in names]
            if all(hasattr(part, "weight_quantizer") for part in parts):
                preprocess_linear_fusion(parts)
    _check_calibrated(model)


def original(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, the quantizers are off and the model computes what it did before, bit for bit (until `write`)."""
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg_context

    return cast(AbstractContextManager[None], set_quantizer_by_cfg_context(model, OFF))


@torch.no_grad()
def write(model: PreTrainedModel, source: Path, target: Path) -> dict[str, Written]:
    """Fill the directory `target`: weights, config with `quantization_config`, generation config, tokenizer.

    Returns what the files must hold, by tensor name, for `check_written`. The model is of no use afterwards.

    Raises:
        RunError: the file system refuses.
    """
    from modelopt.torch.export import export_hf_checkpoint

    dtype = model.dtype
    written = {name: entry for part in _quantized(model) for name, entry in _fold(*part)}
    with quiet():
        try:
            export_hf_checkpoint(model, export_dir=target, max_shard_size=MAX_SHARD_BYTES)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise RunError(f"cannot write {target}: {error}") from error
    quantization = json.loads((target / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    copy_description(source, target, dtype)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in target.iterdir():
        file.chmod((target / "config.json").stat().st_mode)  # safetensors writes for its owner's eyes only
        sync(file)
    return written


def check_written(target: Path, written: dict[str, Written]) -> None:
    """Read the files back: every quantised weight, bit for bit, and its scales, are those that were measured.

    Raises:
        RunError: naming the first tensor that differs.
    """
    found: set[str] = set()
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for name in sorted(names & written.keys()):
                scales = [float(tensors.get_tensor(_scale(name, kind))) for kind in ("weight_scale", "input_scale")]
                if Written(_digest(tensors.get_tensor(name)), *scales) != written[name]:
                    raise RunError(f"{target}: {name} was not written as it was measured")
            found |= names
    lacking = sorted(written.keys() - found)
    if lacking:
        raise RunError(f"{target}: {len(lacking)} quantised weights were not written, {lacking[0]} first")


@contextmanager
def quiet() -> Iterator[None]:
    """Hide standard output and error of the block, and logs below errors; print them if the block raises.

    A UserError or RunError prints nothing, because its one line says what is wrong.
    """
    said = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with redirect_stdout(said), redirect_stderr(said):
            yield
    except (UserError, RunError):
        raise
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise
    finally:
        logging.disable(level)


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, Tensor, Any]]:
    """(module's name, module, number of the weight in it, the weight, its quantizer) of every weight in FP8."""
    for name, module in model.named_modules():
        if hasattr(module, "iter_weights_for_calibration"):
            for index, (weight, quantizer) in enumerate(cast(Any, module).iter_weights_for_calibration()):
                if quantizer.is_enabled:
                    yield name, module, index, weight, quantizer


def _fold(name: str, module: nn.Module, index: int, weight: Tensor, quantizer: Any) -> list[tuple[str, Written]]:
    """Replace a weight by what FP8 makes of it, and say what the file must hold.

    modelopt divides by the scale in the model's dtype before it rounds to E4M3: of plain bf16 weights some per cent
    would come out a step away from those that were measured. Weights that are multiples of the scale come out right.
    """
    weight.copy_(quantizer(weight))
    scale = quantizer.amax.float() / LARGEST
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    parts, inputs = _exported(name, module, index, stored)
    input_scale = float(inputs.amax.float() / LARGEST)
    return [(tensor, Written(_digest(part), float(scale), input_scale)) for tensor, part in parts]


def _exported(name: str, module: nn.Module, index: int, stored: Tensor) -> tuple[list[tuple[str, Tensor]], Any]:
    """(tensors by their names in the file, the input's quantizer): of a layer, or of one expert of a fused block."""
    experts = getattr(module, "num_experts", None)
    if experts is None:
        return [(f"{name}.weight", stored)], module.input_quantizer
    expert = f"{name}.{index % experts}"
    if index >= experts:
        return [(f"{expert}.down_proj.weight", stored)], module.down_proj_input_quantizer
    gate, up = stored.chunk(2)
    return [(f"{expert}.gate_proj.weight", gate), (f"{expert}.up_proj.weight", up)], module.gate_up_proj_input_quantizer


def _check_calibrated(model: nn.Module) -> None:
    for name, module, index, weight, quantizer in _quantized(model):
        inputs = _exported(name, module, index, weight)[1]
        for what, amax in (("weight", quantizer.amax), ("input", inputs.amax)):
            if amax is None or not math.isfinite(float(amax)) or float(amax) <= 0:
                raise RunError(f"{name}: the {what} has no scale (largest value {amax}); calibrate on other rows")


def _scale(weight: str, kind: str) -> str:
    return f"{weight.removesuffix('.weight')}.{kind}"


def _digest(stored: Tensor) -> str:
    return xxhash.xxh3_128(stored.contiguous().view(torch.uint8).cpu().numpy().data).hexdigest()
