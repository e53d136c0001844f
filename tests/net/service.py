"""A reward service and an MLflow tracking server on one port: `python -m tests.net.service ADDRESS PORT DIRECTORY`.

The tracking server has the calls that a tracker makes. It writes the metrics that it gets to DIRECTORY/metrics.jsonl.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from oblr_megatron.runtime.processes import die_with
from tests.e2e.rewards import matching_characters

API = "/api/2.0/mlflow/"


class Service(ThreadingHTTPServer):
    directory: Path


class Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        path = self.path.partition("?")[0]
        answer = self.score(asked) if path == "/score" else self.track(path.removeprefix(API), asked)
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.headers["Content-Length"] = self.headers["Content-Length"] or "0"
        self.do_POST()

    def score(self, asked: dict[str, list[str]]) -> dict[str, Any]:
        rows = zip(asked["responses"], asked["answers"], asked["prompts"], strict=True)
        return {"rewards": [matching_characters(*row) for row in rows]}

    def track(self, call: str, asked: dict[str, Any]) -> dict[str, Any]:
        if call == "runs/log-batch":
            with (self.server.directory / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(metric) + "\n" for metric in asked.get("metrics", ()))
        info = {"run_id": "run", "experiment_id": "1", "artifact_uri": (self.server.directory / "artifacts").as_uri()}
        return {"experiment": {"experiment_id": "1"}, "run": {"info": info, "data": {}}, "run_info": info}

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


def main(address: str, port: str, directory: str, parent: str) -> None:
    die_with(int(parent))
    service = Service((address, int(port)), Handler)
    service.directory = Path(directory)
    service.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
