"""Calls to every worker of a vLLM engine that leave the workers in step if some of them fail.

vLLM's `collective_rpc` raises at the first worker that fails and leaves the answers of the others in their queues.
Every later call then reads the answers of the one before (vLLM 0.32, `MultiprocExecutor.collective_rpc`). Here a
worker's error is part of its answer. It tells a request that cannot be met from a worker that is broken.
"""

from __future__ import annotations

import traceback
from typing import Any

from oblr_megatron.errors import RunError


class WorkerError(Exception):
    """A worker failed; all have answered. The text is the first error's."""


class WorkerRefusal(WorkerError):
    """The same, and the request is the cause for each worker: all are healthy."""


def call_workers(llm: Any, method: str, **arguments: Any) -> list[Any]:
    """Call a method of every worker.

    Args:
        llm: `vllm.LLM`.
        method: name of a method of vLLM's worker.
        **arguments: its arguments, the same on every worker.

    Returns:
        One result for each worker.

    Raises:
        WorkerRefusal: at least one worker refused the request, and no other failed.
        WorkerError: at least one worker failed otherwise.
    """
    answers = llm.collective_rpc(answer, args=(method, arguments))
    for kind in (WorkerError, WorkerRefusal):
        for _, failed_as, reason in answers:
            if failed_as is kind:
                raise kind(reason)
    return [value for value, _, _ in answers]


def answer(worker: Any, method: str, arguments: dict[str, Any]) -> tuple[Any, type[WorkerError] | None, str]:
    """(result, None, "") of a worker's method, or (None, kind and text of its error).

    Runs in the worker; the log gets vLLM's tracebacks.
    """
    try:
        return getattr(worker, method)(**arguments), None, ""
    except Exception as error:  # noqa: BLE001  a worker that raises would leave the others' answers unread
        if not isinstance(error, RunError):
            traceback.print_exc()
        # vLLM raises a ValueError for input that does not fit. Of a broken device torch raises a RuntimeError.
        kind = WorkerRefusal if isinstance(error, (RunError, ValueError)) else WorkerError
        return None, kind, str(error) or type(error).__name__
