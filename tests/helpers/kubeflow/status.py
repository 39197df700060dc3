"""Kubeflow's controller, as far as pods tell it of their status (KEP-2779)."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable
from typing import Any

from helpers.servers.http_server import Served


class Controller(Served):
    """`told`: each status; `asked`: each request, with its path and its token."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.told: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str | None]] = []
        self.answers = 200
        self.changed = threading.Condition()
        controller = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with controller.changed:
                    controller.asked.append((self.path, self.headers["Authorization"]))
                    if controller.answers == 200:
                        controller.told.append(body["trainerStatus"])
                    controller.changed.notify_all()
                self.send_response(controller.answers)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        super().__init__(Handler, tls)
        self.url = f"{self.address}/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status"

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30)


def metrics(status: dict[str, Any]) -> dict[str, str]:
    return {metric["name"]: metric["value"] for metric in status["metrics"]}
