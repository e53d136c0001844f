"""Configuration: each mistake ends in one line with the key, the value and the fix; each field is documented and read.

Not covered: what a field does. The tests of the code that reads it cover that.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

import oblr_megatron
from oblr_megatron.config import Config, load_config, parse_config
from oblr_megatron.config.baselines import BASELINES
from oblr_megatron.config.checks import EVALUATED, biases
from oblr_megatron.config.section import LONGEST_WAIT_S, Section, is_section, section_in
from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.accuracy import Grade, Grades, metrics

OF_GROUP = [name for name, facts in BASELINES.items() if facts.needs_group]
OF_BATCH = [name for name, facts in BASELINES.items() if facts.over == "batch"]
STREAM, ONE_STEP = "rollout.overlap=stream", "rollout.overlap=one_step"

HERE, COMMAND_LINE = "c.toml", "command line"
MINIMAL: dict[str, Any] = {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
TOML = 'run_dir = "run"\n[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n'
PACKAGE = Path(oblr_megatron.__file__).parent


def refused(overrides: list[str], table: dict[str, Any] = MINIMAL) -> UserError:
    before = json.dumps(table)
    with pytest.raises(UserError) as caught:
        parse_config(table, HERE, overrides)
    assert "\n" not in str(caught.value) and caught.value.fix
    assert json.dumps(table) == before, "the table was changed"
    return caught.value


def test_the_minimal_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(TOML)
    config = load_config(path, ["optimizer.lr=3e-4", "rollout.num_engines=2", "reward.name=math", "algo.snr.horizon=9"])
    assert config.run_dir == Path("run") and [source.path for source in config.data.train] == ["t.jsonl"]
    assert (config.optimizer.lr, config.rollout.num_engines) == (3e-4, 2)
    assert (config.reward.name, config.algo.snr.horizon) == ("math", 9)


@pytest.mark.parametrize(("name", "content"), [("c.toml", TOML), ("config.json", json.dumps(MINIMAL))])
def test_a_byte_order_mark_is_no_part_of_a_config(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert load_config(tmp_path / name) == parse_config(MINIMAL)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config(MINIMAL).num_steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algo.baselin=rloo", ["'algo.baselin'", "did you mean 'baseline'?"]),
        ("algo.snr.zzz=1", ["'algo.snr.zzz'", "known keys here: estimator"]),
        ("optimiser.lr=1", ["'optimiser'", "did you mean 'optimizer'?"]),
        ("num_steps=many", ["num_steps = 'many'"]),
        ("num_steps=1.5", ["num_steps = 1.5"]),
        ("num_steps=0", ["num_steps = 0", "greater than or equal to 1"]),
        ("optimizer.lr=0", ["optimizer.lr = 0", "greater than 0"]),
        ("rollout.top_p=1.5", ["rollout.top_p = 1.5", "less than or equal to 1"]),
        ("algo.baseline=best", ["algo.baseline = 'best'", "'optimal'"]),
        ("algo.snr.max_change=1", ["algo.snr.max_change = 1"]),
        ("rollout.num_engines=0", ["rollout.num_engines = 0"]),
        ("rollout.save=perhaps", ["rollout.save = 'perhaps'"]),
        ("evaluate.data.set=5", ["evaluate.data.set = 5"]),
        ("model=5", ["model = 5"]),
        ("num_steps", ["'num_steps' is not section.key=value"]),
        ("=5", ["'=5' is not section.key=value"]),
        ("run_dir.x=5", ["'run_dir' is a value, not a section"]),
        ("rollout.vllm=5", ["dictionary"]),
        *[  # nothing is converted: quoted numbers, truth values, infinities; temperatures that vLLM raises or refuses
            (override, [override.partition("=")[0]])
            for override in (
                *('group_size="8"', "num_steps=true", "optimizer.lr=inf", "data.shuffle=1", "seed=nan"),
                *("rollout.temperature=0.001", "rollout.temperature=2.1", "evaluate.temperature=2.1"),
            )
        ],
    ],
)
def test_bad_values(override: str, named: list[str]) -> None:
    error = refused([override])
    assert error.where == COMMAND_LINE and all(part in str(error) for part in named), error
    assert override != "rollout.vllm=5" or "quotes" not in str(error)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["parallel.sequence_parallel=true"], "sequence_parallel needs tensor_model_parallel_size of 2 or more"),
        (["num_prompts=6", "algo.snr.num_folds=4"], "num_prompts 6 "),
        (["data.template=Q:"], "'Q:' has no {question}"),
        (["data.system_prompt=Be brief."], "data.system_prompt is for the tokenizer's chat template"),
        (["data.chat_template_options={enable_thinking = false}"], "data.chat_template_options is for the tokenizer's"),
        (["evaluate.data={'a/b' = 'x.jsonl', a__b = 'y.jsonl'}"], "names must have 1 to 200 bytes, and differ"),
        (["evaluate.data={'' = 'x.jsonl'}"], "names must have 1 to 200 bytes"),
        (['evaluate.data={"a\\u0000b" = "x.jsonl"}'], "control characters are refused"),
        (["run_dir=out/\udcff"], "the path is not UTF-8"),
        (["group_size=9223372036854775807"], "less than or equal to 1048576"),
        (["evaluate.every_steps=5"], "evaluate.every_steps is 5, but evaluate.data names no set"),
        (["rollout.rejection_low=0.5"], "rollout.rejection_low and rejection_high are the band of rollout.rejection"),
        (["rollout.push_timeout_s=60", "parallel.distributed_timeout_s=60"], "rollout.push_timeout_s 60 is not below"),
        (["optimizer.offload=sampling", "optimizer.name=sgd"], "has nothing to move"),
        (["gradnorm.sample_fraction=0.5", "algo.snr.estimator=samples"], "needs the norm of every response"),
        (["algo.baseline=rloo", "algo.snr.estimator=samples"], "baseline 'rloo' measures none"),
        (["gradnorm.source=logit", "algo.snr.estimator=samples"], "needs gradient norms"),
        (["checkpoint.best_metric=eval/a/accuracy"], "checkpoint.best_metric 'eval/a/accuracy'"),
        (["checkpoint.best_metric=eval/a/loss", "evaluate.data.a=a.jsonl"], "eval/a/accuracy, eval/a/mean_at_k, eval"),
        (["checkpoint.best_metric=eval/a/pass_at_k", "evaluate.data.a=a.jsonl"], "but evaluate.every_steps is 0"),
        *[
            (
                ["checkpoint.best_metric=eval/a/maj_at_k", "evaluate.data.a=a.jsonl", f"reward.name={name}"],
                "'eval/a/maj_at_k' is never measured",
            )
            for name in ("format", "mine.py:score", "http://a:1")
        ],
        (["data.exclude=[{path = 'a.jsonl', weight = 2.0}]"], "'a.jsonl' has a weight"),
        (
            [
                *("checkpoint.best_metric=eval/a/accuracy", "evaluate.data.a=a.jsonl", "evaluate.every_steps=1"),
                "rollout.replay=samples",
            ],
            "a replay (rollout.replay) evaluates nothing",
        ),
        *[
            (["model.lora.rank=8", "model.dtype=bfloat16", override], f"model.lora does not support {named}")
            for override, named in (("model.fp8=e4m3", "model.fp8"), ("model.moe_z_loss_coeff=0.1", "a router loss"))
        ],
        (["model.lora.alpha=16"], "model.lora.alpha is set, but model.lora.rank is 0"),
        (["rollout.lora=adapter"], "rollout.lora is set, but model.lora.rank is 0"),
        *[([f"algo.baseline={name}", "group_size=1"], f"baseline '{name}'") for name in OF_GROUP],
        (["data.template=Q:", "data.chat_template=true"], "no {question}"),
        ([ONE_STEP], "max_staleness is 0"),
        ([ONE_STEP, "rollout.max_staleness=1", "rollout.importance_sampling=none"], "not corrected"),
        ([ONE_STEP, "rollout.max_staleness=1", "rollout.replay=saved"], "nothing is sampled"),
        ([ONE_STEP, "rollout.max_staleness=1", "rollout.only=true"], "no gradient is computed"),
        ([STREAM, "rollout.only=true"], "no gradient is computed"),
        (["rollout.min_p=0.1", "rollout.speculation=ngram"], "vLLM refuses min_p when it speculates"),
        (["algo.center=true", "rollout.importance_sampling=sequence"], "later tokens"),
        (["algo.center=true", "rollout.rejection=sequence"], "later tokens"),
        (["algo.center=true", "rollout.rejection=geometric"], "later tokens"),
        (["algo.center=true", "algo.preset=dapo"], "depends on the advantage"),
    ],
)
def test_contradicting_values(overrides: list[str], named: str) -> None:
    assert named in str(refused(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        *(["group_size=1", f"algo.baseline={name}"] for name in BASELINES if name not in OF_GROUP),
        *([STREAM, f"algo.baseline={name}"] for name in BASELINES if name not in OF_BATCH),
        ["num_prompts=6", "algo.snr.num_folds=4", "algo.snr.estimator=prompts"],
    ],
)
def test_values_that_go_together(overrides: list[str]) -> None:
    parse_config(MINIMAL, overrides=overrides)


PATHS = ("run_dir", "model.path", "data.train", "evaluate.data.a", "checkpoint.resume", "rollout.replay")


@pytest.mark.parametrize("path", ["~/runs/a", "~", "$HOME/a", "/scratch/${USER}/a"])
@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_only_a_shell_expands_is_refused(key: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("USER", raising=False)
    message = str(refused([f"{key}={path}"]))
    assert key in message and repr(path) in message and "Fix: write the path out" in message
    assert (": /home/me" in message) == ("USER" not in path)


def test_a_tilde_inside_a_path_is_a_name() -> None:
    assert parse_config(MINIMAL, overrides=["run_dir=runs/a~b/~c"]).run_dir == Path("runs/a~b/~c")


def test_resume_and_best_metric(tmp_path: Path) -> None:
    best = ["evaluate.data.a=a.jsonl", "evaluate.every_steps=1", "checkpoint.best_metric=eval/a/mean_at_k"]
    for resume in ("none", "newest", str(tmp_path), str(tmp_path / "deleted")):  # a config is also read later
        config = parse_config(json.loads(json.dumps(MINIMAL)), overrides=[f"checkpoint.resume={resume}", *best])
        assert config.checkpoint.resume == resume


def test_every_evaluation_metric_may_be_the_best_metric() -> None:
    grade = Grade(verdict=1.0, answer="4", tokens=1, truncated=False)
    assert [*metrics(Grades([grade], [grade], 1))][: len(EVALUATED)] == [*EVALUATED]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], []),
        (["rollout.dynamic_sampling=true", "algo.baseline=optimal"], []),
        (["rollout.dynamic_sampling=true", "algo.baseline=pooled"], ["baseline 'pooled'"]),
        (["rollout.dynamic_sampling=true", "algo.baseline=none"], ["baseline 'none'"]),
        (["rollout.dynamic_sampling=true", "algo.baseline=rloo", "algo.kl_coefficient=0.1"], ["kl_coefficient"]),
        (["rollout.top_p=0.9"], ["top_p 0.9"]),
        (["rollout.top_p=0.9", "rollout.top_k=20", "rollout.environment=m:f"], []),
        (["rollout.min_p=0.1"], ["min_p 0.1"]),
        (["rollout.rejection=token"], ['rollout.rejection "token"']),
        (["rollout.max_staleness=5", "rollout.importance_sampling=none"], ["max_staleness 5 without"]),
        (["rollout.max_staleness=5"], []),
        (["rollout.max_staleness=5", "rollout.importance_sampling=none", "rollout.only=true"], []),
        (["algo.preset=gspo"], ["algo.updates_per_batch 4"]),
        (["algo.preset=gspo", "algo.updates_per_batch=1"], ["preset 'gspo' has no effect"]),
        (
            ["rollout.top_k=2000", "rollout.dynamic_sampling=true", "algo.baseline=none"],
            ["baseline 'none'", "top_k 2000"],
        ),
    ],
)
def test_what_biases_the_gradient_is_said_in_one_line_each(overrides: list[str], said: list[str]) -> None:
    found = list(biases(parse_config(MINIMAL, overrides=overrides)))
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True))


@pytest.mark.parametrize(
    ("estimator", "folds", "prompts", "works"),
    [
        ("folds", 1, 8, False),
        ("plugin", 1, 8, False),
        ("prompts", 1, 1, False),
        ("prompts", 1, 8, True),
        ("momentum", 1, 8, True),
        ("folds", 2, 8, True),
    ],
)
def test_the_snr_schedule_needs_an_estimate_of_the_noise(estimator: str, folds: int, prompts: int, works: bool) -> None:
    batch = [f"algo.snr.estimator={estimator}", f"algo.snr.num_folds={folds}", f"num_prompts={prompts}"]
    overrides = [*batch, "algo.baseline=optimal"]
    parse_config(MINIMAL, overrides=overrides)
    if works:
        parse_config(MINIMAL, overrides=[*overrides, "algo.schedule=snr"])
    else:
        assert "one fold" in str(refused([*overrides, "algo.schedule=snr"]))


def test_a_held_out_set_follows_the_convention_of_its_name() -> None:
    sets = parse_config(MINIMAL, overrides=["evaluate.data={gsm8k='a.jsonl', own='b.jsonl'}"]).evaluate.data
    assert (sets["gsm8k"].convention, sets["own"].convention) == ("gsm8k", "")
    other = parse_config(MINIMAL, overrides=["evaluate.data={gsm8k={path='a.jsonl', convention='math'}}"])
    assert other.evaluate.data["gsm8k"].convention == "math"


def test_a_mixture_has_all_its_weights_or_none() -> None:
    sources = "data.train=[{path='a.jsonl', weight=2.0}, {path='b.jsonl'}]"
    assert "'b.jsonl' has no weight" in str(refused([sources]))
    assert len(parse_config(MINIMAL, overrides=[sources.replace(", weight=2.0", "")]).data.train) == 2


@pytest.mark.parametrize("key", ["run_dir", "model", "data"])
def test_missing_keys(key: str) -> None:
    assert f"{key!r} is missing" in str(refused([], {name: value for name, value in MINIMAL.items() if name != key}))


def test_a_misspelt_required_key_is_not_called_missing() -> None:
    table = {"modle" if name == "model" else name: value for name, value in MINIMAL.items()}
    assert "unknown key 'modle'" in str(refused([], table))


@pytest.mark.parametrize(
    ("content", "named"), [(None, "cannot read"), (b"run_dir = ", "not a TOML file"), (b"\xff", "TOML")]
)
def test_files_that_cannot_be_read(content: bytes | None, named: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=named) as caught:
        load_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_overrides_are_toml_or_else_plain_text() -> None:
    config = parse_config(MINIMAL, overrides=["run_dir = /a b/c", "data.template='{question} ='", "num_steps = 7"])
    assert (str(config.run_dir), config.data.template, config.num_steps) == ("/a b/c", "{question} =", 7)


def fields(section: type[Section], path: str = "config") -> Iterator[tuple[type[Section], str, str]]:
    """(section class, section name, field name) of all fields that are not sections."""
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            yield from fields(inner, name)
        if not is_section(field.annotation):
            yield section, path, name


def keys(section: type[Section] = Config, prefix: str = "") -> list[str]:
    """Every key by its dotted name, e.g. "algo.snr.floor"."""
    return [
        key
        for name, field in section.model_fields.items()
        for key in (keys(field.annotation, f"{prefix}{name}.") if is_section(field.annotation) else [f"{prefix}{name}"])
    ]


WAITS = [key for key in keys() if key.endswith(("timeout_s", "deadline_s"))]


@pytest.mark.parametrize("key", WAITS)
def test_a_deadline_that_no_wait_takes_is_refused(key: str) -> None:
    """`poll` of a pipe raises OverflowError above 2^31 ms."""
    assert f"{key} = 1000000000.0: Input should be less" in str(refused([f"{key}=1e9"]))
    reads, writes = Pipe(duplex=False)
    writes.send(0)
    assert reads.poll(LONGEST_WAIT_S)


def test_every_field_is_documented() -> None:
    undocumented = [(path, name) for owner, path, name in fields(Config) if not owner.model_fields[name].description]
    assert undocumented == []
    assert len(list(fields(Config))) > 60


def reads(tree: ast.Module) -> set[tuple[str, str]]:
    """(section name or class, attribute) of every attribute that a file reads from a config section.

    A section is recognised by its name (`config.reward`, `self._config`), by the annotation of a parameter or field
    (`options: RewardConfig`), or by an assignment (`rollout = self._config.rollout`, tuples included).
    """
    aliases: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else tail(node.target)
            aliases.setdefault(name, set()).update(re.findall(r"\w*Config\b", ast.unparse(node.annotation)))
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]
                for left, right in pairs:
                    aliases.setdefault(tail(left), set()).add(tail(right))
    return {
        (owner, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for owner in {tail(node.value), *aliases.get(tail(node.value), ())}
    }


def tail(node: ast.expr) -> str:
    """The last name of an expression: "rollout" for self._config.rollout, "config" for self._config."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def test_every_field_is_read() -> None:
    """By the package, from its own section, checks of the configuration left out: an unread option would do nothing."""
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent != PACKAGE / "config" or path.name == "run.py":
            found |= reads(ast.parse(path.read_text(encoding="utf-8")))
    unread = [
        f"{path}.{name}" for owner, path, name in fields(Config) if not {(path, name), (owner.__name__, name)} & found
    ]
    assert unread == []


def test_the_search_for_readers_finds_an_unread_field() -> None:
    tree = ast.parse(
        "def f(options: RewardConfig, config):\n    r = config.rollout\n    return options.name, r.top_p, x.lr"
    )
    found = reads(tree)
    assert {("RewardConfig", "name"), ("rollout", "top_p"), ("config", "rollout")} <= found
    assert ("optimizer", "lr") not in found and ("OptimizerConfig", "lr") not in found


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algo.baseline=batch_mean"], "batch_mean"),
        (["algo.preset=reinforce_pp"], "reinforce_pp"),
        (["algo.aggregation=token_mean"], "token_mean"),
        (
            [
                "parallel.overlap_grad_reduce=true",
                "parallel.use_distributed_optimizer=true",
                "algo.baseline=rloo",
                "algo.snr.estimator=momentum",
            ],
            "overlap_grad_reduce",
        ),
    ],
)
def test_a_streamed_step_refuses_what_needs_the_whole_batch(overrides: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_config(MINIMAL, overrides=[STREAM, *overrides])
    assert named in caught.value.what and "stream" in caught.value.what
    parse_config(MINIMAL, overrides=overrides)


def test_a_run_of_one_step_off_says_that_it_is_biased() -> None:
    config = parse_config(MINIMAL, overrides=[ONE_STEP, "rollout.max_staleness=1"])
    [line] = biases(config)
    assert "signal and noise" in line and "cut at 2" in line


def test_none_unsets_what_has_no_default() -> None:
    """As in a run's config.json, which is given with other values."""
    table = MINIMAL | {"rollout": {"replay": "rollouts"}, "log": {"project": "mine"}, "algo": {"preset": "rloo"}}
    config = parse_config(table, overrides=["rollout.replay=none", "log.project=none", "algo.preset=none"])
    assert (config.rollout.replay, config.log.project, config.algo.preset) == (None, None, None)
    own = parse_config(MINIMAL | {"algo": {"baseline": "rloo"}}, overrides=["algo.preset=none"])
    assert own.algo.baseline == "rloo", "no preset, so no key gives way"
