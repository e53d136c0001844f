"""`oblr-megatron quantize` end to end on tiny models, compared with FP8 computed by hand; vLLM runs the result.

Not covered: FP8 kernels of GPUs, and vLLM's FP8 experts, which CPU builds lack.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.cli import main
from oblr_megatron.config import DataConfig
from oblr_megatron.errors import UserError
from oblr_megatron.extras.quantize import fp8
from oblr_megatron.extras.quantize.calibration import pack, read_rows
from oblr_megatron.extras.quantize.fidelity import LogitComparison
from tests.e2e.conftest import LIMIT_S, ROOT, environment
from tests.e2e.forked import call_forked
from tests.e2e.quantize_vllm import PROMPTS
from tests.tiny import make_hf_dir, make_moe_hf_dir

KINDS = ("tied", "untied", "moe")  # of Qwen3
FAMILIES = ("qwen2", "llama")
SIZES: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}  # vLLM's CPU attention takes these
ANSWER_TOKENS = 6
LARGEST = 448.0


def run_commands(given: list[str]) -> int:
    """Copies of other families below the first argument, and commands in JSON; the last one meets a full disk."""
    root, *commands, last = Path(given[0]), *map(json.loads, given[1:])
    for family in FAMILIES:
        copy_family(root / family, root / f"{family}-fp8")
    status = max(main(arguments) for arguments in commands)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    print("without room:", main(last))
    return status


def copy_family(source: Path, target: Path) -> None:
    """Without the command: transformers reads the tests' tokenizer in its own way for Qwen2."""
    model = fp8.load_model(source, torch.device("cpu"))
    fp8.calibrate(model, pack([tuple(range(2, 30)), (5, 9, 3)]))
    target.mkdir()
    fp8.check_written(target, fp8.write(model, source, target))


@dataclass(frozen=True)
class Made:
    """The models, their calibration rows and questions, and the commands' output."""

    root: Path
    said: str

    def source(self, kind: str) -> Path:
        return self.root / kind

    def target(self, kind: str) -> Path:
        return self.root / f"{kind}-fp8"

    def report(self, kind: str) -> dict[str, Any]:
        return json.loads((self.target(kind) / "quantize.json").read_text())

    def tensors(self, kind: str) -> dict[str, Tensor]:
        return load_file(self.target(kind) / "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All kinds, quantised by one process of their own: modelopt's import takes most of the time, and it sets hooks."""
    root = tmp_path_factory.mktemp("quantize")
    make_hf_dir(root / "tied", tied=True, dtype=torch.bfloat16, **SIZES)
    make_hf_dir(root / "untied", max_shard_size="80KB", **SIZES)
    for family in FAMILIES:
        make_hf_dir(root / family, family=family)
    make_moe_hf_dir(root / "moe", dtype=torch.bfloat16, moe_intermediate_size=24, **SIZES)
    rows = random.Random(0)
    questions = [" ".join(f"t{rows.randint(2, 36)}" for _ in range(rows.randint(2, 20))) for _ in range(40)]
    write_rows(root / "rows.jsonl", [(question, "t2") for question in questions])
    with (root / "rows.jsonl").open("a") as file:
        file.write("not json\n")
    gold = greedy(load(root / "tied"), root / "tied", questions[:4])
    write_rows(root / "asked.jsonl", list(zip(questions, [*gold[:3], "wrong"], strict=False)))
    common = ["--calibration", str(root / "rows.jsonl"), "--num-samples", "24"]
    asked = ["--accuracy", str(root / "asked.jsonl")]
    keys = ["reward.name=exact_match", f"rollout.max_response_tokens={ANSWER_TOKENS}"]
    arguments = [["quantize", str(root / kind), str(root / f"{kind}-fp8"), *keys, *common] for kind in KINDS]
    arguments.append(["quantize", str(root / "moe"), str(root / "no-room"), *common])
    arguments[0] += asked
    done = call_forked(run_commands, 1, [str(root), *map(json.dumps, arguments)], {})
    assert done.returncode == 0, done.stderr
    return Made(root, done.stdout + done.stderr)


def write_rows(path: Path, rows: list[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    )


def rounded(values: Tensor, scale: Tensor) -> Tensor:
    """A tensor rounded to FP8, by definition."""
    return ((values.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


def by_hand(made: Made, kind: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The source with the weights and input scales of the written files; dense models only."""
    model, tensors = load(made.source(kind), dtype), made.tensors(kind)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and f"{name}.weight_scale" in tensors:
            weight = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
            layer.weight.data.copy_(weight)
            scale = tensors[f"{name}.input_scale"]
            layer.register_forward_pre_hook(lambda _, inputs, scale=scale: (rounded(inputs[0], scale),))
    return model


@torch.no_grad()
def greedy(model: PreTrainedModel, source: Path, questions: list[str]) -> list[str]:
    """Answers computed one by one, without padding or cache."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    answers = []
    for question in questions:
        ids = tokenizer(question)["input_ids"]
        answer: list[int] = []
        while len(answer) < ANSWER_TOKENS and (not answer or answer[-1] != tokenizer.eos_token_id):
            answer.append(int(model(torch.tensor([[*ids, *answer]])).logits[0, -1].argmax()))
        answers.append(tokenizer.decode(answer, skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_the_directory_is_complete(made: Made, kind: str):
    target = made.target(kind)
    found = check_hf_dir(target, quantized=True)
    assert found.tied == (kind == "tied")
    assert found.shapes == check_hf_dir(made.source(kind)).shapes
    assert found.tokenizer().vocab_size == 37
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("generation_config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (made.source(kind) / name).read_bytes()
    modes = {file.name: file.stat().st_mode for file in target.iterdir() if file.name != "quantize.json"}
    assert set(modes.values()) == {modes["tokenizer.json"]}
    assert not list(made.root.glob(".*")), "nothing half written is left"
    with pytest.raises(UserError, match="quantised"):
        check_hf_dir(target)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_the_nearest_e4m3_value(made: Made, kind: str):
    tensors, source = made.tensors(kind), {}
    for file in made.source(kind).glob("*.safetensors"):
        source |= load_file(file)
    stored = {name for name in tensors if name.endswith("_proj.weight")}
    per_layer = 4 + 3 * (4 if kind == "moe" else 1)
    assert len(stored) == made.report(kind)["quantized_weights"] == 2 * per_layer
    for name, tensor in tensors.items():
        if name in stored:
            scale, inputs = (tensors[name.replace(".weight", f".{which}_scale")] for which in ("weight", "input"))
            assert (tensor.dtype, scale.dtype, inputs.dtype) == (torch.float8_e4m3fn, torch.float32, torch.float32)
            assert scale.shape == inputs.shape == () and inputs > 0
            exact = source[name].bfloat16().float() / scale
            nearest = (exact.to(torch.float8_e4m3fn).float() - exact).abs()
            assert bool(((tensor.float() - exact).abs() <= nearest * (1 + 1e-5) + 1e-6).all()), name
        elif not name.endswith("_scale"):
            assert torch.equal(tensor, source[name].bfloat16()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_other_families_are_quantised_and_biases_are_not(made: Made, family: str) -> None:
    before, after = load_file(made.source(family) / "model.safetensors"), made.tensors(family)
    assert {name for name in after if not name.endswith("_scale")} == before.keys()
    stored = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    assert stored == {name for name in before if name.endswith("_proj.weight")} and len(stored) == 2 * 7
    biases = {name for name in before if name.endswith("bias")}
    assert len(biases) == (2 * 3 if family == "qwen2" else 0)
    for name in before.keys() - stored:
        assert torch.equal(after[name], before[name].bfloat16()), name
    for name in stored:
        exact = before[name].bfloat16().float() / after[name.replace("weight", "weight_scale")]
        assert torch.allclose(after[name].float(), exact, rtol=1 / 16, atol=2**-9), name


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_vllm_fuses_share_a_scale(made: Made, kind: str):
    tensors, source = made.tensors(kind), {}
    for file in made.source(kind).glob("*.safetensors"):
        source |= load_file(file)
    groups = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
    experts = [f"mlp.experts.{expert}" for expert in range(4)] if kind == "moe" else ["mlp"]
    groups += [(f"{expert}.gate_proj", f"{expert}.up_proj") for expert in experts]
    for group in groups:
        names = [f"model.layers.1.{name}" for name in group]
        for which in ("weight_scale", "input_scale"):
            assert len({float(tensors[f"{name}.{which}"]) for name in names}) == 1, names
        largest = max(float(source[f"{name}.weight"].bfloat16().abs().max()) for name in names)
        assert float(tensors[f"{names[0]}.weight_scale"]) == pytest.approx(largest / LARGEST, rel=1e-6)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_logit_error_is_that_of_the_files(made: Made, kind: str):
    path = made.root / "rows.jsonl"
    rows = read_rows(DataConfig(train=path), AutoTokenizer.from_pretrained(made.source(kind)), 24)
    (batch,) = pack(rows.held_out)
    before, after, comparison = load(made.source(kind)), by_hand(made, kind), LogitComparison()
    with torch.no_grad():
        comparison.add(*(model(**batch.arguments(model.device)).logits[0] for model in (before, after)))
    found, expected = made.report(kind)["logits"], comparison.result()
    assert found["tokens"] == expected.tokens
    for name in ("max_abs", "mean_abs", "kl", "original_rms"):
        assert found[name] == pytest.approx(getattr(expected, name), rel=0.05), name
    assert found["top1_agreement"] == pytest.approx(expected.top1_agreement, abs=2 / expected.tokens)
    assert 0 < found["mean_abs"] < 0.3 * found["original_rms"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_summary_has_rows_and_bytes(made: Made, kind: str):
    report = made.report(kind)
    assert report["calibration"] | {"file": None, "tokens": None} == {
        "file": None, "rows": 24, "tokens": None, "skipped_rows": 1, "held_out_rows": 8,
    }  # fmt: skip
    assert report["weight_bytes_before"] == check_hf_dir(made.source(kind)).num_bytes
    assert report["weight_bytes_after"] == (made.target(kind) / "model.safetensors").stat().st_size
    assert report["logits"]["kl"] > 0
    assert made.said.count("in fp8") == len(KINDS)


def test_a_full_disk_ends_it_in_one_line_and_leaves_nothing(made: Made):
    assert "without room: 1" in made.said
    assert made.said.splitlines()[-1].startswith("error: rank 0: cannot write ")
    assert not list(made.root.glob("*no-room*"))


def test_answers_are_counted_before_and_after(made: Made):
    report = made.report("tied")
    assert report["accuracy_engine"] == "transformers in bf16, FP8 simulated on cpu"
    before, after = (report[f"accuracy_{when}"]["asked"] for when in ("before", "after"))
    assert (before["prompts"], before["right"], before["accuracy"]) == (4, 3, 0.75)
    asked = [json.loads(line) for line in (made.root / "asked.jsonl").read_text().splitlines()]
    answers = greedy(by_hand(made, "tied"), made.source("tied"), [row["question"] for row in asked])
    assert after["right"] == sum(answer == row["answer"] for answer, row in zip(answers, asked, strict=True))
    assert made.report("moe")["accuracy_engine"] is None


def test_the_console_is_clean(made: Made):
    """It holds the tables and one warning per read of the bad row, but nothing from modelopt."""
    chatter = ("UserWarning", "quantizers", "shards", "torch_dtype", "Triton", "Registered", "Loading")
    assert not [line for line in made.said.splitlines() if any(word in line for word in chatter)]
    assert made.said.count("1 not JSON (line 41)") == len(KINDS) + 1


@pytest.mark.nightly
def test_vllm_loads_it_and_computes_with_the_measured_weights(made: Made, tmp_path: Path):
    out = tmp_path / "vllm.json"
    command = [sys.executable, "tests/e2e/quantize_vllm.py", *(str(made.target(kind)) for kind in ("tied", "moe"))]
    switches = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, str(out)], cwd=ROOT, env=environment() | switches, capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    for kind, excluded in (("dense", ["lm_head"]), ("moe", ["lm_head", "mlp.gate"])):
        assert found[kind] == {"quantization": "modelopt", "algorithm": "FP8", "excluded": excluded}
    models = by_hand(made, "tied", torch.float32), load(made.source("tied"), torch.float32)
    same, original = (median_difference(model, found["answers"]) for model in models)
    print(f"vLLM against FP8 by hand {same:.4f}, against the original {original:.4f}")
    # float16 rounds finer than bf16, so most values round to the same E4M3 value; the others differ by a whole step.
    # The distance to the original is the error of FP8 itself.
    assert same < 0.6 * original


@torch.no_grad()
def median_difference(model: PreTrainedModel, answers: list[dict[str, list[float]]]) -> float:
    """Median difference between a model's log-probs of the answers' tokens and the given ones."""
    differences = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *map(int, answer["tokens"])]])
        logprobs = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        differences += (own - torch.tensor(answer["logprobs"])).abs().tolist()
    return median(differences)
