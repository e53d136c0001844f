"""Helpers for tests of studies: result directories as a backend writes them, and a fake backend that takes no time.

This module imports no torch, so that a test's subprocess starts fast. `WORKER` is a real process that writes real
files; its accuracies come from a formula and mean nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.jobs import Ended, Job, run_jobs, to_do
from studies.results import ASKED_FILE, Key
from studies.sweep import Cell

if TYPE_CHECKING:
    import pytest

WORKER = '''
"""Accuracy is best at lr = 1e-3 and at G = 2. The file $ORDERS, if it exists, says when to fail, die or wait."""
import json, math, os, signal, sys, time
from pathlib import Path
from oblr_megatron.runtime.processes import die_with

die_with(os.getppid())
config = json.loads(Path(sys.argv[1]).read_text())["config"]
run_dir, task = Path(config["run_dir"]), config["task"]
orders = json.loads(Path(os.environ.get("ORDERS", os.devnull)).read_text() or "{}").get(run_dir.name, {})
best = max(0.0, 0.5 - 0.2 * abs(math.log10(config["optimizer"]["lr"]) + 3) + 0.05 * (config.get("group_size") == 2))
with (run_dir / "metrics.jsonl").open("w") as file:
    for step in range(config["num_steps"] + 1):
        if step == orders.get("fail"):
            print("error: it diverged")
            sys.exit(1)
        if step == orders.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == orders.get("wait"):
            time.sleep(600)
        accuracy = 0.2 + best * step / config["num_steps"] + 0.001 * (config["seed"] % 7)
        record = {"step": step, f"eval/{task}/mean_at_k": accuracy, f"eval/{task}/accuracy": accuracy + 0.1}
        file.write(json.dumps(record) + "\\n")
        file.flush()
'''


def key_of(task: str, arm: str, lr: float, seed: int, shape: tuple[int, int] = (16, 8)) -> Key:
    """A run at the default shape of a plan."""
    return Key(task, arm, Cell(*shape, lr), seed)


def worker(directory: Path) -> list[str]:
    """The command of the fake backend."""
    script = directory / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, str(script)]


def config_of(key: Key, out: Path, num_steps: int = 4) -> dict:
    """The fields of a ToyConfig that the result files need."""
    return {
        "task": key.task,
        "run_dir": str(key.run_dir(out)),
        "start_dir": str(out / "start"),
        "seed": key.seed,
        "num_steps": num_steps,
        "algo": {"baseline": "rloo"},
        "optimizer": {"lr": key.cell.lr},
    }


def job_of(tmp_path: Path, seed: int, **config: object) -> Job:
    """A run of the fake backend."""
    key = key_of("sums", "rloo", 1e-3, seed)
    return Job(key, key.run_dir(tmp_path), "toy", config_of(key, tmp_path) | config, worker(tmp_path))


def run(jobs: list[Job], deadline_s: float = 60.0) -> tuple[list[Ended], list[Ended]]:
    """(ended runs, failed runs)."""
    ended: list[Ended] = []
    return ended, run_jobs(to_do(jobs), processes=2, deadline_s=deadline_s, report=ended.append)


def prompts_asked_of_trl(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Token ids of the prompts of each generation, of all trainers of TRL that open from now on."""
    from studies import trl_backend
    from studies.trl_trainer import open_trainer

    asked: list[list[tuple[int, ...]]] = []

    def listening(*arguments: Any) -> Any:
        built = open_trainer(*arguments)
        generate = built._generate_single_turn

        def told(prompt_ids: list[list[int]], *rest: object) -> Any:
            asked.append([tuple(ids) for ids in prompt_ids])
            return generate(prompt_ids, *rest)

        built._generate_single_turn = told
        return built

    monkeypatch.setattr(trl_backend, "open_trainer", listening)
    return asked


def write_run(out: Path, key: Key, accuracy: Sequence[float], *, cut: bool = False) -> Path:
    """Write a toy run with one evaluation per step; `cut` leaves out the last record.

    A step's entropy is that of the policy before its update: 1 minus the accuracy of the evaluation before.
    """
    run_dir, num_steps = key.run_dir(out), len(accuracy) - 1
    run_dir.mkdir(parents=True)
    config = config_of(key, out, num_steps)
    (run_dir / ASKED_FILE).write_text(json.dumps({"backend": "toy", "config": config}))
    names = f"eval/{key.task}/mean_at_k", f"eval/{key.task}/accuracy"
    solved = f"eval/{key.task}/pass_at_k"
    records = [
        {"step": step, names[0]: value, names[1]: value + 0.05, solved: value + 0.1}
        | ({"entropy": 1 - accuracy[step - 1]} if step else {})
        for step, value in enumerate(accuracy)
    ]
    lines = [json.dumps(record) + "\n" for record in (records[:-1] if cut else records)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return run_dir


def write_recipe(directory: Path, dtype: str = "float32") -> Path:
    """Write a tiny random model, rows, a graded reward, and the config of a run that names them; returns the config."""
    from tests.tiny import make_hf_dir

    make_hf_dir(directory / "model", head_dim=32)
    rows = [{"question": f"t{a} t{b}", "answer": f"t{a}"} for a in range(2, 14) for b in range(2, 10)]
    for name, part in (("rows", rows[12:]), ("kept", rows[:12])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (directory / "reward.py").write_text("def ones(response, answer):\n    return min(1.0, response.count('t1') / 2)\n")
    config = directory / "recipe.toml"
    config.write_text(f"""
run_dir = "unused"
num_prompts = 8
[model]
path = "{directory}/model"
dtype = "{dtype}"
[data]
train = "{directory}/rows.jsonl"
max_prompt_tokens = 8
[parallel]
micro_batch_tokens = 56
[rollout]
max_response_tokens = 6
kv_cache_gib = 0.1
[reward]
name = "{directory}/reward.py:ones"
[evaluate]
data = {{ kept = "{directory}/kept.jsonl" }}
""")
    return config


def recipe_plan(recipe: Path) -> str:
    """A plan of the task "words", which is that recipe: ours and TRL's GRPO, at one shape and one rate."""
    return f"""
tasks = ["words"]
seeds = 1
num_steps = 2
shapes = ["4x4"]
evaluate_every = 1
evaluation_samples = 2
model.make_vocab_size_divisible_by = 4
reference = "pooled"
learning_rates = [1e-3]
[recipes]
words = "{recipe}"
[defaults]
algo.schedule = "constant"
[arms.pooled]
backend = "train"
[arms.lora]
backend = "train"
model.lora.rank = 4
[arms.trl_grpo]
peer = true
backend = "trl_grpo"
algo.preset = "grpo"
"""
