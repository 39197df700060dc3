"""An HTTP server of the tests' own, on a port of its own, for as long as a block lasts."""

from __future__ import annotations

import http.server
import ssl
import threading
from typing import Self


class Served:
    def __init__(
        self,
        handler: type[http.server.BaseHTTPRequestHandler],
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._server = http.server.ThreadingHTTPServer((host, 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.address = f"{'https' if tls else 'http'}://{host}:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
