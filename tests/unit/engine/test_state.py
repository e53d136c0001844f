"""The state machine of an engine's weights: every event in every state, and every push that must be refused.

Does not cover vLLM's side of the steps (tests/e2e/test_push.py, test_servers.py).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.engine.state import Refusal, WeightState, check_reset
from oblr_megatron.errors import DamagedError, WeightError
from oblr_megatron.weights.manifest import Part, TensorSpec, manifest_of, parts_of
from oblr_megatron.weights.shm import SharedBuffer, fill_buckets

A, B = TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "float32", (4,))
HALF = TensorSpec("a", "bfloat16", (2, 3))
FIRST, SECOND = Holding(holder="x", version=1), Holding(holder="x", version=2)
FOREIGN = Holding(holder="y", version=2)


def start() -> WeightState:
    """In state serving, of push 1."""
    state = WeightState({"a": (2, 3), "b": (4,)}, "float32")
    push(state, FIRST)
    return state


def phase_of(state: WeightState) -> str:
    """The state, as the table of the module names it."""
    if state.unusable is None:
        return "serving"
    return "unusable" if state.pushing is None else "pushing"


def begin(state: WeightState, holding: Holding = SECOND, *specs: TensorSpec) -> None:
    with state.begin(holding, specs or (A, B)):
        pass


def bucket(state: WeightState, *parts: Part, holding: Holding = SECOND) -> None:
    with state.bucket(parts, holding):
        pass


def finish(state: WeightState, holding: Holding = SECOND) -> None:
    with state.finish(holding):
        pass


def push(state: WeightState, holding: Holding = SECOND, *, last: bool = True) -> None:
    begin(state, holding)
    bucket(state, Part.whole(A), Part(B, 0, 1), holding=holding)
    if last:
        bucket(state, Part(B, 1, 3), holding=holding)
        finish(state, holding)


STATES: dict[str, Callable[[WeightState], None]] = {
    "serving": lambda state: None,
    "pushing": begin,
    "half": lambda state: push(state, last=False),
    "unusable": lambda state: state.fail("the test wants it so"),
}


@pytest.mark.parametrize("phase", STATES)
def test_a_complete_push_leads_from_every_state_to_serving_it(phase: str) -> None:
    state = start()
    STATES[phase](state)
    assert phase_of(state) == phase.replace("half", "pushing")
    if phase != "serving":
        with pytest.raises(Refusal):
            state.check_usable(FIRST)
    push(state)
    assert (phase_of(state), state.holding, state.unusable, state.leave_session()) == ("serving", SECOND, None, False)
    state.check_usable(SECOND)
    state.check_usable()


EVENTS: list[tuple[str, Callable[[WeightState], None], str, str]] = [  # state, event, next state, in the message
    ("serving", lambda state: begin(state, SECOND, A), "unusable", "b is missing"),
    ("serving", lambda state: begin(state, SECOND, HALF, B), "unusable", "a bfloat16, the model has float32"),
    ("pushing", lambda state: bucket(state, Part.whole(B)), "unusable", "sent b float32[4] where its manifest has a"),
    ("pushing", lambda state: bucket(state, Part.whole(HALF)), "unusable", "a bfloat16[2, 3] where its manifest"),
    ("pushing", lambda state: bucket(state, *map(Part.whole, (A, B, A))), "unusable", "has nothing more"),
    ("pushing", lambda state: bucket(state, Part(A, 0, 4), Part(A, 3, 3)), "unusable", "from element 4"),
    ("pushing", lambda state: bucket(state, Part(A, 0, 7)), "unusable", "7 elements from 0"),
    ("pushing", lambda state: bucket(state, Part.whole(A), Part(B, 0, -1)), "unusable", "-1 elements"),
    ("pushing", finish, "unusable", "without a, b"),
    ("half", finish, "unusable", "without the rest of b"),
    ("pushing", lambda state: bucket(state, Part.whole(A), holding=FOREIGN), "pushing", "push 2 is not open: push 2"),
    ("pushing", lambda state: finish(state, FIRST), "pushing", "push 1 is not open"),
    ("pushing", lambda state: state.check_usable(), "pushing", "push 2 has not ended"),
    ("serving", lambda state: bucket(state, Part.whole(A)), "serving", "push 2 is not open"),
    ("serving", lambda state: bucket(state, Part.whole(A), holding=FIRST), "serving", "push 1 is not open"),
    ("serving", finish, "serving", "push 2 is not open"),
    ("serving", lambda state: state.check_usable(SECOND), "serving", "version 1 of run x, not version 2 of run x"),
    ("serving", lambda state: state.check_usable(Holding()), "serving", "not the checkpoint"),
    ("unusable", lambda state: bucket(state, Part.whole(A)), "unusable", "the test wants it so"),
    ("unusable", finish, "unusable", "the test wants it so"),
    ("unusable", lambda state: state.check_usable(FIRST), "unusable", "the test wants it so; it generates again"),
]


@pytest.mark.parametrize(("phase", "event", "after", "message"), EVENTS)
def test_refusals(phase: str, event: Callable[[WeightState], None], after: str, message: str) -> None:
    state = start()
    STATES[phase](state)
    with pytest.raises((Refusal, WeightError)) as error:
        event(state)
    assert message in str(error.value)
    assert (phase_of(state), state.holding) == (after, FIRST)
    if after != phase:
        assert state.unusable == f"push 2 failed: {error.value}"
        assert state.leave_session() == (phase != "serving"), "vLLM's session is closed once"
        assert not state.leave_session()
    if after == "unusable":
        with pytest.raises(Refusal):
            finish(state)
    push(state)
    state.check_usable(SECOND)


def test_an_error_of_vllm_ends_the_push_and_keeps_its_type() -> None:
    """Here damage that the transfer engine finds in the second bucket, and a prefix cache that is kept at the end."""
    state = start()
    begin(state)
    with pytest.raises(DamagedError), state.bucket([Part.whole(A)], SECOND):
        raise DamagedError("checksum")
    assert (phase_of(state), state.unusable) == ("unusable", "push 2 failed: checksum")
    begin(state)
    bucket(state, Part.whole(A), Part.whole(B))
    with pytest.raises(Refusal), state.finish(SECOND):
        check_reset(False)
    assert (phase_of(state), state.holding) == ("unusable", FIRST)
    with pytest.raises(KeyboardInterrupt), state.begin(SECOND, (A, B)):
        raise KeyboardInterrupt
    assert state.unusable == "push 2 failed: KeyboardInterrupt"


@pytest.mark.parametrize(
    ("named", "phase"), [(None, "unusable"), (FIRST, "unusable"), (SECOND, "unusable"), (FOREIGN, "pushing")]
)
def test_only_a_failure_of_the_open_or_the_last_push_counts(named: Holding | None, phase: str) -> None:
    state = start()
    begin(state)
    state.fail("verify", named)
    assert phase_of(state) == phase
    assert state.leave_session() == (phase == "unusable")


def test_a_bucket_of_the_transport_is_a_step_of_the_state() -> None:
    """`Bucket.update_info` and `parts_of` are each other's inverse, for a tensor in pieces, too."""
    from tests.unit.weights.test_shm import Tensors, random_tensor, torch

    source = Tensors([random_tensor((40,), torch.float32, 0), random_tensor((3,), torch.float32, 1)])
    state = WeightState({"tensor.0": (40,), "tensor.1": (3,)}, "float32")
    buffer = SharedBuffer.create()
    buffer.reserve(256)
    with state.begin(SECOND, manifest_of(source)):
        pass
    for one in fill_buckets(source, 128, buffer):
        assert parts_of(one.update_info()) == one.parts
        bucket(state, *parts_of(one.update_info()))
    finish(state)
    buffer.close()
    assert state.holding == SECOND


DELTA = TensorSpec("base_model.a.lora_A", "float32", (2, 3))


def adapting(*events: Callable[[WeightState], None]) -> WeightState:
    state = WeightState({"a": (2, 3), "b": (4,)}, "float32", {DELTA.name: DELTA.shape})
    for event in events:
        event(state)
    return state


def push_adapter(state: WeightState, holding: Holding = SECOND) -> None:
    begin(state, holding, DELTA)
    bucket(state, Part.whole(DELTA), holding=holding)
    finish(state, holding)


def test_an_adapter_needs_a_base_and_a_base_its_adapter() -> None:
    state = adapting()
    with pytest.raises(Refusal, match="no base weights"):
        begin(state, FIRST, DELTA)
    push(state, FIRST)
    assert (phase_of(state), state.holding, state.base) == ("unusable", Holding(), "x")
    push_adapter(state, FIRST)
    assert (phase_of(state), state.holding, state.adapts) == ("serving", FIRST, True)
    push_adapter(state, SECOND)
    assert (phase_of(state), state.holding, state.base) == ("serving", SECOND, "x")


@pytest.mark.parametrize(
    ("event", "base"),
    [
        (lambda state: push(state, SECOND, last=False), None),
        (lambda state: state.drop("asleep"), None),
        (lambda state: begin(state, SECOND, DELTA), "x"),
        (lambda state: state.fail("the test wants it so"), "x"),
    ],
)
def test_a_base_outlives_a_failed_adapter_only(event: Callable[[WeightState], None], base: str | None) -> None:
    state = adapting(lambda state: push(state, FIRST), push_adapter, event)
    state.fail("it broke off")
    assert (phase_of(state), state.base) == ("unusable", base)
    if base is None:
        with pytest.raises(Refusal, match="no base weights"):
            begin(state, SECOND, DELTA)
        push(state, SECOND)
    push_adapter(state, SECOND)
    assert (phase_of(state), state.holding) == ("serving", SECOND)


@pytest.mark.parametrize("specs", [(A, B, DELTA), (A, DELTA), (TensorSpec(DELTA.name, "bfloat16", (2, 3)),)])
def test_a_manifest_that_is_neither_base_nor_adapter_is_refused(specs: tuple[TensorSpec, ...]) -> None:
    state = adapting(lambda state: push(state, FIRST), push_adapter)
    with pytest.raises(WeightError):
        begin(state, SECOND, *specs)
    assert (phase_of(state), state.holding) == ("unusable", SECOND)
