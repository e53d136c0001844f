"""Routes of a mixture (model.moe_routing_replay): the experts that an engine takes for each token.

vLLM's second model runner, which GPUs use, captures them itself (`enable_return_routed_experts`). CPU engines have the
first runner, for which vLLM refuses the option. `RoutesWorker` runs the same capture there. The rest is vLLM's own on
both: rows of cached prefixes, of preempted requests and of rejected drafts are right, because its scheduler and its
store of captured blocks account for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oblr_megatron.errors import RunError

WORKER = "oblr_megatron.engine.cpu.routes.RoutesWorker"
UNKNOWN = -1
"""Expert of a position that has no route."""


def allow_on_cpu() -> None:
    """Let vLLM accept the option for `RoutesWorker`. May be called any number of times.

    Raises:
        RuntimeError: this vLLM checks the option elsewhere.
    """
    from vllm.config import VllmConfig

    check = getattr(VllmConfig, "_verify_aux_output_compatibility", None)
    if check is None:
        raise RuntimeError("this vLLM has no _verify_aux_output_compatibility: a CPU engine could not return routes")

    def checked(config: Any) -> None:
        check(_WithSecondRunner(config) if config.parallel_config.worker_cls == WORKER else config)

    if check.__module__ != __name__:
        VllmConfig._verify_aux_output_compatibility = checked  # type: ignore[method-assign, assignment]


class _WithSecondRunner:
    """A configuration as vLLM's check should see it: the first runner of `RoutesWorker` returns routes, too."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def routes_of(rows: NDArray[np.unsignedinteger[Any]] | None, tokens: int) -> NDArray[np.int16]:
    """`Sample.routes` from the rows that vLLM returns.

    Args:
        rows: [tokens - 1, layers, k] numbers of experts; None if vLLM returned none.
        tokens: of prompt and response.

    Returns:
        int16 [tokens, layers, k]; -1 in the last row, because the last token was no input.

    Raises:
        RunError: there is not one row for each input.
    """
    positions = None if rows is None else len(rows)
    if rows is None or positions != tokens - 1:
        raise RunError(f"the engine returned routes of {positions} positions for a sample of {tokens} tokens")
    routes = np.full((tokens, *rows.shape[1:]), UNKNOWN, np.int16)
    routes[:-1] = rows
    return routes
