"""The demo's parts and the recipes: sums, teacher, tokenizer, warm start, export check, demo script, configs.

Oracles: arithmetic, a greedy loop on single unpadded prompts, the model's own probabilities.
Not covered: that RL raises the accuracy (the demo shows it), vLLM reading the tokenizer (tests/e2e), and runs of the
recipes for real weights, which need GPUs.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oblr_megatron.checks.layout import check_layout
from oblr_megatron.config import load_config
from oblr_megatron.model.published import published
from oblr_megatron.preflight.device_memory import RankDevice, rank_memory
from oblr_megatron.preflight.examine import check_run
from oblr_megatron.preflight.inputs import write_config
from studies.imitate import IGNORED
from tools.dry_run_presets import step_seconds

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "tiny_cpu"))  # scripts import their neighbours by name
sys.path.insert(0, str(ROOT / "examples"))

import check_export  # noqa: E402
import demo  # noqa: E402
import prepare  # noqa: E402
from accuracy import accuracy, read_rows  # noqa: E402
from sums import Row, lowest_first, make_row, mixed_answer, split_rows  # noqa: E402
from tiny_model import CHARACTERS, build_model, build_tokenizer  # noqa: E402

CONFIGS = [
    "examples/tiny_cpu/config.toml",
    "examples/gsm8k_qwen3_0.6b/config.toml",
    "tools/smoke.toml",
    "examples/tiny_moe_cpu/config.toml",
    "examples/tiny_cpu/paper.toml",
    "examples/tools_cpu/config.toml",
    "examples/guess_cpu/config.toml",
    "examples/smollm2_cpu/config.toml",
    "examples/smollm2_cpu/instructions.toml",
    "examples/smollm2_cpu/problems.toml",
]
RECIPES = {"gsm8k_qwen3_0.6b": "0.6B", "math_qwen3_8b": "8B"}
NUMBERS = re.compile(r"(\d+)\+(\d+)=")


def numbers(row: Row) -> tuple[int, int]:
    found = NUMBERS.fullmatch(row.question)
    assert found, row.question
    return int(found[1]), int(found[2])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of prepare.py with three supervised steps."""
    out = tmp_path_factory.mktemp("tiny")
    run_prepare(out)
    return out


def run_prepare(out: Path, *options: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", "--out", str(out), "--steps", "3", "--threads", "1", *options])
        prepare.main()


def test_every_sum_is_right_and_split_once() -> None:
    train, heldout = split_rows(256, seed=0)
    for row in [*train, *heldout]:
        assert int(row.answer[::-1]) == sum(numbers(row))
    unordered = [{frozenset(numbers(row)) for row in rows} for rows in (train, heldout)]
    assert not unordered[0] & unordered[1], "a + b was seen as b + a"
    assert len(heldout) == len(unordered[1]) == 256
    assert len({row.id for row in train}) == len(train)
    assert unordered[0] | unordered[1] == {frozenset((a, b)) for a in range(10, 100) for b in range(10, 100)}
    assert split_rows(256, seed=0) == (train, heldout) != split_rows(256, seed=1)


def test_lowest_digit_first_keeps_zeros() -> None:
    assert [lowest_first(number) for number in (81, 120, 100, 198)] == ["18", "021", "001", "891"]


def test_teacher_is_right_a_third_of_the_time_and_wrong_in_two_ways() -> None:
    """For 64+87 (two carries): shares within 5 standard deviations, and only the two kinds of mistakes."""
    row, generator = make_row(64, 87), random.Random(0)
    answers = [mixed_answer(row, generator) for _ in range(4000)]
    right, forgotten = answers.count("151") / 4000, answers.count("14") / 4000
    assert right == pytest.approx(0.35, abs=0.04)
    assert forgotten == pytest.approx(0.30, abs=0.04)
    slipped = {answer for answer in answers if answer not in ("151", "14")}
    assert all(len(answer) == 3 and sum(x != y for x, y in zip(answer, "151", strict=True)) == 1 for answer in slipped)
    assert len(slipped) == 27, "every slip of every digit occurs"


def test_forgotten_carries_are_right_where_nothing_is_carried() -> None:
    generator = random.Random(1)
    answers = [mixed_answer(make_row(23, 45), generator) for _ in range(4000)]
    assert answers.count("86") / 4000 == pytest.approx(0.65, abs=0.04)


def test_tokenizer_survives_saving(prepared: Path) -> None:
    """One token per character, decoding adds nothing between them, and AutoTokenizer loads the same tokenizer."""
    fresh, loaded = build_tokenizer(), AutoTokenizer.from_pretrained(prepared / "model")
    config = json.loads((prepared / "model" / "config.json").read_text())
    for tokenizer in (fresh, loaded):
        ids = tokenizer.encode("64+87=151")
        assert len(ids) == 9 and tokenizer.decode(ids) == "64+87=151"
        assert len(set(tokenizer.encode(CHARACTERS))) == len(CHARACTERS)
        assert len(tokenizer) == config["vocab_size"]
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "64+87=151"
        assert tokenizer.encode("?") == [tokenizer.unk_token_id]
    assert loaded.eos_token_id == fresh.eos_token_id == config["eos_token_id"]
    generation = json.loads((prepared / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == fresh.eos_token_id


def test_prepare_is_deterministic(prepared: Path, tmp_path: Path) -> None:
    """The same seed writes the same bytes; another seed writes others."""
    names = ("train.jsonl", "heldout.jsonl", "model/model.safetensors", "model/tokenizer.json", "model/config.json")
    run_prepare(tmp_path / "again")
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (prepared / name).read_bytes(), name
    run_prepare(tmp_path / "other", "--seed", "1")
    for name in names[:3]:
        assert (tmp_path / "other" / name).read_bytes() != (prepared / name).read_bytes(), name


def test_teacher_batch_labels_only_answers() -> None:
    tokenizer = build_tokenizer()
    rows = [make_row(10, 10), make_row(99, 99)]
    input_ids, labels = prepare.teacher_batch(tokenizer, rows, random.Random(0))
    assert (labels[:, :6] == IGNORED).all()
    for line, row in enumerate(rows):
        taught = labels[line] != IGNORED
        assert torch.equal(input_ids[line][taught], labels[line][taught])
        assert input_ids[line][taught][-1] == tokenizer.eos_token_id
        assert tokenizer.decode(input_ids[line][:6]) == row.question
        assert (input_ids[line][6:][~taught[6:]] == tokenizer.pad_token_id).all()


def test_greedy_accuracy_matches_an_unpadded_loop() -> None:
    """Batched generation with left padding on prompts of unequal length gives the answers of an argmax loop."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden=64, layers=2, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # decisive logits
    questions = ["1+2=", "64+87=", "5=", "12+34=", "9+99="]
    answers = [argmax_answer(model, tokenizer, question) for question in questions]
    rows = [{"question": question, "answer": answer} for question, answer in zip(questions, answers, strict=True)]
    assert accuracy(model, tokenizer, rows, batch_size=2) == 1.0
    rows[1]["answer"] += "0"
    assert accuracy(model, tokenizer, rows) == 0.8


def argmax_answer(model: torch.nn.Module, tokenizer, question: str, limit: int = 6) -> str:
    ids = tokenizer.encode(question)
    length = len(ids)
    while len(ids) < length + limit and ids[-1] != tokenizer.eos_token_id:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[length:], skip_special_tokens=True)


def test_sampled_accuracy_is_the_model_s_probability() -> None:
    """The share of right samples equals exp(log pi(answer)) within 4 standard deviations."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden=64, layers=2, seed=0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    row = {"question": "64+87=", "answer": argmax_answer(model, tokenizer, "64+87=", limit=1)}
    prompt = tokenizer.encode(row["question"])
    ids = torch.tensor([[*prompt, *tokenizer.encode(row["answer"])]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    answer = ids[0, len(prompt) :].tolist()
    expected = float(torch.stack([logprobs[len(prompt) - 1 + k, token] for k, token in enumerate(answer)]).sum().exp())
    count = 4000
    measured = accuracy(model, tokenizer, [row], samples=count, seed=0, max_new_tokens=len(answer))
    assert 0.01 < expected < 0.99
    assert abs(measured - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    assert measured == accuracy(model, tokenizer, [row], samples=count, seed=0, max_new_tokens=len(answer))


@pytest.mark.parametrize(("tp", "pp", "ranks"), [(1, 1, 2), (2, 2, 4)])
def test_tiny_model_fits_the_layouts(prepared: Path, tp: int, pp: int, ranks: int) -> None:
    overrides = [f"parallel.tensor_model_parallel_size={tp}", f"parallel.pipeline_model_parallel_size={pp}"]
    config = load_config(ROOT / CONFIGS[0], overrides)
    hf_config = json.loads((prepared / "model" / "config.json").read_text())
    check_layout(hf_config, config, ranks)
    assert hf_config["num_key_value_heads"] < hf_config["num_attention_heads"]
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens <= hf_config["max_position_embeddings"]


@pytest.mark.parametrize("path", CONFIGS)
def test_configs_are_valid(path: str) -> None:
    config = load_config(ROOT / path)
    assert config.model.path.name, path
    assert "{question}" in config.data.template


def test_the_papers_recipe_is_sgd_without_clipping_in_the_theorems_unit() -> None:
    config = load_config(ROOT / "examples/tiny_cpu/paper.toml")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.clip_grad) == ("sgd", 1e-2, 0)
    assert (config.algo.baseline, config.algo.schedule, config.token_scale) == ("optimal", "snr", 1)
    assert (config.algo.snr.exponent, config.algo.snr.reference) == (1, "one")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_model_and_states_its_cost(name: str) -> None:
    """On one node of 8 GPUs. The README has the dry run's memory and the planner's time of a step."""
    size, folder = RECIPES[name], ROOT / "examples" / name
    config = load_config(folder / "config.toml")
    model = published(size)
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens <= model["max_position_embeddings"]
    device = RankDevice(on_gpu=True, num_bytes=80 * 10**9, transformer_engine=True)
    decided = check_run(model, config, 8, 8, device)
    assert (decided.algo.baseline, decided.algo.schedule, decided.gradnorm.mode) == ("pooled", "constant", "inline")
    memory = rank_memory(model, decided, 8, device)
    assert max(one.peak for one in memory) < 0.95 * device.num_bytes
    training, sampling = (max(getattr(one, name) for one in memory) / 1e9 for name in ("training", "rollout"))
    step, readme = step_seconds(model, decided, 8), (folder / "README.md").read_text()
    assert f"{training:.0f} GB in training, {sampling:.0f} GB in sampling |" in readme
    assert f"| a step | {step:.0f} s:" in readme and f"{config.num_steps * step / 450:.0f} GPU hours" in readme


def test_the_recipe_of_the_papers_model_has_its_number_of_responses() -> None:
    config = load_config(ROOT / "examples" / "math_qwen3_8b" / "config.toml")
    assert config.num_prompts * config.group_size == 128 * 8
    assert r"within \boxed{}." in config.data.template and not config.data.chat_template


def test_gsm8k_template_asks_for_a_box() -> None:
    """The model gets one backslash, not TOML's two, and generation starts after Qwen3's empty thought."""
    template = load_config(ROOT / CONFIGS[1]).data.template
    assert r"within \boxed{}." in template and r"\\boxed" not in template
    assert template.startswith("<|im_start|>user\n{question}")
    assert template.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.fixture
def finished(prepared: Path, tmp_path: Path) -> Path:
    """A finished run directory, and held-out rows on which the export has a known nonzero accuracy."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    model = AutoModelForCausalLM.from_pretrained(prepared / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    model.save_pretrained(run_dir / "hf")
    tokenizer.save_pretrained(run_dir / "hf")
    rows = read_rows(prepared / "heldout.jsonl")[:50]
    for row in rows[:30]:
        row["answer"] = argmax_answer(model, tokenizer, row["question"])
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"model.path={prepared / 'model'}", f"evaluate.data.heldout={heldout}", "evaluate.samples_per_prompt=2"]
    write_config(load_config(ROOT / CONFIGS[0], [f"run_dir={run_dir}", *keys]))
    return run_dir


def write_metrics(run_dir: Path, greedy: float) -> None:
    records = [
        {"step": 0, "eval/heldout/accuracy": 0.1, "eval/heldout/mean_at_k": 0.2},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "eval/heldout/accuracy": greedy, "eval/heldout/mean_at_k": 0.4},
        {"step": 3, "reward/mean": 0.5},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(("recorded", "status"), [(0.60, 0), (0.61, 0), (0.64, 1), (0.56, 1)])
def test_check_export_compares_greedy_accuracies(
    finished: Path, monkeypatch: pytest.MonkeyPatch, recorded: float, status: int
) -> None:
    """30 of 50 gold answers are the model's own, so its accuracy is 0.60. More than two points away is an error."""
    write_metrics(finished, recorded)
    monkeypatch.setattr(sys, "argv", ["check_export.py", str(finished)])
    assert check_export.main() == status


def test_check_export_needs_an_evaluation(finished: Path) -> None:
    (finished / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with pytest.raises(SystemExit, match="no evaluation"):
        check_export.last_evaluation(finished)


def test_demo_summary(finished: Path) -> None:
    write_metrics(finished, 0.6)
    line, lift = demo.summary("demo", finished, 12.3)
    assert line == "demo: accuracy 20.0% -> 40.0% in 3 steps of 512 responses, 12 s"
    assert lift == pytest.approx(0.2)


def test_demo_shows_the_same_prompts_before_and_after(tmp_path: Path) -> None:
    """The first sampled response to each of the first three prompts; greedy and further ones are left out."""
    (tmp_path / "heldout.jsonl").write_text("".join(f'{{"question": "q{row}"}}\n' for row in range(5)))
    for step in (0, 10, 20):
        items = [
            {"row": row, "kind": kind, "sample": sample, "response": f"{kind} {step} {row} {sample}"}
            for kind, samples in (("greedy", 1), ("sampled", 2))
            for row in (4, 1, 3, 0)
            for sample in range(samples)
        ]
        path = tmp_path / "demo" / "evaluations" / f"step_{step:06d}" / "heldout.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
    shown = [(f"q{row}", f"'sampled 0 {row} 0'", f"'sampled 20 {row} 0'") for row in (4, 1, 3)]
    assert re.findall(r"(q\d)\n +before: (.*)\n +after: +(.*)", demo.responses(tmp_path / "demo")) == shown


def test_demo_clears_only_its_own_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert demo.clear_run(run_dir) is None, "nothing there"
    run_dir.mkdir()
    assert demo.clear_run(run_dir) is None, "an empty directory"
    (run_dir / "logs").mkdir(parents=True)
    assert demo.clear_run(run_dir) is None and not run_dir.exists(), "a run that never started"
    run_dir.mkdir()
    (run_dir / "thesis.txt").write_text("precious")
    for config in (None, "{", "[]", '{"model": {"path": "elsewhere/model"}}'):
        if config is not None:
            (run_dir / "config.json").write_text(config)
        assert str(run_dir) in (demo.clear_run(run_dir) or ""), config
        assert (run_dir / "thesis.txt").read_text() == "precious"
    (run_dir / "config.json").write_text(json.dumps({"model": {"path": str(tmp_path / "model")}}))
    assert demo.clear_run(run_dir) is None and not run_dir.exists()


def test_demo_stops_at_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The failed part's status becomes the demo's, and no further part runs."""
    exits = {"prepare": 0, "train": 3, "report": 0}
    made = [
        (name, [sys.executable, "-c", f"print('ran {name}'); raise SystemExit({code})"]) for name, code in exits.items()
    ]
    monkeypatch.setattr(demo, "parts", lambda *_: made)
    monkeypatch.setattr(sys, "argv", ["demo.py", "tiny_cpu", "--out", str(tmp_path)])
    assert demo.main() == 3
    out, err = capfd.readouterr()
    assert "ran train" in out and "ran report" not in out
    assert err.splitlines()[-1] == "error: demo stopped: train ended with status 3"


@pytest.mark.parametrize("recipe", demo.DEMOS)
def test_demo_s_commands_parse(recipe: str, tmp_path: Path) -> None:
    """With another --out, the overrides name existing fields and all paths lie below it."""
    train = dict(demo.parts(recipe, tmp_path, 2, ["num_steps=2"]))["train"]
    overrides = [argument for argument in train if re.fullmatch(r"[a-z_.]+=.*", argument)]
    config = load_config(ROOT / "examples" / recipe / "config.toml", overrides)
    assert config.num_steps == 2
    sources = [*config.data.train, *config.evaluate.data.values()]
    paths = [config.run_dir, config.model.path, *(source.path for source in sources)]
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)
