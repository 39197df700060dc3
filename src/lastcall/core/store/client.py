"""A connection to our own store (server.py). Every call comes back in a bounded time, whatever happens to the
server or to the link."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from lastcall import errors
from lastcall.core.store import links, wire

_MARGIN = 5.0  # seconds for an answer, beyond those that the request itself waits
_LAST_LOOK = 1.0
_MANY = 4096  # keys in one request: a frame holds them, however long they are


class StoreClient:
    """StoreLost if the server does not answer, or does not take the secret. Once lost, the connection stays
    lost."""

    def __init__(self, host: str, port: int, secret: str, connect_timeout: float = 10.0) -> None:
        self._server = (host, port)
        self._secret = secret
        self._connect_timeout = connect_timeout
        self._busy = threading.Lock()
        self._closed = False
        self._lost: str | None = None
        try:
            self._link = socket.create_connection(self._server, connect_timeout)
        except (OSError, UnicodeError) as error:  # UnicodeError: what a host name cannot be
            raise errors.StoreLost(f"Could not reach the store at {self}: {error}") from error
        try:
            links.tune(self._link)
            self._ask(connect_timeout, wire.HELLO, secret.encode())
        except (OSError, errors.StoreLost) as error:
            self._link.close()
            raise errors.StoreLost(f"The store at {self} refused the connection: {error}") from error

    def __str__(self) -> str:
        return f"{self._server[0]}:{self._server[1]}"

    def set(self, key: str, value: bytes) -> None:
        self._tell(wire.frame(wire.SET, wire.encode_key(key), wire.encode_value(value)))

    def get(self, key: str, timeout: float) -> bytes | None:
        seconds = min(max(timeout, 0.0), 1e9)
        (value,) = self._ask(seconds + _MARGIN, wire.GET, wire.encode_key(key), wire.encode_seconds(seconds))
        return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        values: list[bytes | None] = []
        while len(values) < len(keys):
            some = keys[len(values) : len(values) + _MANY]
            values += self._ask(_MARGIN, wire.MANY, *map(wire.encode_key, some))
        return values

    def claim(self, key: str, value: bytes) -> bytes:
        if not value:
            raise ValueError(f"nothing was claimed for {key}: an empty value says nothing")
        (kept,) = self._ask(_MARGIN, wire.CLAIM, wire.encode_key(key), wire.encode_value(value))
        assert kept is not None
        return kept

    def add(self, key: str, amount: int) -> int:
        (total,) = self._ask(_MARGIN, wire.ADD, wire.encode_key(key), str(amount).encode())
        assert total is not None
        return int(total)

    def clone(self) -> StoreClient:
        if self._lost is not None or self._closed:
            raise self._loss()
        return StoreClient(*self._server, self._secret, self._connect_timeout)

    def close(self) -> None:
        """From any thread. The file descriptor is closed only when no thread uses it: its number would soon
        be another file's."""
        self._closed = True
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the server was first
        if self._busy.acquire(timeout=_LAST_LOOK):
            self._link.close()
            self._busy.release()

    def _tell(self, frame: bytes) -> None:
        with self._busy:
            self._send(frame)

    def _ask(self, patience: float, what: int, *fields: bytes) -> list[bytes | None]:
        with self._busy:
            self._send(wire.frame(what, *fields))
            try:
                deadline = time.monotonic() + patience
                header = self._receive(wire.HEADER.size, deadline)
                kind, answer = wire.parse(self._receive(wire.length_of(header, wire.LARGEST_FRAME), deadline))
                if (
                    kind != wire.ANSWER
                    or (len(answer) != 1 and what not in (wire.HELLO, wire.MANY))
                    or (what == wire.MANY and not answer)
                ):
                    raise wire.Malformed(f"answer {kind} with {len(answer)} fields")
                return answer
            except (OSError, wire.Malformed) as error:
                raise self._loss(f"{error}") from error

    def _send(self, frame: bytes) -> None:
        if self._lost is not None or self._closed:
            raise self._loss()
        try:
            self._link.settimeout(_MARGIN)
            self._link.sendall(frame)
        except OSError as error:
            raise self._loss(f"{error}") from error

    def _receive(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._receive_some(view, deadline)
            if got == 0:
                raise ConnectionError("the server closed the connection")
            view = view[got:]
        return bytes(data)

    def _receive_some(self, view: memoryview, deadline: float) -> int:
        try:
            self._link.settimeout(max(_LAST_LOOK, deadline - time.monotonic()))
            return self._link.recv_into(view)
        except TimeoutError:
            # Ctrl-Z stops client and server, but not the clock: after `fg` the answer may be a moment away.
            self._link.settimeout(_LAST_LOOK)
            try:
                return self._link.recv_into(view)
            except TimeoutError:
                raise TimeoutError("no answer in time") from None

    def _loss(self, why: str | None = None) -> errors.StoreLost:
        self._lost = self._lost or why
        return errors.StoreLost(
            f"The store at {self} is lost: {'this connection was closed' if self._closed else self._lost}"
        )


def parse_port_and_secret(text: str) -> tuple[int, str] | None:
    """The value that `lastcall run` sets in LASTCALL_STORE for the processes below it; None if it is
    invalid."""
    port, _, secret = text.partition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or not secret:
        return None
    return int(port), secret
