"""Quantises to FP8 (E4M3) with nvidia-modelopt: one static scale per weight and per linear layer's input.

    model = load_model(source, torch.device("cpu"))
    calibrate(model, batches)
    with original(model):
        logits = model(...)                      # original weights; outside the block, simulated FP8
    written = write(model, source, target)       # the model is unusable afterwards; vLLM loads target as "modelopt"
    check_written(target, written)

A tensor x with scale s = max |x| / 448 is stored as q = e4m3(x / s) and represents q s. vLLM fuses query, key and value
into one product, and gate and up into another; it rounds their weights again if their scales differ. Therefore they get
one common scale here, and vLLM computes with the measured weights.
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
from oblr_megatron.extras.quantize.calibration import CalibrationBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Advance = Callable[[int], None]
"""Called with the number of rows just processed."""

LARGEST = 448.0  # largest E4M3 value
MULTIPLIED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
OFF = [{"quantizer_name": "*", "enable": False}]  # modelopt's config for no quantiser


@dataclass(frozen=True, slots=True)
class Written:
    """Expected contents of the file for one weight. Example: Written("99aa06d3014798d8...", 0.0013, 0.0107)"""

    xxh3: str  # of the E4M3 bytes
    weight_scale: float
    input_scale: float


def load_model(source: Path, device: torch.device) -> PreTrainedModel:
    """The transformers model in bf16, as vLLM runs it; experts are computed one by one because modelopt needs that."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
        )
        return cast("PreTrainedModel", model.to(device))


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, batches: Sequence[CalibrationBatch], advance: Advance = lambda rows: None
) -> None:
    """Insert quantizers and set their scales from the weights and the calibration rows, of at least one batch.

    The model is changed in place. Its output layer, embedding, norms and routers are not quantised.

    Raises:
        RunError: a quantised layer saw no token.
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
    """Context with quantizers off: the model computes exactly as before quantisation (until `write`)."""
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg_context

    return cast(AbstractContextManager[None], set_quantizer_by_cfg_context(model, OFF))


@torch.no_grad()
def write(model: PreTrainedModel, source: Path, target: Path) -> dict[str, Written]:
    """Fill `target` with weights, config with `quantization_config`, generation config and tokenizer.

    The model is unusable afterwards.

    Returns:
        The expected contents by tensor name, for `check_written`.

    Raises:
        RunError: writing failed.
    """
    from modelopt.torch.export import export_hf_checkpoint

    dtype = model.dtype
    written = {name: entry for part in _quantized(model) for name, entry in _fold(*part)}
    with quiet():
        try:
            export_hf_checkpoint(model, export_dir=target, max_shard_size=MAX_SHARD_BYTES)
        except SafetensorError as error:  # safetensors raises this on a full disk
            raise RunError(f"cannot write {target}: {error}") from error
    quantization = json.loads((target / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    copy_description(source, target, dtype)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in (path for path in target.rglob("*") if path.is_file()):
        file.chmod((target / "config.json").stat().st_mode)  # safetensors files are readable by the owner only
        sync(file)
    return written


def check_written(target: Path, written: dict[str, Written]) -> None:
    """Read the files back, and check that quantised weights and scales equal the measured ones bit for bit.

    Raises:
        RunError: names the first tensor that differs.
    """
    stored: set[str] = set()
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for name in sorted(names & written.keys()):
                layer = name.removesuffix("weight")
                scales = [float(tensors.get_tensor(f"{layer}{kind}")) for kind in ("weight_scale", "input_scale")]
                if Written(_digest(tensors.get_tensor(name)), *scales) != written[name]:
                    raise RunError(f"{target}: {name} differs from the measured weight")
            stored |= names
    lacking = sorted(written.keys() - stored)
    if lacking:
        raise RunError(f"{target}: {len(lacking)} quantised weights are missing, {lacking[0]} first")


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
    except BaseException:  # shows what the library printed before the error goes on
        sys.stderr.write(said.getvalue())
        raise
    finally:
        logging.disable(level)


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, Tensor, Any]]:
    """(module name, module, index of the weight in it, weight, quantizer) of every weight in FP8."""
    for name, module in model.named_modules():
        if hasattr(module, "iter_weights_for_calibration"):
            for index, (weight, quantizer) in enumerate(cast(Any, module).iter_weights_for_calibration()):
                if quantizer.is_enabled:
                    yield name, module, index, weight, quantizer


def _fold(name: str, module: nn.Module, index: int, weight: Tensor, quantizer: Any) -> list[tuple[str, Written]]:
    """Replace a weight by its FP8 value, and return the file's expected contents.

    modelopt divides by the scale in the model's dtype before it rounds to E4M3, so a few percent of bf16 weights would
    be one step off. Weights that are already multiples of the scale are exported exactly.
    """
    weight.copy_(quantizer(weight))
    scale = quantizer.amax.float() / LARGEST
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    parts, inputs = _exported(name, module, index, stored)
    input_scale = float(inputs.amax.float() / LARGEST)
    return [(tensor, Written(_digest(part), float(scale), input_scale)) for tensor, part in parts]


def _exported(name: str, module: nn.Module, index: int, stored: Tensor) -> tuple[list[tuple[str, Tensor]], Any]:
    """((name in the file, tensor) pairs, input quantizer) of a layer, or of one expert of a fused block."""
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
                raise RunError(f"{name}: the {what} has no scale (largest value {amax}); use other calibration rows")


def _digest(stored: Tensor) -> str:
    return xxhash.xxh3_128(stored.contiguous().view(torch.uint8).cpu().numpy().data).hexdigest()
