"""Connections to servers and services. Not covered: a machine that really goes away (tests/e2e/test_net.py)."""

from __future__ import annotations

import socket
from socket import IPPROTO_TCP, SO_KEEPALIVE, SOL_SOCKET, TCP_USER_TIMEOUT

from aiohttp import web

from oblr_megatron.runtime.http_loop import SILENCE_SECONDS, HttpLoop, open_session


def test_the_kernel_ends_a_connection_whose_other_end_is_silent() -> None:
    async def options() -> tuple[int, int]:
        async def hello(_: web.BaseRequest) -> web.Response:
            return web.Response(body=bytes(2**20))  # not yet read, so that the connection stays

        runner = web.ServerRunner(web.Server(hello))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with open_session() as session, session.get(f"http://127.0.0.1:{runner.addresses[0][1]}") as answer:
                assert answer.connection is not None and answer.connection.transport is not None
                own: socket.socket = answer.connection.transport.get_extra_info("socket")
                return own.getsockopt(SOL_SOCKET, SO_KEEPALIVE), own.getsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT)
        finally:
            await runner.cleanup()

    loop = HttpLoop()
    assert loop.run(options()) == (1, 1000 * SILENCE_SECONDS)
    loop.close()
