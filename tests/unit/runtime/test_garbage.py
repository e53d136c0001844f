"""Collection is off inside the block only. Not covered: what it saves."""

from __future__ import annotations

import gc

import pytest

from oblr_megatron.runtime.garbage import no_collection


def test_collection_is_off_inside_and_on_afterwards_also_after_an_error() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="inside"), no_collection():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_process_that_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with no_collection(), no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
