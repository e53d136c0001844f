"""Adds our HTTP paths to vLLM's API server, as an endpoint plugin (entry point `vllm.endpoint_plugins`).

vLLM's own weight endpoints need its development mode, which also lets clients run any method in the engine. This plugin
uses `EngineClient` only and checks each push for completeness, so that mode stays off. Requests carry token ids, and
many prompts each; responses are decoded once, at their end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.server_model import ServedModel
from oblr_megatron.engine.state import Refusal
from oblr_megatron.errors import DamagedError, RunError, WeightError

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

Method = Callable[..., Awaitable[http.Message | None]]

ROUTES: tuple[tuple[str, type[http.Message] | None, Method], ...] = (
    (http.INFO, None, ServedModel.info),
    (http.DIGESTS, None, ServedModel.digests),
    (http.SPECULATION, None, ServedModel.speculation),
    (http.GENERATE, http.GenerateBody, ServedModel.generate),
    (http.PUSH_OPEN, http.OpenBody, ServedModel.open_push),
    (http.PUSH_START, http.StartBody, ServedModel.start_push),
    (http.PUSH_UPDATE, http.UpdateBody, ServedModel.update_push),
    (http.PUSH_FINISH, http.FinishBody, ServedModel.finish_push),
    (http.PUSH_ABORT, http.AbortBody, ServedModel.abort_push),
)
"""(path, type of the body or None for GET, method)"""


class ServerRoutes:
    """The plugin object that vLLM creates."""

    name = "oblr_megatron"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._served: ServedModel | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM before it starts to listen."""
        from oblr_megatron.engine import server_connection

        server_connection.install()
        for path, kind, method in ROUTES:
            app.add_api_route(path, self._route(kind, method), methods=["GET" if kind is None else "POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Called by vLLM when the engine is up."""
        served = ServedModel(engine_client)
        await served.warm_up()
        self._served = served

    def _route(self, kind: type[http.Message] | None, method: Method) -> Callable[[Any], Awaitable[Response]]:
        """A handler in the form that FastAPI takes. It is cancelled when the client disconnects."""
        from starlette.requests import Request
        from starlette.responses import Response
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        async def call(body: bytes) -> http.Message | None:
            assert self._served is not None, "vLLM serves requests only after init_state"
            return await method(self._served, *([] if kind is None else [kind.model_validate_json(body)]))

        @with_cancellation
        async def cancellable(body: bytes, raw_request: Request) -> Response:
            status, text = await _outcome(call, body)
            return Response(text, status, media_type="application/json")

        async def route(raw_request: Request) -> Response:
            answer = await cancellable(await raw_request.body(), raw_request)
            return answer or Response(status_code=499)  # the client has disconnected

        # FastAPI resolves annotations in this module, which does not import starlette at load
        route.__annotations__ = {"raw_request": Request, "return": Response}
        return route


async def _outcome(handler: Method, body: bytes) -> tuple[int, str]:
    """Run a handler; returns the HTTP status and the JSON text."""
    from vllm.exceptions import VLLMClientError

    try:
        answer = await handler(body)
    except (Refusal, WeightError) as error:
        return http.REFUSED, _error(error)
    except (ValueError, VLLMClientError) as error:  # an invalid body, or a prompt that vLLM rejects
        return http.INVALID, _error(error)
    except RunError as error:
        return http.FAILED, _error(error)
    except Exception as error:  # any error of vLLM must reach the trainer, which waits for an answer
        logger.exception("a request failed")
        return http.FAILED, _error(f"{type(error).__name__}: {error}")
    return 200, "{}" if answer is None else answer.model_dump_json()


def _error(error: object) -> str:
    return json.dumps({"error": str(error), "kind": http.DAMAGED if isinstance(error, DamagedError) else ""})
