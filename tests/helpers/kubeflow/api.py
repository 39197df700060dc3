"""As much of a Kubernetes API server as the SDK needs to submit a TrainJob: one runtime to read, and a list
of what was created."""

from __future__ import annotations

import http.server
import json
from pathlib import Path
from typing import Any

from helpers.kubeflow.objects import RUNTIME
from helpers.servers.http_server import Served

_GROUP = "/apis/trainer.kubeflow.org/v1alpha1"


class FakeApi(Served):
    def __init__(self, folder: Path) -> None:
        self.created: list[dict[str, Any]] = []
        handler = type("Handler", (_Handler,), {"api": self})
        super().__init__(handler)
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"name": "fake", "cluster": {"server": self.address}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "fake"}}
        whole = {
            "clusters": [cluster],
            "contexts": [context],
            "users": [{"name": "fake", "user": {}}],
            "current-context": "fake",
        }
        self.kubeconfig.write_text(json.dumps(whole))


class _Handler(http.server.BaseHTTPRequestHandler):
    api: FakeApi

    def do_GET(self) -> None:
        if self.path == f"{_GROUP}/clustertrainingruntimes/torch-distributed":
            self._answer(200, RUNTIME)
        else:
            self._answer(404, {"kind": "Status", "code": 404, "reason": "NotFound"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == f"{_GROUP}/namespaces/default/trainjobs"
        self.api.created.append(body)
        self._answer(201, body)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None: ...
