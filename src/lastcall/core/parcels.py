"""Files between machines that share no directory (`homes`): a part on its way to the rank that commits, a checkpoint on its way to a
machine that starts without it. Every chunk is checked against its digest where it arrives, and a receipt is written last, as in one
directory.

One request a connection. After the secret, a header of JSON with its length before it; what follows are the bytes of the files, in the
order in which the header or the answer names them.

    give  {"save": NAME, "rank": RANK, "part": a receipt}  bytes  -> {"error": ""}
    ask   {"record": FINGERPRINT}                        -> {"error": "", "record": ...}  bytes
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.core import digest, fetching, naming, receipts
from lastcall.core import record as records
from lastcall.core.catalog import Catalog
from lastcall.core.receipts import Part
from lastcall.core.store import Store, links
from lastcall.storage import files as storage
from lastcall.types import FileRecord

log = logging.getLogger("lastcall")
_LENGTH = struct.Struct(">Q")
_LARGEST = 512 * 1024 * 1024  # of a header
_SILENCE = 30.0  # seconds without a byte after which the other side counts as gone
_CONNECT = 10.0
_WAITING = 128  # connections that have not been taken up
_PIECE = 4 * 1024 * 1024
_SAVE = re.compile(r"[a-z][\w.-]{0,200}")  # the name of a save

Check = Callable[[], None]  # raises where it is not wanted any more


class Parcels:
    """What a rank takes in, and the way to the others."""

    def __init__(self, catalog: Catalog, store: Store, secret: str, rank: int, address: str) -> None:
        """`address`: where rank 0 is found; the others are where they reach it from."""
        self._catalog = catalog
        self._files = catalog.files
        self._store, self._asking = store.clone(), threading.Lock()
        self._secret = secret.encode()
        self._listening = _listen()
        host = address if rank == 0 else _own_address(address)
        store.set(f"parcels/{rank}", json.dumps([host, self._listening.getsockname()[1]]).encode())
        threading.Thread(target=self._serve, name="lastcall-parcels", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()

    # ---- to others -------------------------------------------------------------------------------------------------------------

    def give(self, rank: int, save: str, folder: Path, part: Part, check: Check) -> None:
        """Bring a part to the directory of another rank; returns when it is durable there, its receipt included. SaveError if not."""
        try:
            with self._connected(rank) as link:
                _send(link, {"give": {"save": save, "rank": part.rank, "part": json.loads(receipts.packed(part))}})
                for file in part.files:
                    _send_file(link, folder, file, check)
                error = _receive(link).get("error", "no answer")
        except (OSError, errors.StoreLost, ValueError) as trouble:
            raise errors.SaveError(f"its part could not be sent to rank {rank}: {trouble}") from trouble
        if error:
            raise errors.SaveError(f"rank {rank} could not take its part: {error}")

    def bring(self, rank: int, wanted: str, told: Callable[[], bool]) -> None:
        """A checkpoint, known by the fingerprint of its record, from the directory of another rank into this one. StorageError where
        it does not come, CheckpointError where it is not what it was, Told if a notice comes meanwhile."""

        def check() -> None:
            if told():
                raise fetching.Told

        try:
            with self._connected(rank) as link, self._catalog.arriving(wanted) as folder:
                _send(link, {"ask": {"record": wanted}})
                answer = _receive(link)
                if answer.get("error"):
                    raise errors.StorageError(str(answer["error"]))
                record = records.parse(json.dumps(answer["record"]).encode())
                log.info("Fetching checkpoint-%d from rank %d (%.0f MB)", record.step, rank, record.size / 1e6)
                self._take_in(link, folder, record.files, check)
                storage.write_small(self._files, folder / records.NAME, record.to_json())
                self._files.sync_directory(folder)
                self._catalog.publish(folder, record.step)
        except (OSError, errors.StoreLost, KeyError) as trouble:
            raise errors.StorageError(f"it could not be brought from rank {rank}: {trouble}") from trouble

    @contextlib.contextmanager
    def _connected(self, rank: int) -> Iterator[socket.socket]:
        with self._asking:
            told = self._store.get(f"parcels/{rank}", _CONNECT)
        if told is None:
            raise OSError(f"rank {rank} has not said where it is")
        host, port = json.loads(told)
        with socket.create_connection((host, port), _CONNECT) as link:
            links.tune(link)
            link.settimeout(_SILENCE)
            link.sendall(_LENGTH.pack(len(self._secret)) + self._secret)
            yield link

    # ---- from others -----------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(link,), name="lastcall-parcel", daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link:
            try:
                links.tune(link)
                link.settimeout(_SILENCE)
                if not hmac.compare_digest(_exactly(link, _length(link, len(self._secret))), self._secret):
                    return
                request = _receive(link)
                try:
                    if "give" in request:
                        self._accept(link, request["give"])
                        _send(link, {"error": ""})
                    else:
                        self._hand_out(link, str(request["ask"]["record"]))
                except (errors.LastcallError, KeyError, TypeError, ValueError) as error:
                    _send(link, {"error": str(error) or type(error).__name__})
                except OSError as error:
                    _send(link, {"error": error.strerror or str(error) or type(error).__name__})
            except (OSError, ValueError, struct.error) as error:
                log.debug("A parcel did not arrive: %s", error)

    def _accept(self, link: socket.socket, body: dict[str, Any]) -> None:
        save, rank = body["save"], body["rank"]
        if not isinstance(save, str) or not _SAVE.fullmatch(save):
            raise ValueError(f"{save!r} is not the name of a save")
        if type(rank) is not int or rank < 0:
            raise ValueError(f"{rank!r} is no rank")
        part = receipts.unpacked(body["part"], rank)
        folder = self._catalog.staging / save
        folder.mkdir(parents=True, exist_ok=True)
        self._take_in(link, folder, part.files, lambda: None)
        receipts.write(self._files, folder, part)

    def _take_in(self, link: socket.socket, folder: Path, files: Sequence[FileRecord], check: Check) -> None:
        """Their bytes, durable."""
        for file in files:
            self._take_in_one(link, folder / file.name, file, check)
        for below in {(folder / file.name).parent for file in files} | {folder}:
            self._files.sync_directory(below)

    def _take_in_one(self, link: socket.socket, path: Path, file: FileRecord, check: Check) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.name.endswith(".safetensors"):  # what a former checkpoint has left is written over
            self._catalog.pool(naming.rank_of(file.name)).take(file.size, path)
        fd = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
        try:
            offset = 0
            for chunk in file.chunks:
                check()
                data = _exactly(link, min(file.chunk, file.size - offset))
                if digest.of(memoryview(data)) != chunk:
                    raise errors.CheckpointError(f"{file.name} does not match its digest")
                storage.write_all(self._files, fd, [memoryview(data)], offset)
                offset += len(data)
            self._files.truncate(fd, file.size)
            self._files.fsync(fd)
        finally:
            self._files.close(fd)

    def _hand_out(self, link: socket.socket, wanted: str) -> None:
        entry = next((entry for entry in self._catalog.entries() if entry.record.fingerprint == wanted), None)
        if entry is None:
            raise errors.StorageError("it is not there")
        _send(link, {"error": "", "record": json.loads(entry.record.to_json())})
        for file in entry.record.files:
            _send_file(link, entry.path, file, lambda: None)


# ---- bytes -----------------------------------------------------------------------------------------------------------------------


def _send(link: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    link.sendall(_LENGTH.pack(len(data)) + data)


def _receive(link: socket.socket) -> dict[str, Any]:
    body = json.loads(_exactly(link, _length(link, _LARGEST)))
    if not isinstance(body, dict):
        raise ValueError("not an object")
    return body


def _length(link: socket.socket, largest: int) -> int:
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if length > largest:
        raise ValueError(f"{length} bytes, and {largest} are taken")
    return int(length)


def _exactly(link: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = link.recv_into(view)
        if not got:
            raise ConnectionError("the other side has closed the connection")
        view = view[got:]
    return data


def _send_file(link: socket.socket, folder: Path, file: FileRecord, check: Check) -> None:
    with open(folder / file.name, "rb") as source:
        for offset in range(0, file.size, _PIECE):
            check()
            count = min(_PIECE, file.size - offset)
            if link.sendfile(source, offset, count) != count:
                raise OSError(f"{file.name} is shorter than it was")


def _listen() -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=_WAITING, dualstack_ipv6=family == socket.AF_INET6)


def _own_address(other: str) -> str:
    """The address of this machine as another one sees it, by the way that leads there. Nothing is sent."""
    found: Sequence[Any] = ()
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                found = probe.getsockname()
                break
    return str(found[0]) if found else socket.gethostname()
