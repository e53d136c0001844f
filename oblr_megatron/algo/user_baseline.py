"""The user's own baseline "package.module:function" (config/baselines.py): calls it, and checks its declared facts.

The rest of the run believes the facts: which passes are skipped, which norm mode is possible, whether prompts may come
in waves. A fact that does not hold would bias the gradient silently, so `check_baseline` tries all of them before the
run, on random inputs. It finds what depends on an input, unless the dependence is very rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oblr_megatron.algo.formulas import NO_HISTORY, History
from oblr_megatron.config.baselines import BASELINES, Baseline, user_baseline
from oblr_megatron.errors import Problem, UserError

WHERE = "algo.baseline"
SEED = 5
MOST_PROMPTS, MOST_RESPONSES = 3, 8  # size of the random inputs: the checks need a call for each response
TOLERANCE = 1e-9  # for rewards and values of about 1: a sum in another order is no other value


@dataclass(frozen=True, slots=True)
class BaselineInputs:
    """Arguments of a baseline: Q prompts, G responses each."""

    rewards: Tensor  # [Q, G] fp64
    norms_sq: Tensor  # [Q, G] fp64
    lengths: Tensor  # [Q, G] fp64
    history: History = NO_HISTORY

    def of(self, prompts: Tensor, responses: Tensor) -> BaselineInputs:
        """These prompts and responses, in this order."""
        rewards, norms, lengths = (each[prompts][:, responses] for each in (self.rewards, self.norms_sq, self.lengths))
        expected = None if self.history.expected is None else self.history.expected[prompts]
        return BaselineInputs(rewards, norms, lengths, replace(self.history, expected=expected))

    def changed(self, where: Tensor, *, up: bool, norms_alone: bool = False) -> BaselineInputs:
        """Other rewards, norms and lengths at some places, [Q, G] bool: beyond all others, upwards or downwards.

        Each place has another change, because a mean does not depend on the scale of its weights.
        """
        size = torch.linspace(1, 2, where.numel(), dtype=torch.float64).view(where.shape) * (1 if up else -1)
        norms = torch.where(where, self.norms_sq * 50**size, self.norms_sq)
        if norms_alone:
            return replace(self, norms_sq=norms)
        rewards = torch.where(where, self.rewards + 9 * size, self.rewards)
        lengths = torch.where(where, self.lengths + 7, self.lengths)
        return replace(self, rewards=rewards, norms_sq=norms, lengths=lengths)


def user_values(name: str, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History = NO_HISTORY) -> Tensor:
    """b [Q, G] fp64 of the user's function; arguments as for a formula in formulas.py.

    Raises:
        UserError: the function cannot be imported or raises; or it returns something else than finite b [Q, G] fp64.
    """
    function = user_baseline(name)
    try:
        with torch.no_grad():
            values = function(rewards.clone(), norms_sq.clone(), lengths.clone(), history)
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        what = f"baseline {name!r} raised {type(error).__name__}: {error}"
        raise UserError(what, where=WHERE, fix="correct the function") from error
    shape = list(rewards.shape)
    if not isinstance(values, Tensor) or values.shape != rewards.shape or values.dtype != torch.float64:
        given = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        what = f"baseline {name!r} returned {given} for rewards torch.float64 {shape}"
        raise UserError(what, where=WHERE, fix="return one value for each reward, a torch.float64 tensor [Q, G]")
    if not values.isfinite().all():
        what = f"baseline {name!r} returned a value that is NaN or infinite"
        fix = "return finite values where rewards are equal, norms or lengths 0, and history.expected is NaN"
        raise UserError(what, where=WHERE, fix=fix)
    return values


def check_baseline(name: str, num_prompts: int, group_size: int) -> None:
    """Check a user's baseline before the run; one of the package needs no check.

    Raises:
        UserError: see `user_values`, or a declared fact does not hold.
    """
    if name in BASELINES:
        return
    facts = user_baseline(name).facts
    inputs = _random_inputs(num_prompts, group_size, facts)
    _values(name, inputs)
    few = inputs.of(torch.arange(min(num_prompts, MOST_PROMPTS)), torch.arange(min(group_size, MOST_RESPONSES)))
    zeros = torch.zeros_like(few.rewards)
    _values(name, replace(few, norms_sq=zeros, lengths=zeros))
    for given in _without_spread(few):
        _values(name, given)
    first_step = [replace(few, history=history) for history in _without_pools(few.history)] if facts.pool else []
    for given in (few, *first_step):
        for what, fix in _Trial(name, facts, given).broken():
            raise UserError(f"baseline {name!r} {what}", where=WHERE, fix=fix)


def _random_inputs(num_prompts: int, group_size: int, facts: Baseline) -> BaselineInputs:
    random = torch.Generator().manual_seed(SEED)
    rewards, norms, steps, known = torch.rand(4, num_prompts, group_size, generator=random, dtype=torch.float64)
    history = History(known[:, 0], pull=0.5) if facts.pool else NO_HISTORY
    return BaselineInputs(rewards, 0.1 + norms, 1 + (9 * steps).floor(), history)


def _without_spread(given: BaselineInputs) -> Iterator[BaselineInputs]:
    """All answers wrong, all right, groups of equal rewards, also where the pool expects them: a spread may be 0."""
    for rewards in (torch.zeros_like(given.rewards), torch.ones_like(given.rewards), given.rewards[:, :1]):
        expected = None if given.history.expected is None else rewards[:, 0]
        history = replace(given.history, expected=expected)
        yield replace(given, rewards=rewards.expand_as(given.rewards), history=history)
        yield replace(given, rewards=rewards.expand_as(given.rewards))


def _without_pools(known: History) -> Iterator[History]:
    """Histories without a pool: None; NaN for every prompt, as in a run's first step; NaN for all prompts but one."""
    assert known.expected is not None, "of a pooled baseline"
    nothing = torch.full_like(known.expected, torch.nan)
    yield NO_HISTORY
    yield replace(known, expected=nothing)
    yield replace(known, expected=torch.cat([known.expected[:1], nothing[1:]]))


def _values(name: str, inputs: BaselineInputs) -> Tensor:
    return user_values(name, inputs.rewards, inputs.norms_sq, inputs.lengths, inputs.history)


class _Trial:
    """Tries the facts of a baseline on some inputs."""

    def __init__(self, name: str, facts: Baseline, inputs: BaselineInputs) -> None:
        self._name, self._facts, self._inputs = name, facts, inputs
        self._values = _values(name, inputs)  # [Q, G]
        self._prompts, self._responses = (torch.arange(size) for size in self._values.shape)

    def broken(self) -> Iterator[Problem]:
        """The promises that the function breaks."""
        facts, everywhere = self._facts, torch.ones_like(self._values, dtype=torch.bool)
        if self._differs(self._inputs).any():
            yield "returns other values when it is called again", "let it depend on its arguments alone"
        if not facts.needs_norms and self._follows(everywhere, norms_alone=True).any():
            what = "reads the norms of its own step, but does not declare it"
            yield what, "declare needs_norms=True, or read no norms"
        if facts.over == "others" and self._reads_itself():
            what = 'reads the response that it is for, but declares over="others"'
            yield what, 'leave that response out of its own b, or declare over="group"'
        for prompt in self._prompts:
            yield from self._of_prompts(prompt)
        for order in (_rolled, _first_two_swapped):  # the two generate every order
            rows, columns = order(self._prompts), order(self._responses)
            if self._differs(self._inputs.of(rows, columns), self._values[rows][:, columns]).any():
                what = "returns other values for prompts or responses in another order"
                yield what, "treat all prompts alike, and all responses of a group"
        equal = replace(self._inputs, rewards=self._inputs.rewards[:, :1].expand_as(everywhere))
        if facts.zero_on_equal and self._differs(equal, equal.rewards).any():
            what = "is not the reward itself in a group of equal rewards, and the run skips such a group"
            yield what, "return a mean of the group's rewards, or declare prior=True"

    def _of_prompts(self, prompt: Tensor) -> Iterator[Problem]:
        """Problems with what b of a prompt reads of its own responses, and of those to other prompts."""
        facts, own = self._facts, (self._prompts == prompt)[:, None].expand_as(self._values)
        if facts.over == "nothing" and self._follows(own)[prompt].any():
            what = 'reads the responses to its own prompt, but declares over="nothing"'
            yield what, 'declare over="others" or over="group"'
        if self._follows(~own, norms_alone=True)[prompt].any():
            what = "reads the norms of other prompts, which may be known only later"
            yield what, "read the rewards of other prompts alone"
        # Without a pool, as in the first step, a baseline may take the other prompts' mean reward.
        expected = self._inputs.history.expected
        no_pool = expected is None or bool(expected.isnan().any())
        beyond = facts.prior or facts.over == "batch" or (facts.pool != "" and no_pool)
        row = slice(int(prompt), int(prompt) + 1)
        if not beyond and self._differs(self._inputs.of(self._prompts[row], self._responses), self._values[row]).any():
            what = 'reads other prompts, but declares neither prior=True nor over="batch"'
            yield what, "declare it, or read the responses to the same prompt alone"

    def _reads_itself(self) -> bool:
        """Whether some b_i depends on response i."""
        for place in range(self._values.numel()):
            own = torch.zeros_like(self._values, dtype=torch.bool)
            own.view(-1)[place] = True
            if self._follows(own).view(-1)[place]:
                return True
        return False

    def _differs(self, other: BaselineInputs, wanted: Tensor | None = None) -> Tensor:
        """[Q, G] bool: where b of other inputs is another value than wanted; by default than b of these inputs."""
        return (_values(self._name, other) - (self._values if wanted is None else wanted)).abs() > TOLERANCE

    def _follows(self, where: Tensor, *, norms_alone: bool = False) -> Tensor:
        """[Q, G] bool: where b depends on the inputs at some places."""
        up, down = (self._differs(self._inputs.changed(where, up=up, norms_alone=norms_alone)) for up in (True, False))
        return up | down


def _rolled(places: Tensor) -> Tensor:
    return places.roll(1)


def _first_two_swapped(places: Tensor) -> Tensor:
    return torch.cat([places[:2].flip(0), places[2:]])
