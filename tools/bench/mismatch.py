"""Find the operations in which trainer and engine differ: the same weights, the same tokens, operation by operation.

    python tools/bench/mismatch.py --dtype float32 --json run/bench/mismatch.json

A real vLLM engine samples single responses, and records what every operation returns. The trainer then computes the
same tokens in one packed row, twice. In "alone" each operation gets the engine's own numbers, so that only its own
difference counts. In "together" differences add up. The column "batch" is of the engine alone: it computes the same
tokens once more, now as one prompt. All columns are shares of elements with other bits, over all layers.
With `--batch-invariant` both sides run as under model.batch_invariant.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from record import publish
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from oblr_megatron.engine.handle import child_environment  # noqa: E402
from oblr_megatron.engine.protocol import EngineSpec, PromptRequest, SamplingRequest  # noqa: E402
from tests.tiny import VOCAB, make_hf_dir  # noqa: E402

PROMPTS, TOKENS, TEMPERATURE = 5, 48, 0.8
HEADS, GROUPS, HEAD = 4, 2, 32
SIZES: dict[str, Any] = {
    "hidden_size": HEADS * HEAD,
    "intermediate_size": 200,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
}


@dataclass(frozen=True, slots=True)
class Point:
    """A tensor that both sides have. Example: Point("q norm", "self_attention.q_layernorm", "out", "q_norm.out")"""

    operation: str  # that computes it
    module: str  # megatron-core's
    side: str  # "in" or "out" of that module
    engine: str  # the engine's record


LAYER = (
    Point("residual sum", "input_layernorm", "in", "input_layernorm.residual"),
    Point("RMSNorm", "input_layernorm", "out", "input_layernorm.out"),
    Point("q, k, v product", "self_attention.linear_qkv", "out", "self_attn.qkv_proj.out"),
    Point("q and k norm", "self_attention.q_layernorm", "out", "self_attn.q_norm.out"),
    Point("q and k norm", "self_attention.k_layernorm", "out", "self_attn.k_norm.out"),
    Point("rotary embedding", "self_attention.core_attention", "in", "self_attn.attn.in"),
    Point("attention", "self_attention.core_attention", "out", "self_attn.attn.out"),
    Point("attention's output product", "self_attention.linear_proj", "out", "self_attn.o_proj.out"),
    Point("residual sum", "pre_mlp_layernorm", "in", "post_attention_layernorm.residual"),
    Point("RMSNorm", "pre_mlp_layernorm", "out", "post_attention_layernorm.out"),
    Point("gate and up product", "mlp.linear_fc1", "out", "mlp.gate_up_proj.out"),
    Point("SiLU and product", "mlp.linear_fc2", "in", "mlp.act_fn.out"),
    Point("down product", "mlp.linear_fc2", "out", "mlp.down_proj.out"),
)
FIRST = Point("embedding", "embedding.word_embeddings", "out", "embed_tokens.out")
LAST = (
    Point("residual sum", "decoder.final_layernorm", "in", "norm.residual"),
    Point("RMSNorm", "decoder.final_layernorm", "out", "norm.out"),
    Point("output layer", "output_layer", "out", "logits.out"),
)


def points(layers: int) -> Iterator[Point]:
    """All tensors of a model in the order of its forward pass."""
    yield FIRST
    for index in range(layers):
        for one in LAYER:
            yield Point(one.operation, f"decoder.layers.{index}.{one.module}", one.side, f"layers.{index}.{one.engine}")
    yield from LAST


@dataclass(slots=True)
class Difference:
    """Elements compared, those with other bits, and the largest difference."""

    elements: int = 0
    other: int = 0
    largest: float = 0.0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        """Compare two tensors of equal shape."""
        assert ours.shape == theirs.shape, f"{tuple(ours.shape)} and {tuple(theirs.shape)}"
        self.elements += ours.numel()
        self.other += int((ours != theirs).sum())
        self.largest = max(self.largest, float((ours.double() - theirs.double()).abs().max()))

    @property
    def share(self) -> float | None:
        """Of elements that differ; None if none were compared."""
        return self.other / self.elements if self.elements else None


@dataclass(slots=True)
class Compared:
    """The three comparisons of one operation."""

    alone: Difference = field(default_factory=Difference)
    together: Difference = field(default_factory=Difference)
    batch: Difference = field(default_factory=Difference)

    def row(self, operation: str) -> Row:
        """As it is printed."""
        alone, together = self.alone, self.together
        return Row(operation, alone.share, alone.largest, together.share, together.largest, self.batch.share)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one operation.

    Example: Row("attention", alone=0.61, largest=2.4e-7, together=0.92, largest_together=8e-6, batch=0.58)
    """

    operation: str
    alone: float | None  # shares of elements; None: not compared
    largest: float  # |difference|
    together: float | None
    largest_together: float
    batch: float | None


# ---------------------------------------------------------------------------------------------- the engine's process


def engine_side(spec: EngineSpec, out: Path) -> None:
    """Sample responses one after the other, compute each again as one prompt, and write both records of each."""
    from oblr_megatron.engine.channel import Call
    from oblr_megatron.engine.core import EngineServer
    from oblr_megatron.engine.plugin import register

    register()
    server = EngineServer(spec)
    record: dict[str, list[Tensor]] = {}
    server._llm.apply_model(lambda model: _hook(model, record))

    def recorded(prompt: tuple[int, ...], request: SamplingRequest) -> tuple[Any, dict[str, Tensor]]:
        record.clear()
        server.answer(Call("sample", {"asked": [PromptRequest(0, prompt, request, position=0)]}))
        replies = []
        while server.sampling:
            replies += server.step()
        ((_, (one,)),) = replies[0].value
        return one, {name: torch.cat(parts) for name, parts in record.items()}

    found, start = [], time.process_time()
    for number in range(PROMPTS):
        generator = torch.Generator().manual_seed(number)
        prompt = tuple(torch.randint(2, VOCAB, (3 + 2 * number,), generator=generator).tolist())
        one, sampled = recorded(prompt, SamplingRequest(1, TEMPERATURE, TOKENS, seed=number))
        _, whole = recorded(one.prompt_ids + one.response_ids[:-1], SamplingRequest(1, 0.0, 1, seed=0))
        texts = {"prompt": one.prompt_ids, "response": one.response_ids, "logprobs": one.logprobs}
        found.append(texts | {"sampled": sampled, "whole": whole})
    torch.save({"samples": found, "seconds": time.process_time() - start}, out)


def _hook(model: Any, record: dict[str, list[Tensor]]) -> None:
    """Record what every operation of vLLM's model returns, a row for each token."""

    def keep(name: str, norm: bool) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            record.setdefault(f"{name}.out", []).append(outputs[0].clone())
            if norm:
                added = outputs[1] if len(outputs) > 1 else inputs[0]
                record.setdefault(f"{name}.residual", []).append(added.clone())
            if name.endswith(".attn"):
                joined = torch.cat([part.flatten(1) for part in inputs[:3]], 1)
                record.setdefault(f"{name}.in", []).append(joined)

        return hook

    names = {one.engine.rpartition(".")[0] for one in points(len(model.model.layers))}
    for name, part in model.model.named_modules():
        if name in names:
            part.register_forward_hook(keep(name, norm=name == "norm" or name.endswith("layernorm")))
    model.logits_processor.register_forward_hook(keep("logits", norm=False))


# -------------------------------------------------------------------------------------------------- the trainer's side


def trainer_side(path: Path, found: list[dict[str, Any]], dtype: str, invariant: bool) -> tuple[list[Row], float]:
    """Compare every operation, and the log-probs. Also returns the processor seconds of a forward pass."""
    from tests.distributed.launch import layout
    from tests.distributed.passes import load_policy

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    rows: dict[str, Compared] = {}
    final = Compared()
    with layout() as parallel:
        policy = load_policy(path, parallel, dtype=dtype, batch_invariant=invariant)
        layers = policy.transformer_config.num_layers
        for name in ("alone", "together"):
            hooks = []
            for one in points(layers):
                row = rows.setdefault(one.operation, Compared())
                theirs = torch.cat([each["sampled"][one.engine] for each in found])
                if invariant and one.operation == "rotary embedding":
                    continue  # the trainer's attention contains it
                if name == "alone":
                    row.batch.add(*_both(found, one))
                module = policy.modules[0].get_submodule(one.module)
                hooks.append(_compare(module, one, theirs, getattr(row, name), found, replace=name == "alone"))
            getattr(final, name).add(*_logprobs(policy, found))
            for hook in hooks:
                hook.remove()
        start = time.process_time()
        _logprobs(policy, found)
        seconds = time.process_time() - start
    torch.distributed.destroy_process_group()
    return [*(one.row(name) for name, one in rows.items()), final.row("log-prob of the token")], seconds


def _both(found: list[dict[str, Any]], one: Point) -> tuple[Tensor, Tensor]:
    """The engine's records of single tokens and of whole prompts; logits of the last token alone."""
    pairs = [(each["sampled"][one.engine], each["whole"][one.engine]) for each in found]
    first, second = (torch.cat(list(parts)) for parts in zip(*((a[-len(b) :], b) for a, b in pairs), strict=True))
    return first, second


def _compare(
    module: nn.Module, one: Point, theirs: Tensor, into: Difference, found: list[dict[str, Any]], *, replace: bool
) -> Any:
    """A hook that compares a tensor of a module with the engine's, and continues with the engine's if asked to."""
    if one.module.endswith("linear_qkv"):
        theirs = _by_group(theirs)
    rows: slice | Tensor = slice(None)
    if one.module == "output_layer":
        rows = _response_rows(found)

    def handled(ours: Tensor) -> Tensor:
        flat = ours.detach().reshape(-1, *ours.shape[2 if ours.dim() == 3 and ours.shape[1] == 1 else 1 :])
        flat = flat.reshape(len(flat), -1)[rows]
        own = flat[:, :VOCAB] if one.module == "output_layer" else flat
        other = theirs.reshape(len(own), -1)[:, : own.shape[1]]
        into.add(own, other)
        if not replace:
            return ours
        if one.module != "output_layer":
            return other.reshape(ours.shape)
        whole = ours.clone()
        whole[rows, 0, : own.shape[1]] = other
        return whole

    def parts_of_attention(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        own = torch.cat([part.flatten(1) for part in inputs[:3]], 1)
        joined = handled(own)
        widths = [part.flatten(1).shape[1] for part in inputs[:3]]
        split = joined.split(widths, 1)
        return (*(a.reshape(b.shape) for a, b in zip(split, inputs[:3], strict=True)), *inputs[3:])

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (handled(inputs[0]), *inputs[1:])

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return (handled(output[0]), *output[1:]) if isinstance(output, tuple) else handled(output)

    if one.side == "out":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(parts_of_attention if "core_attention" in one.module else before)


def _by_group(rows: Tensor) -> Tensor:
    """vLLM's columns q | k | v in megatron-core's order: for each group its queries, its key, its value."""
    q, k, v = rows.split([HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD], dim=1)
    q, k, v = (part.unflatten(1, (GROUPS, -1)) for part in (q, k, v))
    return torch.cat([q, k, v], 2).flatten(1)


def _response_rows(found: list[dict[str, Any]]) -> Tensor:
    """Rows of the packed tokens that predict a response token."""
    places: list[int] = []
    start = 0
    for each in found:
        prompt, response = len(each["prompt"]), len(each["response"])
        places += range(start + prompt - 1, start + prompt + response - 1)
        start += prompt + response - 1
    return torch.tensor(places)


def _logprobs(policy: Any, found: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Log-probs of all response tokens: the trainer's, from one packed row, and the engine's."""
    from oblr_megatron.model.step import run_schedule
    from oblr_megatron.types import MicroBatch

    whole = [[*each["prompt"], *each["response"]] for each in found]
    ids = torch.tensor([[token for tokens in whole for token in tokens[:-1]]])
    labels = torch.tensor([[token for tokens in whole for token in tokens[1:]]])
    ends = torch.tensor([0, *(len(tokens) - 1 for tokens in whole)]).cumsum(0, dtype=torch.int32)
    batch = MicroBatch(
        ids, labels, torch.ones_like(ids, dtype=torch.bool), torch.zeros(ids.shape), torch.arange(len(whole)), ends
    )

    def values(hidden: Tensor, part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return hidden.new_zeros(()), {"values": policy.head(hidden, part, temperature=TEMPERATURE).logprobs[0]}

    (record,) = run_schedule(policy, [batch], values, forward_only=True)
    theirs = torch.tensor([value for each in found for value in each["logprobs"]], dtype=torch.float32)
    return record["values"].float()[_response_rows(found)], theirs


def main() -> int:
    """Run the engine in a process of its own, then the trainer in this one, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch-invariant", action="store_true", help="as under model.batch_invariant")
    parser.add_argument("--json", type=Path, help="write the results there too")
    parser.add_argument("--engine-side", type=Path, nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    extra: dict[str, Any] = {"batch_invariant": True} if options.batch_invariant else {}

    def spec(path: Path) -> EngineSpec:
        return EngineSpec("engine", path, options.dtype, "cpu", 128, 8, 2**26, 1, **extra)

    if options.engine_side:
        engine_side(spec(options.engine_side[0]), options.engine_side[1])
        return 0
    with tempfile.TemporaryDirectory() as directory:
        path, out = make_hf_dir(Path(directory) / "model", head_dim=HEAD, **SIZES), Path(directory) / "engine.pt"
        command = [sys.executable, *sys.argv, "--engine-side", str(path), str(out)]
        subprocess.run(command, env=child_environment(os.environ, spec(path)), check=True, stdout=subprocess.DEVNULL)
        engine = torch.load(out)
        rows, seconds = trainer_side(path, engine["samples"], options.dtype, options.batch_invariant)
    publish(rows, f"Bits that differ, {options.dtype}{', batch-invariant' * options.batch_invariant}", options.json)
    print(f"processor seconds: the engine's samples {engine['seconds']:.2f}, the trainer's forward pass {seconds:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
