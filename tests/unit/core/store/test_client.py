"""A client comes back in a bounded time, whatever the other side does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from lastcall import errors
from lastcall.core.store import client, wire
from lastcall.core.store.client import StoreClient
from lastcall.core.store.server import StoreServer


class Other:
    """Listens, lets one client in, and then does as it is told."""

    def __init__(self, then: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._then = then
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        link, _ = self._listener.accept()
        with link, self._listener, contextlib.suppress(ConnectionError):
            self._then(link)
            while link.recv(65536):  # until the client has gone
                pass


def welcoming(answer: bytes) -> Callable[[socket.socket], None]:
    def then(link: socket.socket) -> None:
        link.recv(65536)
        link.sendall(wire.frame(wire.ANSWER))
        link.recv(65536)
        link.sendall(answer)

    return then


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MARGIN", 0.05)
    monkeypatch.setattr(client, "_LAST_LOOK", 0.05)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    store = StoreServer("127.0.0.1", secret="s3cret")
    store.start()
    yield store
    store.stop()


def test_nobody_there_is_a_lost_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(errors.StoreLost, match=f"Could not reach the store at 127.0.0.1:{port}"):
        StoreClient("127.0.0.1", port, "s3cret")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "a..b"])
def test_a_host_that_is_none_is_a_lost_store(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    with pytest.raises(errors.StoreLost, match="Could not reach the store"):
        StoreClient(host, 1, "s3cret", connect_timeout=0.5)


def test_a_wrong_secret_is_a_lost_store(server: StoreServer) -> None:
    with pytest.raises(errors.StoreLost, match="refused the connection"):
        StoreClient(*server.address, "guess")


@pytest.mark.usefixtures("impatient")
def test_something_else_on_the_port_is_a_lost_store() -> None:
    for then in (
        lambda link: None,
        lambda link: link.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
        lambda link: link.sendall(wire.frame(wire.SET)),
    ):
        other = Other(then)
        with pytest.raises(errors.StoreLost, match="refused the connection"):
            StoreClient("127.0.0.1", other.port, "s3cret", connect_timeout=0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        wire.frame(wire.ANSWER, b"value")[:-1],
        wire.frame(wire.ANSWER),
        wire.frame(wire.ANSWER, b"one", b"two"),
        wire.frame(wire.SET, b"value"),
        b"\xff" * 16,
    ],
)
def test_an_answer_that_is_none_loses_the_store_for_good(answer: bytes) -> None:
    other = Other(welcoming(answer))
    store = StoreClient("127.0.0.1", other.port, "s3cret")
    for _ in range(2):
        with pytest.raises(errors.StoreLost, match="is lost"):
            store.get("key", 0.05)
    with pytest.raises(errors.StoreLost):
        store.clone()
    store.close()


@pytest.mark.usefixtures("impatient")
def test_a_server_that_does_not_read_loses_the_store() -> None:
    done = threading.Event()

    def then(link: socket.socket) -> None:
        link.recv(65536)
        link.sendall(wire.frame(wire.ANSWER))
        done.wait(60)

    other = Other(then)
    store = StoreClient("127.0.0.1", other.port, "s3cret")
    with pytest.raises(errors.StoreLost, match="timed out"):
        for _ in range(100):
            store.set("key", bytes(wire.LARGEST_VALUE))
    done.set()
    store.close()


def test_keys_and_values_that_no_frame_holds_are_refused_and_lose_nothing(server: StoreServer) -> None:
    store = StoreClient(*server.address, "s3cret")
    for call in (
        lambda: store.set("k" * 1025, b""),
        lambda: store.get("", 0),
        lambda: store.set("key", bytes(wire.LARGEST_VALUE + 1)),
        lambda: store.claim("key", b""),
    ):
        with pytest.raises(ValueError):
            call()
    assert store.get("key", 0) is None
    store.close()


def test_more_values_than_a_frame_holds_are_read_all_the_same(server: StoreServer) -> None:
    store = StoreClient(*server.address, "s3cret")
    for n in range(3):
        store.set(f"large-{n}", bytes([n]) * (wire.LARGEST_VALUE // 2 + n))
    keys = ["large-0", "absent", "large-1", "large-2"] + [f"key-{n}" for n in range(5000)]
    values = store.get_many(keys)
    assert [len(value or b"") - wire.LARGEST_VALUE // 2 for value in values[:4]] == [
        0,
        -(wire.LARGEST_VALUE // 2),
        1,
        2,
    ]
    assert values[4:] == [None] * 5000
    store.close()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("4711:abc", (4711, "abc")),
        ("4711:a:b", (4711, "a:b")),
        ("", None),
        ("4711", None),
        ("4711:", None),
        (":abc", None),
        ("0:abc", None),
        ("65536:abc", None),
        ("-1:abc", None),
        ("٣:abc", None),
        ("host:4711:abc", None),
    ],
)
def test_what_the_launcher_tells_is_parsed(text: str, parsed: tuple[int, str] | None) -> None:
    assert client.parse_port_and_secret(text) == parsed
