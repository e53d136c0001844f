"""The bound below which drafts pay, tokens that a verified draft keeps, and refusals. No clock: seconds are made up.

Not covered: vLLM's schedulers and samplers (tests/e2e/test_speculation.py).
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable

import pytest
import torch

from oblr_megatron.engine.http_messages import DraftReport
from oblr_megatron.engine.serve_command import spec_of
from oblr_megatron.errors import UserError
from oblr_megatron.extras.speculation import options
from oblr_megatron.extras.speculation.draws import _rewind, _state, keep
from oblr_megatron.extras.speculation.options import BreakEven, check_installed, metrics_of, vllm_options
from tests.unit.engine.test_serve_command import serve_options

DRAFT = 6
Cost = Callable[[int], float]
"""Seconds of a step by the tokens that it computes."""


def memory_bound(tokens: int) -> float:
    """Flat up to 64 tokens, then proportional: as a GPU that reads all weights once a step."""
    return 10e-3 * max(1.0, tokens / 64)


def sample(bound: BreakEven, sequences: int, steps: int, cost: Cost, accepted: float, seed: int = 0) -> int:
    """Take steps of so many sequences, with `accepted` right tokens in the mean draft. Returns steps with drafts."""
    draw, before, with_drafts = random.Random(seed), False, 0
    for _ in range(steps):
        after = bound.choose(sequences)
        computed = sequences * (1 + DRAFT) if before else sequences
        gained = sum(draw.random() < accepted / DRAFT for _ in range(sequences * DRAFT)) if before else 0
        with_drafts += before
        if before == after:
            seconds = cost(computed) * draw.uniform(0.8, 1.2)
            bound.record(sequences, drafts=before, seconds=seconds, tokens=sequences + gained)
        before = after
    return with_drafts


def test_drafts_are_used_up_to_the_size_where_they_stop_paying() -> None:
    """With 2 of 6 tokens accepted a step may take 3 times as long: 7 n tokens cost 3 times n tokens at n = 27."""
    bound = BreakEven(most=255)
    for sequences in (200, 100, 50, 24, 12, 6, 3, 1):  # as a batch shrinks
        sample(bound, sequences, 300, memory_bound, accepted=2.0)
    assert bound.below == 31
    assert sample(bound, 100, 3200, memory_bound, accepted=2.0) < 3200 / 16, "looks again only now and then"
    assert sample(bound, 6, 3200, memory_bound, accepted=2.0) > 3200 * 15 / 16


def test_drafts_that_are_never_right_are_given_up_and_taken_up_again() -> None:
    """A step with drafts costs more at every size here. Later the same text repeats, and all drafts are right."""
    bound = BreakEven(most=8)
    for accepted, expected in ((0.0, 0), (6.0, 1)):
        sample(bound, 1, 20_000, lambda tokens: 10e-3 + 1e-4 * tokens, accepted)
        assert bound.below == expected


def test_one_slow_step_changes_nothing() -> None:
    bound = BreakEven(most=8)
    sample(bound, 2, 200, memory_bound, accepted=2.0)
    assert bound.below == 3
    bound.record(2, drafts=True, seconds=30.0, tokens=2)
    assert bound.below == 3


def test_a_large_size_that_pays_does_not_count_above_one_that_does_not() -> None:
    bound = BreakEven(most=255)
    sample(bound, 1, 200, memory_bound, accepted=0.0)
    for drafts, seconds in ((True, 2.0), (False, 1.0)):
        for _ in range(options.WINDOW):
            bound.record(1, drafts=drafts, seconds=seconds, tokens=1)
    sample(bound, 4, 200, memory_bound, accepted=3.0)
    assert bound.below == 0


def test_a_step_that_computes_a_part_of_a_prompt_does_not_count() -> None:
    """Engines that cut long prompts into chunks take slow steps after which a sequence has no new token."""
    bound, other = BreakEven(most=8), BreakEven(most=8)
    for _ in range(200):
        for drafts in (True, False):
            other.record(4, drafts=drafts, seconds=1.0, tokens=3)
            for each in (bound, other):
                each.record(4, drafts=drafts, seconds=0.01 if drafts else 0.02, tokens=4)
        assert other.choose(4) == bound.choose(4)
    assert other.below == bound.below == 7


def test_nothing_is_tried_above_the_most_and_a_fixed_bound_is_kept() -> None:
    bound = BreakEven(most=4)
    assert not any(bound.choose(5) for _ in range(1000))
    assert bound.choose(4) and bound.below == 0
    fixed = BreakEven(7, most=1)
    assert [fixed.choose(n) for n in (1, 7, 8)] == [True, True, False]
    assert sample(fixed, 8, 500, memory_bound, accepted=6.0) == 0 and fixed.below == 7


@pytest.mark.parametrize(("words", "below"), [(["0"], 0), (["12"], 12), ([], None)])
def test_a_server_gets_its_bound(words: list[str], below: int | None) -> None:
    given = ["--speculation", "ngram", *[f"--speculation-below={word}" for word in words]]
    assert spec_of(serve_options(*given), "cpu").speculation_below == below


def plain(drawn: list[int], expected: list[int]) -> list[int]:
    """The oracle of `keep` for one request: take tokens until one is not the draft."""
    kept = []
    for token, draft in zip(drawn, expected, strict=True):
        kept.append(token)
        if token != draft:
            break
    return kept


def test_tokens_are_kept_up_to_the_first_that_is_not_the_draft() -> None:
    draw, most = random.Random(0), 0
    for _ in range(200):
        lengths = [draw.randint(1, 5) for _ in range(draw.randint(1, 6))]
        drawn = [[draw.randrange(3) for _ in range(length)] for length in lengths]
        expected = [[*(draw.randrange(-1, 3) for _ in range(length - 1)), -1] for length in lengths]
        rows = [torch.tensor([token for one in part for token in one]) for part in (drawn, expected)]
        sizes = torch.tensor(lengths)
        width = max(lengths) + draw.randint(0, 2)
        tokens, kept, where = keep(*rows, sizes.cumsum(0) - sizes, sizes, width)
        for request, row in enumerate(zip(drawn, expected, strict=True)):
            right = plain(*row)
            most = max(most, len(right))
            assert kept[request] == len(right)
            assert tokens[request].tolist() == right + [-1] * (width - len(right))
            assert rows[0][where[request, : len(right)]].tolist() == right
    assert most == 5, "a whole draft was accepted at least once"


@pytest.mark.parametrize("kept", range(1, 5))
def test_a_generator_continues_behind_the_tokens_that_were_kept(kept: int) -> None:
    def draws(generator: torch.Generator, count: int) -> list[int]:
        return [int(torch.randint(0, 2**31, (1,), generator=generator)) for _ in range(count)]

    straight = draws(torch.Generator().manual_seed(5), 7)
    generator = torch.Generator().manual_seed(5)
    assert draws(generator, 1) == straight[:1]
    state = _state(generator)
    draws(generator, 4)
    _rewind(generator, state, 4, kept)
    assert draws(generator, 2) == straight[1 + kept : 3 + kept]


def test_the_metrics_of_engines_are_put_together() -> None:
    reports = [
        DraftReport(drafts=10, proposed=60, accepted=30, below=7),
        DraftReport(drafts=30, proposed=90, accepted=10, below=15),
    ]
    assert metrics_of(reports) == {"rollout/speculation_below": 11, "rollout/speculation_accepted": 1.0}
    assert metrics_of([DraftReport(drafts=0, proposed=0, accepted=0, below=3)]) == {"rollout/speculation_below": 3}
    assert metrics_of([]) == {}


def test_a_missing_package_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "arctic_inference" else found(name))
    check_installed("ngram", "here")
    check_installed("none", "here")
    with pytest.raises(UserError) as caught:
        check_installed("suffix", "config: rollout.speculation")
    assert caught.value.where == "config: rollout.speculation" and "arctic-inference" in caught.value.fix
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sequences", [1, 2, 256])
def test_vllms_table_names_every_size(sequences: int) -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    options = vllm_options("ngram", None, sequences)["speculative_config"]
    width, table = options["num_speculative_tokens"], options["num_speculative_tokens_per_batch_size"]
    dense = build_dynamic_sd_schedule_lookup(table, sequences, width)
    assert dense[1:] == ([width] * (sequences - 1) + [0] if sequences > 1 else [width])
