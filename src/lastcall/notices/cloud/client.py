"""HTTP to a metadata server that may be broken in any way, or may be some other server.

Of the standard library, `http.client` and not `urllib.request`: it follows no redirect and reads no proxy
from the environment (a proxy would answer for its own machine), and it lets the whole exchange be bounded. A
timeout of a socket bounds one read only: a server that sends a byte a second would block for hours.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from lastcall.notices.polling import Trouble

SECONDS = 2.0  # for a whole exchange
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def text(self) -> str:
        try:
            return self.body.decode().strip()
        except ValueError:
            raise Trouble("garbage", "returned something that is not text") from None

    def mapping(self) -> dict[str, object]:
        try:
            value = json.loads(self.text())
        except (ValueError, RecursionError):
            raise Trouble("garbage", f"returned something that is not JSON: {self.body[:60]!r}") from None
        if not isinstance(value, dict):
            raise Trouble("garbage", f"returned JSON that is not an object: {self.body[:60]!r}")
        return value

    def expect(self) -> HttpAnswer:
        """This answer, if it is one with status 200."""
        if self.status != 200:
            raise Trouble(f"status {self.status}", f"returned HTTP status {self.status}")
        return self


class Client:
    """One exchange after the other with one server, each on a connection of its own."""

    def __init__(self, base: str) -> None:
        self.base = base.rstrip("/")
        self.seconds = SECONDS
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def request(
        self, method: str, path: str, headers: Mapping[str, str], *, seconds: float | None = None
    ) -> HttpAnswer:
        """An answer with any status, or Trouble."""
        seconds = self.seconds if seconds is None else seconds
        try:
            parts = urllib.parse.urlsplit(self.base)
            host, port = parts.hostname, parts.port or 80
            connection = _TimedConnection(self, host or "", port, time.monotonic() + seconds)
        except (ValueError, http.client.InvalidURL):
            host = None
        if not host or parts.scheme != "http":
            raise Trouble(
                "address", f"cannot be queried: {self.base!r} is not an address like http://169.254.169.254"
            )
        try:
            connection.request(method, parts.path + path, headers=dict(headers))
            return _answer(connection.getresponse())
        except TimeoutError:
            raise Trouble("silent", f"did not answer within {seconds:g} s ({self.base})") from None
        except OSError as error:
            raise Trouble("unreachable", f"cannot be reached: {error} ({self.base})") from error
        except (http.client.HTTPException, ValueError) as error:
            raise Trouble("protocol", f"does not speak HTTP as expected: {error!r} ({self.base})") from error
        finally:
            connection.close()
            self._leave()

    def open(self) -> None:
        """Allow requests again after close()."""
        with self._lock:
            self._closed = False

    def close(self) -> None:
        """End a request that waits on another thread, and refuse further ones."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def enter(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closed:
                sock.close()
                raise Trouble("closed", "is no longer queried")
            self._socket = sock

    def _leave(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None


def _answer(response: http.client.HTTPResponse) -> HttpAnswer:
    body = response.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise Trouble("huge", f"returned more than {_MOST_BYTES // 1024} KB")
    return HttpAnswer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


class _TimedConnection(http.client.HTTPConnection):
    """A connection that ends at a fixed time, whatever it is doing."""

    def __init__(self, client: Client, host: str, port: int, deadline: float) -> None:
        super().__init__(host, port)
        self._client = client
        self._deadline = deadline

    def connect(self) -> None:
        sock = socket.create_connection(
            (self.host, self.port), timeout=max(0.001, self._deadline - time.monotonic())
        )
        self._client.enter(sock)
        self.sock = _Bounded(sock, self._deadline)


class _Bounded:
    """As much of a socket as http.client needs."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def close(self) -> None:
        """Not yet: http.client closes before it has read the body if the server will not keep the
        connection."""

    def sendall(self, data: bytes) -> None:
        self._hurry()
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self))

    def recv_into(self, buffer: memoryview) -> int:
        self._hurry()
        return self._sock.recv_into(buffer)

    def _hurry(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)


class _Reader(io.RawIOBase):
    def __init__(self, source: _Bounded) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._source.recv_into(buffer)
