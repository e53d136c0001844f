"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import random
import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def hears_signals() -> None:
    """Undo the `nohup` or the `&` of a script under which the tests may run; programs that they start inherit this."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch's import; more threads than cores wait for each other
gc.disable()  # while all modules of tests are imported: it would look through a growing heap, and free nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="take files, and the tests of a file, in random order")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        draw = random.Random(seed)
        files = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (files[item.path], draw.random()))


def pytest_collection_finish() -> None:
    """Leave what the imports made out of all further garbage collections."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """At the end libraries count what is left, and report frozen objects as leaks."""
    gc.unfreeze()
