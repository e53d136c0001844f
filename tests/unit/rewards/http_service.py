"""A local reward service over real HTTP. A test sets the answer to each request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """A received request."""

    body: dict[str, list[Any]]
    token: str | None
    at: float  # time.monotonic()


Step = Callable[["Handler", Asked], None]


@dataclass
class Service:
    """The address and the requests received so far."""

    steps: tuple[Step, ...]  # for the first, second, ... request; the last step repeats
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server(ThreadingHTTPServer):
    """The server; its handlers share `service`."""

    daemon_threads = True
    block_on_close = False
    service: Service

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients, which are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    """Records the request and runs the next step."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        service, asked = self.server.service, Asked(body, self.headers.get("Authorization"), time.monotonic())
        with service.lock:
            step = service.steps[min(len(service.asked), len(service.steps) - 1)]
            service.asked.append(asked)
        step(self, asked)

    def say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(*steps: Step) -> Iterator[Service]:
    """Run a service until the block ends."""
    server = Server(("127.0.0.1", 0), Handler)
    server.service = service = Service(steps, f"http://127.0.0.1:{server.server_port}/score")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def score_batch(handler: Handler, asked: Asked) -> None:
    """The reward is the length of the response."""
    rewards = [len(response) for response in asked.body["responses"]]
    handler.say(200, json.dumps({"rewards": rewards}).encode())


def drop(handler: Handler, asked: Asked) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True


def cut(handler: Handler, asked: Asked) -> None:
    """Close the connection in the middle of the answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"rewards": [')
    handler.close_connection = True


def hang(handler: Handler, asked: Asked) -> None:
    """Send no answer while the service runs."""
    handler.server.service.ended.wait(60)


def drip(handler: Handler, asked: Asked) -> None:
    """Send an endless answer byte by byte."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.service.ended.wait(0.05):
        handler.wfile.write(b" ")


def flood(handler: Handler, asked: Asked) -> None:
    """Send an endless answer at full speed."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.service.ended.is_set():
        handler.wfile.write(b" " * 2**16)


def status(code: int, **headers: str) -> Step:
    """Answer with this status and no rewards."""
    return lambda handler, asked: handler.say(code, b'{"error": "not now"}', **headers)


def text(body: bytes) -> Step:
    """Answer with these bytes and status 200."""
    return lambda handler, asked: handler.say(200, body)
