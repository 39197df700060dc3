"""Our own store's server among strangers, liars and crowds."""

from __future__ import annotations

import errno
import resource
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from helpers.processes.forkserver import until
from lastcall import errors
from lastcall.core.store import server, wire
from lastcall.core.store.client import StoreClient
from lastcall.core.store.server import StoreServer

SECRET = "s3cret"
HELLO = wire.frame(wire.HELLO, SECRET.encode())


@pytest.fixture
def store() -> Iterator[StoreServer]:
    store = StoreServer(secret=SECRET)
    store.start()
    yield store
    store.stop()


def connected(store: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", store.address[1]), 60)


def client(store: StoreServer) -> StoreClient:
    return StoreClient("127.0.0.1", store.address[1], SECRET)


def read(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (more := link.recv(count - len(data))):
        data += more
    return bytes(data)


def is_closed(link: socket.socket) -> bool:
    try:
        while link.recv(65536):
            pass
    except ConnectionError:
        pass
    link.close()
    return True


@pytest.mark.parametrize(
    "sent",
    [
        wire.frame(wire.HELLO, b"guess"),
        wire.frame(wire.HELLO, b""),
        wire.frame(wire.HELLO, None),
        wire.frame(wire.HELLO),
        wire.frame(wire.HELLO, SECRET.encode(), b"more"),
        wire.frame(wire.SET, b"key", b"value"),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        struct.pack(">IB", wire.LARGEST_HELLO + 1, wire.HELLO),
        struct.pack(">I", 0),
    ],
)
def test_whoever_does_not_show_the_secret_is_dropped(store: StoreServer, sent: bytes) -> None:
    link = connected(store)
    link.sendall(sent)
    assert is_closed(link)
    friend = client(store)
    assert friend.get_many(["key"]) == [None]
    friend.close()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">IB", wire.LARGEST_FRAME + 1, wire.SET),
        struct.pack(">IBI", 9, wire.SET, 2**31) + b"key!",  # a field beyond its frame
        struct.pack(">IB", 3, wire.SET) + b"ab",  # a field's length cut off
        wire.frame(99, b"key", b"value"),
        wire.frame(wire.HELLO, SECRET.encode()),
        wire.frame(wire.SET, b"key"),
        wire.frame(wire.SET, None, b"value"),
        wire.frame(wire.SET, b"", b"value"),
        wire.frame(wire.SET, b"\xff\xfe", b"value"),
        wire.frame(wire.SET, b"k" * (wire.LONGEST_KEY + 1), b"value"),
        wire.frame(wire.MANY, b"key", b"k" * (wire.LONGEST_KEY + 1)),
        wire.frame(wire.ADD, b"key", b"many"),
        wire.frame(wire.ADD, b"key", b"9" * 5000),
        wire.frame(wire.ADD, b"text", b"1"),
        wire.frame(wire.GET, b"key", b"soon"),
        wire.frame(wire.GET, b"key", struct.pack(">d", float("nan"))),
        wire.frame(wire.GET, b"key", struct.pack(">d", float("inf"))),
        wire.frame(wire.GET, b"key", struct.pack(">d", -1.0)),
        wire.frame(wire.GET, b"never", struct.pack(">d", 60.0)) + wire.frame(wire.SET, b"key", b"value"),
    ],
)
def test_whoever_breaks_the_rules_loses_only_its_own_connection(store: StoreServer, sent: bytes) -> None:
    friend = client(store)
    friend.set("text", b"no number")
    assert friend.get("text", 60) == b"no number"
    link = connected(store)
    link.sendall(HELLO + sent)
    assert is_closed(link)
    assert friend.get_many(["key", "text"]) == [None, b"no number"]
    friend.close()


def test_a_frame_may_come_byte_by_byte(store: StoreServer) -> None:
    link = connected(store)
    for byte in HELLO + wire.frame(wire.CLAIM, b"key", b"value"):
        link.sendall(bytes([byte]))
    expected = wire.frame(wire.ANSWER) + wire.frame(wire.ANSWER, b"value")
    assert read(link, len(expected)) == expected
    link.close()


def test_whoever_says_nothing_is_dropped_in_time(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_INTRODUCTION", 0.02)
    silent, slow = connected(store), connected(store)
    slow.sendall(HELLO[:5])
    assert is_closed(silent) and is_closed(slow)


def test_a_client_that_does_not_read_holds_up_nobody(store: StoreServer) -> None:
    friend = client(store)
    friend.set("large", bytes(wire.LARGEST_VALUE))
    assert friend.get("large", 60)
    greedy = connected(store)
    greedy.sendall(HELLO + wire.frame(wire.GET, b"large", struct.pack(">d", 0.0)) * 50)
    for n in range(10):
        assert friend.add("count", 1) == n + 1
    assert len(friend.get("large", 60) or b"") == wire.LARGEST_VALUE
    assert read(greedy, 5) == wire.frame(wire.ANSWER)
    for _ in range(3):  # and it gets all of it as soon as it does
        assert (
            len(read(greedy, wire.length_of(read(greedy, 4), wire.LARGEST_FRAME))) == wire.LARGEST_VALUE + 5
        )
    greedy.close()
    friend.close()


def test_a_client_that_went_away_while_it_waited_is_forgotten(store: StoreServer) -> None:
    link = connected(store)
    link.sendall(HELLO + wire.frame(wire.GET, b"key", struct.pack(">d", 3600.0)))
    until(lambda: "key" in store._waiting, "the wait")
    link.close()
    until(lambda: not store._waiting and not store._connections, "the end of the wait")


def test_many_wait_for_one_key_and_all_are_woken(store: StoreServer) -> None:
    links = [connected(store) for _ in range(200)]
    for link in links:
        link.sendall(HELLO + wire.frame(wire.GET, b"decision", struct.pack(">d", 3600.0)))
    until(lambda: len(store._waiting.get("decision", ())) == 200, "200 waits")
    friend = client(store)
    friend.set("decision", b"120")
    expected = wire.frame(wire.ANSWER) + wire.frame(wire.ANSWER, b"120")
    assert {read(link, len(expected)) for link in links} == {expected}
    for link in links:
        link.close()
    friend.close()


def test_answered_waits_leave_nothing_behind(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STALE", 10)
    link = connected(store)
    link.sendall(HELLO)
    friend = client(store)
    answer = wire.frame(wire.ANSWER, b"x")
    assert read(link, 5) == wire.frame(wire.ANSWER)
    for n in range(50):
        link.sendall(wire.frame(wire.GET, b"key-%d" % n, struct.pack(">d", 3600.0)))
        until(lambda n=n: f"key-{n}" in store._waiting, "the wait")  # type: ignore[misc]
        friend.set(f"key-{n}", b"x")
        assert read(link, len(answer)) == answer
    assert len(store._deadlines) <= 14 and not store._waiting
    link.close()
    friend.close()


def test_a_cleared_store_knows_neither_keys_nor_clients(store: StoreServer) -> None:
    old = client(store)
    old.set("notice", b"stop")
    assert old.get("notice", 60) == b"stop"
    store.clear()
    with pytest.raises(errors.StoreLost):
        old.get("notice", 60)
    new = client(store)
    assert new.get("notice", 0) is None
    old.close()
    new.close()


def test_a_full_table_of_files_is_made_larger_for_a_while(store: StoreServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert store._more_files() == (soft < hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert not store._more_files()
    store.clear()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


class Full:
    """A listener for which there is no file descriptor left, so many times."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self._times = times

    def accept(self) -> tuple[socket.socket, object]:
        self._times -= 1
        if self._times >= 0:
            raise OSError(errno.ENFILE, "Too many open files in system")
        return self._listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def test_no_room_for_a_connection_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_NO_ROOM", 0.02)
    listen = server._listen
    monkeypatch.setattr(server, "_listen", lambda host, port: Full(listen(host, port), 2))
    store = StoreServer("127.0.0.1", secret=SECRET)
    store.start()
    friend = client(store)
    assert friend.add("count", 1) == 1
    assert caplog.text.count("Could not accept another connection") == 2 and "ulimit -n" in caplog.text
    friend.close()
    store.stop()


def test_a_port_that_is_taken_is_an_error_of_the_start(store: StoreServer) -> None:
    second = StoreServer(port=store.address[1], secret=SECRET)
    with pytest.raises(OSError, match="in use"):
        second.start()
    second.stop()
    second.clear()


def test_it_is_reached_over_both_families(store: StoreServer) -> None:
    for host in ("127.0.0.1", "::1") if store.address[0] == "::" else ("127.0.0.1",):
        friend = StoreClient(host, store.address[1], SECRET)
        assert friend.get("key", 0) is None
        friend.close()


def test_a_stopped_server_leaves_no_thread(store: StoreServer) -> None:
    store.stop()
    store.stop()
    assert "lastcall-store" not in [thread.name for thread in threading.enumerate()]
