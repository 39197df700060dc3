"""Kubeflow's controller, as far as pods tell it of their status (KEP-2779)."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable
from typing import Any


class Controller:
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

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status"

    def __enter__(self) -> Controller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30)


def metrics(status: dict[str, Any]) -> dict[str, str]:
    return {metric["name"]: metric["value"] for metric in status["metrics"]}
