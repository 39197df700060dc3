"""Transfer of files between machines that share no directory (`directories`): parts to the rank that commits,
a checkpoint to a machine that starts without it. Every chunk is checked against its digest where it arrives,
and a receipt is written last, as in one directory.

One request a connection. After the secret, a header of JSON with its length before it; what follows are the
bytes of the files, in the order in which the header or the answer names them.

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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lastcall import errors
from lastcall.core import timing
from lastcall.core.checkpoint import commit, filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.engine import digest
from lastcall.core.process import throughput
from lastcall.core.ranks import receipts
from lastcall.core.ranks.receipts import Part
from lastcall.core.store import Store, links
from lastcall.core.sync.stopped import Stopped
from lastcall.core.transfer import connection
from lastcall.core.transfer.connection import Check, PeerConnection
from lastcall.storage import files as storage
from lastcall.types import FileRecord

log = logging.getLogger("lastcall")
_WAITING = 128  # connections that wait to be accepted
_ASK = 10.0  # seconds in which a rank has published its address
_DRAIN = 5.0  # seconds in which a sender learns that its part is refused
_REST = 0.5  # ... after a connection that could not be accepted
_INTRODUCTION = 10.0  # seconds in which a new connection has to show the secret, however it dribbles
_STRANGERS = 32  # connections that have not yet, at most
_SAVE = re.compile(r"[a-z][\w.-]{0,200}")  # the name of a save


class PartTransfer:
    """Receives the parts of other ranks, and sends this rank's."""

    def __init__(self, catalog: Catalog, store: Store, secret: str, rank: int, address: str) -> None:
        """`address`: where the machine of rank 0 is found, by its name or number."""
        self._catalog = catalog
        self._files = catalog.files
        self._store, self._asking = store.clone(), threading.Lock()
        self._known: dict[int, tuple[str, int]] = {}  # addresses of the others: also when the store is lost
        self._secret = secret.encode()
        self._over: set[str] = set()  # saves whose parts are refused
        self._closed = threading.Event()
        self._door = threading.Lock()
        # connections that have not shown the secret yet, the oldest first
        self._strangers: list[socket.socket] = []
        self._listening = _listen()
        store.set(
            f"part_transfer/{rank}",
            json.dumps([own_address(address), self._listening.getsockname()[1]]).encode(),
        )
        threading.Thread(target=self._serve, name="lastcall-parts", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()
        with self._asking:
            self._store.close()

    def over(self, save: str) -> None:
        """The save failed: parts that still arrive are refused and removed."""
        self._over.add(save)

    # ---- to others -----------------------------------------------------------------------------------------

    def send_part(self, rank: int, save: str, folder: Path, part: Part, check: Check) -> None:
        """Send a part to the directory of another rank; returns when it is durable there, with its receipt.
        SaveError if not."""
        try:
            with self._connected(rank, check) as wire:
                wire.send(
                    {"give": {"save": save, "rank": part.rank, "part": json.loads(receipts.packed(part))}}
                )
                with contextlib.suppress(connection.Answered):
                    for file in part.files:
                        wire.send_file(folder, file)
                error = wire.receive().get("error", "no answer")
        except (OSError, errors.StoreLost, ValueError) as trouble:
            raise errors.SaveError(f"could not send its part to rank {rank}: {trouble}") from trouble
        if error:
            raise errors.SaveError(f"rank {rank} could not receive its part: {error}")

    def fetch(self, rank: int, wanted: str, stop_requested: Callable[[], bool]) -> None:
        """A checkpoint, known by the fingerprint of its record, from the directory of another rank into this
        one. StorageError where it does not arrive, CheckpointError where it is damaged, Stopped if a notice
        comes meanwhile."""

        def check() -> None:
            if stop_requested():
                raise Stopped

        try:
            with self._connected(rank, check) as wire, self._catalog.arriving(wanted) as folder:
                wire.send({"ask": {"record": wanted}})
                answer = wire.receive()
                if answer.get("error"):
                    raise errors.StorageError(str(answer["error"]))
                record = records.parse(json.dumps(answer["record"]).encode())
                log.info(
                    "Fetching checkpoint-%d from rank %d (%s)",
                    record.step,
                    rank,
                    throughput.amount(record.size),
                )
                self._take_in(wire, folder, record.files)
                commit.seal(self._files, folder, record)
                self._catalog.publish(folder, record.step)
        except errors.CheckpointError:  # a ValueError, too
            raise
        except (OSError, errors.StoreLost, KeyError, ValueError) as trouble:
            raise errors.StorageError(f"could not fetch it from rank {rank}: {trouble}") from trouble

    @contextlib.contextmanager
    def _connected(self, rank: int, check: Check) -> Iterator[PeerConnection]:
        host, port = self._place_of(rank, check)
        with contextlib.closing(connection.connected(host, port, check)) as wire:
            wire.send_bytes(self._secret)
            yield wire

    def _place_of(self, rank: int, check: Check) -> tuple[str, int]:
        if rank not in self._known:
            self._known[rank] = self._ask_for(rank, check)
        return self._known[rank]

    def _ask_for(self, rank: int, check: Check) -> tuple[str, int]:
        for _ in range(int(_ASK / timing.LOOK)):
            check()
            with self._asking:
                told = self._store.get(f"part_transfer/{rank}", timing.LOOK)
            if told is not None:
                host, port = json.loads(told)
                return str(host), int(port)
        raise OSError(f"rank {rank} has not published its address")

    # ---- from others ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                link, _ = self._listening.accept()
                self._welcome(link)
                threading.Thread(target=self._answer, args=(link,), name="lastcall-part", daemon=True).start()
            except (OSError, RuntimeError) as error:  # too many open files, or threads: this may pass
                if not self._closed.wait(_REST):
                    log.warning("Could not accept a connection from another rank: %s", error)

    def _welcome(self, link: socket.socket) -> None:
        """Ranks send the secret at once. Of clients that do not, only the latest few stay connected: the
        others cost nothing."""
        with self._door:
            self._strangers.append(link)
            if len(self._strangers) > _STRANGERS:
                oldest = self._strangers.pop(0)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends

    def _introduced(self, link: socket.socket) -> None:
        with self._door:
            if link in self._strangers:
                self._strangers.remove(link)

    def _answer(self, link: socket.socket) -> None:
        with link:
            try:
                links.tune(link)
                wire = PeerConnection(link, _within(_INTRODUCTION))
                if not hmac.compare_digest(wire.receive_bytes(len(self._secret)), self._secret):
                    return
                self._introduced(link)
                wire.check = lambda: None
                self._do(wire, wire.receive())
            except (OSError, ValueError, struct.error) as error:
                log.debug("Could not receive a part from another rank: %s", error)
            finally:
                self._introduced(link)

    def _do(self, wire: PeerConnection, request: dict[str, Any]) -> None:
        try:
            if "give" in request:
                self._accept(wire, request["give"])
                wire.send({"error": ""})
            else:
                self._hand_out(wire, str(request["ask"]["record"]))
            return
        except (errors.LastcallError, KeyError, TypeError, ValueError) as error:
            why = str(error) or type(error).__name__
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        wire.check = lambda: None
        wire.send({"error": why})
        wire.drain(_DRAIN)

    def _accept(self, wire: PeerConnection, body: dict[str, Any]) -> None:
        save, rank = body["save"], body["rank"]
        if not isinstance(save, str) or not _SAVE.fullmatch(save):
            raise ValueError(f"{save!r} is not the name of a save")
        if type(rank) is not int or rank < 0:
            raise ValueError(f"{rank!r} is no rank")
        part = receipts.unpacked(body["part"], rank)
        folder = self._catalog.staging / save

        def wanted() -> None:
            if save in self._over or self._closed.is_set():
                raise errors.SaveError(f"{save} is over: it was abandoned")

        wire.check = wanted
        try:
            wanted()
            folder.mkdir(parents=True, exist_ok=True)
            self._take_in(wire, folder, part.files)
            receipts.write(self._files, folder, part)
        finally:
            # the committer has cleared the folder away, or will; this may have been written after that
            if save in self._over:
                with contextlib.suppress(OSError):
                    storage.remove_tree(self._files, folder)

    def _take_in(self, wire: PeerConnection, folder: Path, files: Sequence[FileRecord]) -> None:
        """Their bytes, durable."""
        for file in files:
            self._take_in_one(wire, folder / file.name, file)
        for below in {(folder / file.name).parent for file in files} | {folder}:
            self._files.sync_directory(below)

    def _take_in_one(self, wire: PeerConnection, path: Path, file: FileRecord) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.name.endswith(".safetensors"):  # files of an earlier checkpoint are written over
            self._catalog.pool(filenames.rank_of(file.name)).take(file.size, path)
        fd = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
        try:
            offset = 0
            for chunk in file.chunks:
                wire.check()
                data = wire.exactly(min(file.chunk, file.size - offset))
                if digest.of(memoryview(data)) != chunk:
                    raise errors.CheckpointError(f"{file.name} does not match its digest")
                storage.write_all(self._files, fd, [memoryview(data)], offset)
                offset += len(data)
            self._files.truncate(fd, file.size)
            self._files.fsync(fd)
        finally:
            self._files.close(fd)

    def _hand_out(self, wire: PeerConnection, wanted: str) -> None:
        entry = next((entry for entry in self._catalog.entries() if entry.record.fingerprint == wanted), None)
        if entry is None:
            raise errors.StorageError("it is not there")
        wire.send({"error": "", "record": json.loads(entry.record.to_json())})
        with contextlib.suppress(connection.Answered):  # it has closed the connection
            for file in entry.record.files:
                wire.send_file(entry.path, file)


def _within(seconds: float) -> Check:
    until = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() >= until:
            raise TimeoutError(f"no secret in {seconds:.0f} s")

    return check


def _listen() -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(
        ("", 0), family=family, backlog=_WAITING, dualstack_ipv6=family == socket.AF_INET6
    )


def own_address(first: str) -> str:
    """The address of this machine for the others, if they find that of rank 0 as `first`. On that machine it
    is the same: its own name may resolve to 127.0.1.1. On another it is the local address of the route there.
    Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                own = str(probe.getsockname()[0])
                return first if own == str(place[0]) or own.startswith("127.") else own
    return socket.gethostname()
