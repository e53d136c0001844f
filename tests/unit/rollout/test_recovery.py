"""The number of retries after losses, and the error after the last. Not covered: engines (e2e/test_recovery.py)."""

from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.errors import EngineDeadlineError, EngineLostError, RunError
from oblr_megatron.rollout.push import EngineReceiver
from oblr_megatron.rollout.recovery import Recovery


class Losing:
    """A call that loses its engine a number of times."""

    def __init__(self, losses):
        self.losses, self.calls = losses, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.losses:
            raise EngineLostError(f"loss {self.calls}")
        return "done"


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_the_allowed_number_of_losses_is_retried(losses):
    call = Losing(losses)
    assert Recovery(3, logs=False).until_done(call) == "done"
    assert call.calls == losses + 1


def test_one_more_is_raised_and_ends_recovery():
    recovery = Recovery(2, logs=False)
    with pytest.raises(EngineLostError, match=r"(?s)loss 3.* 2 restarts .*rollout.max_restarts"):
        recovery.until_done(Losing(3))
    assert recovery.over


def test_losses_add_up_over_calls_until_a_rollout_completes():
    recovery = Recovery(2, logs=False)
    recovery.until_done(Losing(2))
    recovery.sampled()
    recovery.until_done(Losing(1))
    recovery.until_done(Losing(1))
    with pytest.raises(EngineLostError):
        recovery.until_done(Losing(1))


def test_without_restarts_the_error_itself_is_raised():
    error = EngineDeadlineError("rank 0", "engine 0 to start", 5)

    def call():
        raise error

    with pytest.raises(EngineDeadlineError) as caught:
        Recovery(0, logs=False).until_done(call)
    assert caught.value is error


def test_a_refusal_is_not_retried():
    calls = []

    def call():
        calls.append(1)
        raise RunError("no")

    with pytest.raises(RunError, match="no"):
        Recovery(3, logs=False).until_done(call)
    assert len(calls) == 1


def test_an_engine_that_was_lost_gets_no_push():
    """Its buffer is closed. Only this kind of error makes the run start it again."""
    engine: Any = SimpleNamespace(
        wait_ready=lambda: None,
        lost=True,
        spec=SimpleNamespace(name="engine 0"),
        buffer=SimpleNamespace(reserve=None, fd=-1),
    )
    receiver = EngineReceiver(engine, (), version=3)
    assert receiver.start(64) is None
    assert type(receiver.error) is EngineLostError and "engine 0 was lost before push 3" in str(receiver.error)
