"""A connection between two ranks (`parts`): messages of JSON with their length before them, and the bytes of
files.

A thread that waits on it checks several times a second whether the transfer is still wanted: a cut link, a
frozen rank or a hanging disk must not block it beyond its deadline.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lastcall.core import timing
from lastcall.core.checkpoint import record as records
from lastcall.core.store import links
from lastcall.types import FileRecord

_LENGTH = struct.Struct(">Q")
_SILENCE = 30.0  # seconds without a byte after which the other side counts as gone
_CONNECT = 10.0
_PIECE = 4 * 1024 * 1024

Check = Callable[[], None]  # raises if it is no longer wanted


class Answered(Exception):
    """The other side has answered before it had received all: it does not want the rest."""


class PeerConnection:
    def __init__(self, link: socket.socket, check: Check) -> None:
        self._link = link
        self.check = check
        link.setblocking(False)

    def close(self) -> None:
        self._link.close()

    # ---- messages ------------------------------------------------------------------------------------------

    def send(self, body: dict[str, Any]) -> None:
        self.send_bytes(json.dumps(body).encode())

    def send_bytes(self, data: bytes) -> None:
        view = memoryview(_LENGTH.pack(len(data)) + data)
        while view:
            try:
                view = view[self._link.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def receive(self) -> dict[str, Any]:
        body = json.loads(self.receive_bytes(records.LARGEST))
        if not isinstance(body, dict):
            raise ValueError("not an object")
        return body

    def receive_bytes(self, largest: int) -> bytearray:
        (length,) = _LENGTH.unpack(self.exactly(_LENGTH.size))
        if length > largest:
            raise ValueError(f"{length} bytes, and {largest} are taken")
        return self.exactly(length)

    # ---- files ---------------------------------------------------------------------------------------------

    def exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                got = self._link.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN)
                self.check()
                continue
            if not got:
                raise ConnectionError("the other side has closed the connection")
            view = view[got:]
        return data

    def send_file(self, folder: Path, file: FileRecord) -> None:
        """Raises Answered if the other side answers before everything is sent."""
        offset = 0
        with open(folder / file.name, "rb") as source:
            while offset < file.size:
                self.check()
                if self._ready(select.POLLIN, 0.0):
                    raise Answered
                try:
                    sent = os.sendfile(
                        self._link.fileno(), source.fileno(), offset, min(_PIECE, file.size - offset)
                    )
                except BlockingIOError:
                    self._wait(select.POLLOUT | select.POLLIN)
                    continue
                if not sent:
                    raise OSError(f"{file.name} is shorter than it was")
                offset += sent

    def drain(self, seconds: float) -> None:
        """Read and discard what is still on its way: closing a connection with unread bytes would lose the
        last message sent."""
        until, scratch = time.monotonic() + seconds, bytearray(_PIECE)
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
            while time.monotonic() < until:
                if self._ready(select.POLLIN, timing.LOOK) and not self._link.recv_into(scratch):
                    return

    # ---- waiting -------------------------------------------------------------------------------------------

    def _wait(self, events: int) -> None:
        until = time.monotonic() + _SILENCE
        while not self._ready(events, timing.LOOK):
            self.check()
            if time.monotonic() >= until:
                raise TimeoutError(f"no data for {_SILENCE:.0f} s")

    def _ready(self, events: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._link, events)
        return bool(poll.poll(int(seconds * 1000)))


def connected(host: str, port: int, check: Check) -> PeerConnection:
    """OSError if there is no answer."""
    trouble = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        link = socket.socket(family, kind, protocol)
        try:
            links.tune(link)
            wire = PeerConnection(link, check)
            _connect(link, place, check)
            return wire
        except OSError as error:
            link.close()
            trouble = error
        except BaseException:
            link.close()
            raise
    raise trouble


def _connect(link: socket.socket, place: Sequence[Any], check: Check) -> None:
    until = time.monotonic() + _CONNECT
    error = link.connect_ex(tuple(place))
    if error == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(link, select.POLLOUT)
        while not poll.poll(int(timing.LOOK * 1000)):
            check()
            if time.monotonic() >= until:
                raise TimeoutError(f"no answer for {_CONNECT:.0f} s")
        error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
