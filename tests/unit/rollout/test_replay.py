"""Saved steps as files, and the checks before a replay starts.

Not covered: a run saved and replayed as a whole, on one rank and on two (tests/e2e/test_replay.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oblr_megatron.config import Config, parse_config
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.errors import BrokenStepError, RunError, UnwrittenError, UserError
from oblr_megatron.rollout.replay import ReplayEngine, check_replay
from oblr_megatron.rollout.step_file import SavedStep, read_step, step_path, write_step
from oblr_megatron.types import RECORDED, Prompt, Sample
from tests.unit.configs import config_with

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCAB = 40
ONE_RANK: Any = SimpleNamespace(rank=0)


def saved_step(step: int = 1, num_prompts: int = 2, group_size: int = 2, **changes: Any) -> SavedStep:
    """Log-probs as an engine returns them: fp32 values as Python floats."""
    draw = np.random.default_rng(step)
    prompts = [
        Prompt(41 + q, f"gsm8k-{q}", f'"{q}" + π\n=', (5, 9, 2 + q), "½", "a,b", "1%", f'{{"level": {q}}}')
        for q in range(num_prompts)
    ]
    samples = []
    for n in range(num_prompts * group_size):
        prompt, length = prompts[n // group_size], 1 + n % 3
        logprobs = tuple(np.log(draw.random(length, dtype=np.float32)).astype(float).tolist())
        ids = tuple(draw.integers(0, VOCAB, length).tolist())
        reason = "stop" if n % 2 else "length"
        samples.append(Sample(n // group_size, prompt.token_ids, ids, logprobs, "té\0xt", reason, step - 1))
    samples[1] = replace(samples[1], mask=(True, False), environment_reward=0.25)
    samples[2] = replace(samples[2], routes=routes_of(samples[2]), recorded=recorded_of(samples[2]))
    rewards = draw.random(len(samples)).tolist()
    whole = SavedStep(step, 1.0, epoch=3, skipped=4, prompts=prompts, samples=samples, rewards=rewards, filters={})
    return replace(whole, **changes)


def recorded_of(sample: Sample) -> NDArray[np.void]:
    recorded = np.zeros((len(sample.response_ids), 4), RECORDED)
    recorded["id"], recorded["logprob"] = np.arange(4), np.linspace(-5, -1 / 3, recorded.size).reshape(recorded.shape)
    return recorded


def routes_of(sample: Sample) -> NDArray[np.int16]:
    """Of 3 layers with 2 of 300 experts."""
    tokens = len(sample.prompt_ids) + len(sample.response_ids)
    routes = np.random.default_rng(tokens).integers(0, 300, (tokens, 3, 2)).astype(np.int16)
    routes[-1] = -1
    return routes


def config_of(directory: Path, *overrides: str) -> Config:
    counts = {"num_steps": 2, "num_prompts": 2, "group_size": 2, "algo": {"snr": {"num_folds": 2}}}
    rollout = {"replay": str(directory), "max_response_tokens": 4}
    return config_with(*overrides, **counts, data={"max_prompt_tokens": 4}, rollout=rollout)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (1, 2):
        write_step(tmp_path / "rollouts", saved_step(step))
    return tmp_path / "rollouts"


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    saved = saved_step(7, num_prompts=3, group_size=4)
    path = write_step(tmp_path / "a" / "rollouts", saved)
    assert path == tmp_path / "a" / "rollouts" / "step_000007.parquet"
    read = read_step(path)
    assert read == saved
    for before, after in zip(saved.samples, read.samples, strict=True):  # == leaves routes out
        assert (before.routes is None) == (after.routes is None)
        if before.routes is not None and after.routes is not None:
            assert after.routes.dtype == np.int16 and np.array_equal(before.routes, after.routes)
        assert (before.recorded is None) == (after.recorded is None)
        if before.recorded is not None and after.recorded is not None:
            assert before.recorded.dtype == after.recorded.dtype and np.array_equal(before.recorded, after.recorded)
    assert [child.name for child in path.parent.iterdir()] == [path.name], "no partial file is left"


def test_large_routes_are_written_a_few_rows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page and a dictionary end at 2 GiB, which pyarrow tests after each batch. By default it has 1,024 rows."""
    written = pq.write_table
    sizes = []

    def write_table(table: pa.Table, *arguments: Any, write_batch_size: int, **options: Any) -> None:
        sizes.append(write_batch_size)
        written(table, *arguments, write_batch_size=write_batch_size, **options)

    monkeypatch.setattr(pq, "write_table", write_table)
    saved = saved_step(7, num_prompts=3, group_size=4)
    assert read_step(write_step(tmp_path, saved)) == saved
    routes = np.zeros((4, 2**20, 4), np.int16)  # 32 MiB
    samples = [*saved.samples[:-1], replace(saved.samples[-1], routes=routes)]
    write_step(tmp_path, replace(saved, samples=samples))
    assert sizes == [1024, 8]


def test_what_arrow_cannot_write_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(table: pa.Table, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(UnwrittenError, match="the samples of step 7: array cannot contain"):
        write_step(tmp_path, saved_step(7))
    assert not list(tmp_path.iterdir())


def test_odd_values_survive(tmp_path: Path) -> None:
    saved = saved_step()
    samples = [replace(saved.samples[0], response_ids=(), logprobs=(), text=""), *saved.samples[1:]]
    samples[1] = replace(samples[1], logprobs=(-math.inf,) * len(samples[1].logprobs))
    saved = replace(saved, samples=samples, rewards=[-0.0, 1e300, -math.inf, 0.1])
    assert read_step(write_step(tmp_path, saved)) == saved


def test_other_programs_can_read_it(directory: Path) -> None:
    table = pq.read_table(step_path(directory, 1))
    assert table.schema.field("logprobs").type.value_type == pa.float32()
    assert table.schema.field("response_ids").type.value_type == pa.int32()
    assert table.column("reward").to_pylist() == saved_step(1).rewards
    assert table.column("answer").to_pylist() == ["½"] * 4


def test_a_disk_that_takes_nothing_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    with pytest.raises(RunError, match="cannot write the samples of step 1"):
        write_step(tmp_path / "rollouts", saved_step())


def test_a_text_that_no_file_can_hold_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    saved = saved_step()
    odd = replace(saved.prompts[0], text="half of a pair: \ud83d")
    with pytest.raises(UnwrittenError, match=r"cannot write the samples of step 1: .*surrogates not allowed"):
        write_step(tmp_path, replace(saved, prompts=[odd, *saved.prompts[1:]]))
    assert not list(tmp_path.iterdir())


def test_a_replay_hands_out_the_steps_in_order(directory: Path) -> None:
    engine = ReplayEngine(config_of(directory), ONE_RANK)
    request = SamplingRequest(group_size=2, temperature=1.0, max_tokens=4, seed=0)
    for step in (1, 2):
        saved = saved_step(step)
        prompts = engine.next_prompts(2)
        assert prompts == saved.prompts and engine.generate(prompts, request) == saved.samples
        assert (engine.epoch, engine.num_skipped) == (3, 4)
        engine.push(None, step)  # type: ignore[arg-type]  # not used
        assert engine.version == step
    assert engine.metrics() == {}


def test_a_file_that_goes_away_during_the_run_ends_it(directory: Path) -> None:
    check_replay(config_of(directory), VOCAB)
    engine = ReplayEngine(config_of(directory), ONE_RANK)
    engine.next_prompts(2)
    step_path(directory, 2).unlink()
    with pytest.raises(BrokenStepError, match=r"\[.*step_000002.parquet\]"):
        engine.next_prompts(2)


def refusal(directory: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_replay(config_of(directory, *overrides), VOCAB)
    assert "\n" not in str(caught.value) and caught.value.fix
    return str(caught.value)


def test_good_files_are_taken(directory: Path) -> None:
    check_replay(config_of(directory), VOCAB)
    check_replay(config_of(directory, "num_steps=1"), VOCAB)  # more steps than needed


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("num_steps=3", ("step 3 of 3", "num_steps to 2")),
        ("num_prompts=4", ("num_prompts 2,", "has 4")),
        ("rollout.top_p=0.9", ("saved with no filter", "has top_p 0.9")),
        ("group_size=3", ("group_size 2,", "has 3")),
        ("rollout.temperature=0.7", ("rollout.temperature 1.0,", "has 0.7")),
        ("rollout.max_response_tokens=1", (" 6 tokens", " 5")),
    ],
)
def test_a_run_of_another_shape_is_refused(directory: Path, override: str, expected: tuple[str, str]) -> None:
    message = refusal(directory, override)
    assert all(part in message for part in expected) and ".parquet" in message


def test_missing_and_empty_directories(tmp_path: Path) -> None:
    assert f"[{tmp_path / 'nowhere'}]" in refusal(tmp_path / "nowhere")
    assert f"[{step_path(tmp_path, 1)}]" in refusal(tmp_path)


def test_damaged_and_foreign_files(directory: Path) -> None:
    path = step_path(directory, 2)
    good = path.read_bytes()

    place = good.index(b"\x28\xb5\x2f\xfd") + 12  # in the first column's compressed bytes
    flipped = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    for content in (good[:-100], b"", b"not a parquet file, but long enough to look for its end", flipped):
        path.write_bytes(content)
        assert f"[{path}]" in refusal(directory)
    pq.write_table(pa.table({"a": [1]}), path)
    assert f"[{path}]" in refusal(directory)
    path.write_bytes(step_path(directory, 1).read_bytes())
    assert "step 1" in refusal(directory)
    path.write_bytes(good)
    check_replay(config_of(directory), VOCAB)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"logprobs": [[-1.0], [-1.0, -2.0], [-1.0] * 3, [-1.0, -1.0]]}, "sample 3 "),
        ({"group": [0, 1, 0, 1]}, "sample 1 "),
        ({"finish_reason": ["stop", "abort", "stop", "stop"]}, "sample 1 "),
        ({"answer": ["½", "2", "½", "½"]}, "sample 1 "),
        ({"mask": [[], [True], [], []]}, "sample 1 "),
    ],
)
def test_inconsistent_rows(directory: Path, edit: dict[str, list[Any]], expected: str) -> None:
    path = step_path(directory, 1)
    table = pq.read_table(path)
    for name, values in edit.items():
        position = table.schema.get_field_index(name)
        field = table.schema.field(name)
        table = table.set_column(position, field, pa.array(values, type=field.type))
    pq.write_table(table, path)
    assert expected in refusal(directory)


def test_other_columns_and_other_schema_versions(directory: Path) -> None:
    path = step_path(directory, 1)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["reward"]), path)
    assert f"[{path}]" in refusal(directory)
    pq.write_table(table.slice(0, 3), path)
    assert "3 samples instead of 2 x 2" in refusal(directory)
    facts = {b"oblr_rollouts": table.schema.metadata[b"oblr_rollouts"].replace(b'sion": 1', b'sion": 2')}
    pq.write_table(table.replace_schema_metadata(facts), path)
    assert "version 2, but only 1 " in refusal(directory)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logprobs": (5.0,)}, "log-prob 5"),
        ({"logprobs": (0.002,)}, "log-prob 0.002"),
        ({"logprobs": (math.nan,)}, "log-prob nan"),
        ({"logprobs": (-math.inf,)}, "log-prob -inf"),
        ({"logprobs": (-1e30,)}, "log-prob -1e+30"),
        ({"response_ids": (), "logprobs": ()}, "no tokens"),
    ],
)
def test_samples_that_no_engine_draws(directory: Path, changes: dict[str, Any], named: str) -> None:
    saved = saved_step(2)
    samples = [*saved.samples[:3], replace(saved.samples[3], response_ids=(1,), logprobs=(-1.0,))]

    def write(**last: Any) -> None:
        write_step(directory, replace(saved, samples=[*samples[:3], replace(samples[3], **last)]))

    write(**changes)
    assert f"saved sample 3 has {named} " in refusal(directory)
    for possible in (1e-6, -103.0):
        write(logprobs=(possible,))
        check_replay(config_of(directory), VOCAB)


def test_an_episode_may_have_no_tokens(directory: Path) -> None:
    saved = saved_step(2)
    empty = replace(saved.samples[3], response_ids=(), logprobs=())
    write_step(directory, replace(saved, samples=[*saved.samples[:3], empty]))
    assert "no tokens" in refusal(directory)
    environment = {"environment": {"function": "tests.e2e.environments:turns"}}
    config = config_of(directory)
    table = config.model_dump(mode="json")
    check_replay(parse_config(table | {"rollout": table["rollout"] | environment}), VOCAB)


def test_samples_of_another_model(directory: Path) -> None:
    write_step(directory, saved_step(2, model="3f0c7a"))
    check_replay(config_of(directory), VOCAB, "3f0c7a")
    check_replay(config_of(directory), VOCAB)  # the weights are not on this machine
    with pytest.raises(UserError, match=r"3f0c7a.*9a1b22") as caught:
        check_replay(config_of(directory), VOCAB, "9a1b22")
    assert caught.value.where == str(step_path(directory, 2)) and "model.path" in caught.value.fix
    check_replay(config_of(directory, "num_steps=1"), VOCAB, "9a1b22")  # saved without a fingerprint


@pytest.mark.parametrize(
    "facts", [b"", b"[]", b'{"schema_version": 1}', b'{"schema_version": [2]}', b"\xff", b"[" * 100_000]
)
def test_damaged_facts(directory: Path, facts: bytes) -> None:
    path = step_path(directory, 1)
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"oblr_rollouts": facts}), path)
    assert f"[{path}]" in refusal(directory)


@pytest.mark.parametrize("fact", ["num_prompts", "group_size", "step", "temperature", "epoch", "skipped", "position"])
@pytest.mark.parametrize("value", ["null", '"x"', "[]", "1e999", "-1"])
def test_facts_of_the_wrong_kind(directory: Path, fact: str, value: str) -> None:
    path = step_path(directory, 1)
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"oblr_rollouts"]) | {fact: "MARK"}
    written = json.dumps(facts).replace('"MARK"', value)
    pq.write_table(table.replace_schema_metadata({b"oblr_rollouts": written}), path)
    assert f"[{path}]" in refusal(directory)


def test_routing_replay_needs_files_with_routes(directory: Path) -> None:
    replays = ("model.moe_routing_replay=true", "num_steps=1")
    with pytest.raises(UserError, match="without the engine's routes") as caught:
        check_replay(config_of(directory, *replays), VOCAB)
    assert caught.value.where == str(step_path(directory, 1))
    saved = saved_step(1)
    complete = replace(saved, samples=[replace(sample, routes=routes_of(sample)) for sample in saved.samples])
    write_step(directory, complete)
    check_replay(config_of(directory, *replays), VOCAB)
    for overrides, kept in ((replays, True), ((), False)):
        engine = ReplayEngine(config_of(directory, *overrides), ONE_RANK)
        request = SamplingRequest(group_size=2, temperature=1.0, max_tokens=4, seed=0)
        assert all((one.routes is not None) == kept for one in engine.generate(engine.next_prompts(2), request))


def test_centering_needs_files_with_recorded_tokens(directory: Path) -> None:
    with pytest.raises(UserError, match="most likely tokens"):
        check_replay(config_of(directory, "algo.center=true", "num_steps=1"), VOCAB)
    saved = saved_step(1)
    write_step(directory, replace(saved, samples=[replace(one, recorded=recorded_of(one)) for one in saved.samples]))
    check_replay(config_of(directory, "algo.center=true", "num_steps=1"), VOCAB)


@pytest.mark.parametrize("shape", [None, [3], [3, 2, 2], "x", [2**70, 2], [-1, 5]])
def test_routes_of_another_shape(directory: Path, shape: object) -> None:
    path = step_path(directory, 1)
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"oblr_rollouts"]) | {"routes": shape}
    pq.write_table(table.replace_schema_metadata({b"oblr_rollouts": json.dumps(facts)}), path)
    assert "saved routes do not fit" in refusal(directory)


def test_a_failed_episode_has_no_tokens(directory: Path) -> None:
    saved = saved_step(1)
    failed = replace(saved.samples[0], response_ids=(), logprobs=(), text="", finish_reason="late")
    write_step(directory, replace(saved, samples=[failed, *saved.samples[1:]]))
    check_replay(config_of(directory), VOCAB)


def test_a_reward_that_takes_columns_needs_samples_that_have_them(directory: Path) -> None:
    reward = "reward.name=tests.unit.processes.scorers_many:by_level"
    check_replay(config_of(directory, reward), VOCAB)
    saved = saved_step(2)
    write_step(directory, replace(saved, prompts=[replace(prompt, columns="") for prompt in saved.prompts]))
    check_replay(config_of(directory), VOCAB)
    assert "step_000002.parquet" in refusal(directory, reward) and "data.keep_columns" in refusal(directory, reward)


def test_tokens_of_another_vocabulary_and_other_ages(directory: Path) -> None:
    saved = saved_step(2)
    samples = [*saved.samples[:-1], replace(saved.samples[-1], prompt_ids=saved.prompts[1].token_ids)]
    ids = (VOCAB,) * len(samples[-1].response_ids)
    samples[-1] = replace(samples[-1], response_ids=ids)
    write_step(directory, replace(saved, samples=samples))
    assert f"token {VOCAB}, " in refusal(directory)
    check_replay(config_of(directory), VOCAB + 1)

    old = [replace(sample, version=0) for sample in saved.samples]
    write_step(directory, replace(saved, samples=old))
    assert "version 0, 1 updates before" in refusal(directory)
    check_replay(config_of(directory, "rollout.max_staleness=1"), VOCAB)
    write_step(directory, replace(saved, samples=[replace(sample, version=2) for sample in saved.samples]))
    assert "version 2, but the trainer is at version 1" in refusal(directory, "rollout.max_staleness=9")


@pytest.mark.parametrize(
    "overrides",
    [("rollout.only=true",), ("rollout.servers=['http://h:1']",), ("rollout.dynamic_sampling=true", "group_size=1")],
)
def test_settings_that_exclude_each_other(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"exclude each other|group_size is 1"):
        config_of(tmp_path, *overrides, 'algo.baseline="none"')
