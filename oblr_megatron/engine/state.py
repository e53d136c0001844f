"""State machine of an engine's weights: the open push, the weights served, and why it may not sample. Imports no torch.

An engine samples from one complete set of weights, or not at all. `core.EngineServer` makes each vLLM call about
weights inside a step of this class:

    with state.begin(holding, manifest):                       # Holding(version=3)
        call_workers(llm, "start_weight_update")
    with state.bucket(parts, holding):                         # one step per bucket
        call_workers(llm, "update_weights", update_info=update_info)
    with state.finish(holding):
        call_workers(llm, "finish_weight_update")
        check_reset(llm.reset_prefix_cache())
    state.check_usable()                                       # before each request for samples

    event         allowed in   next state   refused if
    begin         any          pushing      the manifest is not exactly the model's tensors in the engine's dtype
    bucket        pushing      pushing      its parts are not the next ones of the manifest
    finish        pushing      serving      a tensor has not come
    fail          any          unusable     (ignored if it names a push that is neither open nor served)
    check_usable  serving      serving      the caller expects other weights

A step that is refused, or that ends with an error of vLLM, leads to the state unusable; only a new push leads out of
it. A bucket or a finish of a push that is not open is refused and changes nothing. Wrong tensors raise a `WeightError`,
everything else a `Refusal`.

An engine for adapters takes two kinds of pushes, and tells them by their tensors: all weights of the base model, and
one adapter. An adapter is refused until a base is in place. After a base the engine is unusable until an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.errors import RunError
from oblr_megatron.weights.manifest import Ledger, Manifest, Part, check_manifest


class Refusal(RunError):
    """The request does not fit the state of the engine. The engine itself is healthy."""


class InvalidRequest(RunError):
    """The request can be met in no state of the engine. The engine itself is healthy."""


class WeightState:
    """The weights of one engine; not thread-safe."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        adapter: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Shapes by name are those of the checkpoint that the engine started from; `dtype` is torch's name.

        `adapter` has those of the adapters that are pushed; None if none are.
        """
        self._shapes, self._dtype, self._adapter = shapes, dtype, adapter or {}
        self.base: str | None = None  # holder of the base that was pushed; None: none is complete
        self.adapts = False  # whether the open push, or the last one, is an adapter
        self.holding = Holding()  # the last complete push
        self.pushing: Holding | None = None  # the open push
        self.unusable: str | None = None  # why the engine may not sample
        self._ledger = Ledger(())
        self._session_open = False

    @contextmanager
    def begin(self, holding: Holding, manifest: Manifest) -> Iterator[None]:
        """Open a push. From here on the engine may not sample until `finish`."""
        self.fail(f"push {holding.version} has not ended")
        with self._fails(holding):
            self.adapts = any(spec.name in self._adapter for spec in manifest)
            if self.adapts and self.base is None:
                raise Refusal("it holds no base weights of a push, which an adapter needs")
            check_manifest(manifest, self._adapter if self.adapts else self._shapes, self._dtype)
            if not self.adapts:
                self.base = None
            self.pushing, self._ledger, self._session_open = holding, Ledger(manifest), True
            yield

    @contextmanager
    def bucket(self, parts: Sequence[Part], holding: Holding) -> Iterator[None]:
        """Load one bucket of the push `holding`."""
        with self._fails(self._open(holding)):
            self._ledger.count(parts)
            yield

    @contextmanager
    def finish(self, holding: Holding) -> Iterator[None]:
        """End the push; the engine may sample from its weights afterwards."""
        pushed = self._open(holding)
        with self._fails(pushed):
            self._ledger.finish()
            yield
        self.pushing, self.unusable, self._session_open = None, None, False
        if not self.adapts:
            self.base = pushed.holder
        if self.adapts or not self._adapter:
            self.holding = pushed
        else:
            self.unusable = f"the adapter of push {pushed.version} has not come"

    def fail(self, reason: str, holding: Holding | None = None) -> None:
        """Make the weights unusable until the next complete push; `reason` is shown when samples are requested.

        A failure of another push (`holding`) than the open or the last one is ignored.
        """
        if holding in (None, self.pushing, self.holding):
            self.unusable, self.pushing = reason, None

    def drop(self, reason: str) -> None:
        """The memory of all weights was freed."""
        self.fail(reason)
        self.base = None

    def leave_session(self) -> bool:
        """Whether a failed push has left vLLM's update session open. The caller must close the session then."""
        left = self._session_open and self.pushing is None
        self._session_open &= not left
        return left

    def check_usable(self, holding: Holding | None = None) -> None:
        """Refuse to sample from incomplete weights, or from other weights than `holding`."""
        if self.unusable is not None:
            raise Refusal(f"{self.unusable}; it generates again after a complete push")
        if holding not in (None, self.holding):
            raise Refusal(f"it holds {_name(self.holding)}, not {_name(holding)}")

    def _open(self, holding: Holding) -> Holding:
        if holding != self.pushing:
            what = f"push {holding.version} is not open"
            raise Refusal(f"{what}: {self.unusable}" if self.unusable else what)
        return holding

    @contextmanager
    def _fails(self, holding: Holding) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # also a cancelled request: part of its bucket may be in place
            self.fail(f"push {holding.version} failed: {str(error) or type(error).__name__}")
            raise


def check_reset(done: bool) -> None:
    """Refuse to serve a push if `reset_prefix_cache` could not drop the prefixes of the old weights."""
    if not done:
        raise Refusal("vLLM kept cached prefixes of the old weights")


def _name(holding: Holding | None) -> str:
    if holding is None or not holding.holder:
        return "the checkpoint it started from"
    return f"version {holding.version} of run {holding.holder}"
