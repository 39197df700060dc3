"""The run's progress as JSON over HTTP, where a port was set: the page that OpenShift AI's controller polls,
and other clients may.

What it says is in `report`. No GET waits for training or for a disk, and training for none of them. The
server is on 0.0.0.0, since the controller is in another pod, reads nothing of a request but its path, and has
a few threads at most. `http.server.HTTPServer` would ask the DNS for our name before it listens, which may
take a minute.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import os
import socket
import socketserver
import threading
import weakref

from lastcall.core.progress.report import ProgressReport

log = logging.getLogger("lastcall")
_AT_ONCE = 8  # answers; with one more, the oldest that is not done is cut off
_REQUEST_SECONDS = 2.0  # for a request to arrive, as long as the controller waits for the answer
_CLOSE_SECONDS = 1.0


class MetricsPage:
    """Of one session, on rank 0."""

    def __init__(self, port: int, report: ProgressReport) -> None:
        self.port = port  # once it is open: the one that was found for 0
        self.report = report
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Listen. An unavailable port is a warning: it must not end a run."""
        try:
            self._server = server = _Server(self.port, self)
        except OSError as error:
            log.warning(
                "Could not serve progress on port %d (%s); training continues. Choose another: export "
                "LASTCALL_PROGRESS_PORT=PORT",
                self.port,
                error,
            )
            return
        self.port = server.server_address[1]
        _listening.add(server)
        self._thread = threading.Thread(target=server.serve, name="lastcall-page", daemon=True)
        self._thread.start()
        log.info("Serving progress on port %d (/metrics)", self.port)

    def close(self) -> None:
        if self._server is None:
            return
        self._server.leave()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        self._server.server_close()
        self._server = None


# ---- the server --------------------------------------------------------------------------------------------


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # connections of the last incarnation that are in TIME_WAIT
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, port: int, page: MetricsPage) -> None:
        self.page = weakref.proxy(page)  # a thread that answers must not keep a session's state alive
        self._leaving = threading.Event()
        self._door = threading.Lock()
        self._answering: list[socket.socket] = []  # requests, the oldest first
        super().__init__(("0.0.0.0", port), _Handler)

    def serve(self) -> None:
        while not self._leaving.is_set():
            self.handle_request()  # sleeps until there is one

    def leave(self) -> None:
        self._leaving.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a request

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            # no file descriptor left: the request stays in the queue, and would be accepted again at once
            self._leaving.wait(0.5)
            raise

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        assert isinstance(request, socket.socket)
        with self._door:
            self._answering.append(request)
            # The oldest open connection is slow or hostile: close that one, never the new one.
            oldest = self._answering.pop(0) if len(self._answering) > _AT_ONCE else None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._done(request)
            raise

    def _done(self, request: object) -> None:
        with self._door:
            self._answering = [one for one in self._answering if one is not request]

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._done(request)

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("Could not answer a request for the progress", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS
    server_version, sys_version = "lastcall", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        body = json.dumps(self.server.page.report.document(), allow_nan=False).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it would be a line every few seconds on the stderr of a training run."""


_listening: weakref.WeakSet[_Server] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked worker that outlives its parent would keep the port, and the next incarnation would have
    none."""
    for server in list(_listening):
        with contextlib.suppress(OSError):
            server.socket.close()


os.register_at_fork(after_in_child=_close_in_child)
