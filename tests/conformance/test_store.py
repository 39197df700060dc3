"""What every store promises to the ranks (core/store), asked of each backend."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lastcall import errors
from lastcall.adapters.torch.distributed.c10d import C10dStore
from lastcall.core.store import Scoped, Store
from lastcall.core.store.anchored import Anchored
from lastcall.core.store.client import StoreClient
from lastcall.core.store.folder import FolderStore
from lastcall.core.store.memory import MemoryStore
from lastcall.core.store.server import StoreServer

PATIENCE = 60.0  # of the tests; no answer is expected to take anywhere near it


@dataclass
class Backend:
    store: Store
    lose: Callable[[], None] = lambda: None
    """The server goes away."""
    opened: list[Store] = field(default_factory=list)

    def clone(self) -> Store:
        clone = self.store.clone()
        self.opened.append(clone)
        return clone


@contextlib.contextmanager
def in_memory() -> Iterator[Backend]:
    store = MemoryStore()
    yield Backend(store, store.lose)


@contextlib.contextmanager
def over_tcp() -> Iterator[Backend]:
    server = StoreServer("127.0.0.1", secret="s3cret")
    server.start()
    yield Backend(StoreClient(*server.address, "s3cret"), server.stop)
    server.stop()


@contextlib.contextmanager
def of_torch(wrap: Callable[[Any], Any] = lambda store: store) -> Iterator[Backend]:
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    connection = dist.TCPStore("127.0.0.1", servers[0].port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    yield Backend(C10dStore(wrap(connection)), servers.clear)


@contextlib.contextmanager
def scoped() -> Iterator[Backend]:
    with over_tcp() as backend:
        yield Backend(Scoped(backend.store, "incarnation-7/"), backend.lose)


@contextlib.contextmanager
def of_torch_elsewhere(make: Callable[[Path], Any]) -> Iterator[Backend]:
    with tempfile.TemporaryDirectory() as folder:
        yield Backend(C10dStore(make(Path(folder))))


@contextlib.contextmanager
def in_folder() -> Iterator[Backend]:
    with tempfile.TemporaryDirectory() as folder:
        yield Backend(FolderStore(Path(folder) / "agreement"))


@contextlib.contextmanager
def anchored() -> Iterator[Backend]:
    with tempfile.TemporaryDirectory() as folder:
        yield Backend(Anchored(MemoryStore(), FolderStore(Path(folder) / "agreement")))


@contextlib.contextmanager
def anchored_alone() -> Iterator[Backend]:
    """Memory was lost before: all goes through the directory."""
    with anchored() as backend:
        fast = MemoryStore()
        fast.lose()
        assert isinstance(backend.store, Anchored)
        yield Backend(Anchored(fast, backend.store._folder))


CAN_BE_LOST: dict[str, Callable[[], contextlib.AbstractContextManager[Backend]]] = {
    "memory": in_memory,
    "tcp": over_tcp,
    "scoped": scoped,
    "c10d": of_torch,
    "c10d-prefix": lambda: of_torch(lambda store: dist.PrefixStore("run/", dist.PrefixStore("group", store))),  # type: ignore[attr-defined]
}
BACKENDS = {
    **CAN_BE_LOST,
    "c10d-hash": lambda: of_torch_elsewhere(lambda _: dist.HashStore()),  # type: ignore[attr-defined]
    "c10d-file": lambda: of_torch_elsewhere(
        lambda folder: dist.PrefixStore("run/", dist.FileStore(str(folder / "store"), 2))  # type: ignore[attr-defined]
    ),
    "folder": in_folder,
    "anchored": anchored,
    "anchored-alone": anchored_alone,
}
# there what is claimed is never set: another register holds it
ONE_REGISTER = [name for name in BACKENDS if name != "anchored"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")  # torch asks for the names of addresses
    with BACKENDS[request.param]() as backend:
        yield backend
        for store in [*backend.opened, backend.store]:
            store.close()


class Asked:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except errors.StoreLost as error:
            self._result = error

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "no answer"
        return self._result


def asked(calls: list[Callable[[], Any]]) -> list[Any]:
    """All at once."""
    barrier = threading.Barrier(len(calls))

    def at_once(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        return call()

    return [one.result() for one in [Asked(partial(at_once, call)) for call in calls]]


def test_what_was_set_is_read_by_everybody(backend: Backend) -> None:
    backend.store.set("key", b"one")
    assert backend.store.get("key", PATIENCE) == b"one"
    assert backend.clone().get("key", PATIENCE) == b"one"
    backend.store.set("key", b"two")
    assert backend.store.get("key", 0) == b"two"


def test_a_key_that_does_not_come_is_none(backend: Backend) -> None:
    assert backend.store.get("absent", 0) is None
    assert backend.store.get("absent", 0.05) is None
    assert backend.store.get("absent", -1) is None
    backend.store.set("absent", b"x")
    assert backend.store.get("absent", 0) == b"x"


@pytest.mark.parametrize("write", ["set", "claim", "add"])
def test_a_waiting_get_is_woken(backend: Backend, write: str) -> None:
    waiters = [Asked(partial(backend.clone().get, "key", PATIENCE)) for _ in range(3)]
    assert backend.store.get("key", 0.05) is None
    match write:
        case "set":
            backend.store.set("key", b"12")
        case "claim":
            backend.store.claim("key", b"12")
        case _:
            backend.store.add("key", 12)
    assert [waiter.result() for waiter in waiters] == [b"12"] * 3


def test_a_waiter_whose_time_was_over_waits_again(backend: Backend) -> None:
    waiting = backend.clone()
    for round_ in range(3):
        assert waiting.get(f"key-{round_}", 0.01) is None
        again = Asked(partial(waiting.get, f"key-{round_}", PATIENCE))
        backend.store.set(f"key-{round_}", b"now")
        assert again.result() == b"now"


def test_a_clone_is_not_held_up_by_a_wait(backend: Backend) -> None:
    waiting = backend.clone()
    waiter = Asked(lambda: waiting.get("decision", PATIENCE))
    clone = waiting.clone()  # of the very store that waits
    backend.opened.append(clone)
    clone.set("other", b"1")
    assert clone.add("count", 1) == 1
    clone.set("decision", b"go")
    assert waiter.result() == b"go"


def test_a_claim_has_one_winner(backend: Backend) -> None:
    clones = [backend.clone() for _ in range(16)]
    for register in ("first", "second"):
        kept = asked([partial(store.claim, register, b"rank %d" % n) for n, store in enumerate(clones)])
        assert len(set(kept)) == 1 and kept[0].startswith(b"rank ")
        assert backend.store.get(register, 0) == kept[0]
        assert backend.store.claim(register, b"too late") == kept[0]


@pytest.mark.parametrize("backend", ONE_REGISTER, indirect=True)
def test_a_claim_finds_what_was_set(backend: Backend) -> None:
    backend.store.set("key", b"set")
    assert backend.store.claim("key", b"claimed") == b"set"


def test_no_addition_is_lost(backend: Backend) -> None:
    clones = [backend.clone() for _ in range(8)]
    sums = asked([lambda s=store: [s.add("count", 1) for _ in range(10)] for store in clones])  # type: ignore[misc]
    assert sorted(total for each in sums for total in each) == list(range(1, 81))
    assert backend.store.add("count", -80) == 0
    assert backend.store.get("count", 0) == b"0"


def test_many_are_read_at_once_with_gaps(backend: Backend) -> None:
    for n in (0, 3, 4, 9):
        backend.store.set(f"key-{n}", b"%d" % n)
    assert backend.store.get_many([f"key-{n}" for n in range(11)]) == [
        b"%d" % n if n in (0, 3, 4, 9) else None for n in range(11)
    ]  # fmt: skip
    assert backend.store.get_many(["key-9", "key-0"]) == [b"9", b"0"]
    assert backend.store.get_many(["none"]) == [None]
    assert backend.store.get_many([]) == []


def test_values_are_bytes_of_any_kind_and_size(backend: Backend) -> None:
    values = {
        "all": bytes(range(256)),
        "empty": b"",
        "large": bytes(range(256)) * 4096,
        "ключ/🔑": b"\xff\x00",
    }
    for key, value in values.items():
        backend.store.set(key, value)
    for key, value in values.items():
        assert backend.store.get(key, PATIENCE) == value
    assert backend.clone().get_many(list(values)) == list(values.values())
    assert backend.store.claim("claimed", values["large"]) == values["large"]


def test_closing_ends_a_wait_and_leaves_the_clones_alone(backend: Backend) -> None:
    waiting = backend.clone()
    waiter = Asked(lambda: waiting.get("never", PATIENCE))
    assert backend.store.get("never", 0.05) is None
    waiting.close()
    assert isinstance(waiter.result(), errors.StoreLost)
    waiting.close()
    for call in (lambda: waiting.set("key", b"x"), lambda: waiting.get("key", 0), waiting.clone):
        with pytest.raises(errors.StoreLost, match="closed"):
            call()
    backend.store.set("key", b"y")
    assert backend.store.get("key", 0) == b"y"


@pytest.mark.parametrize("backend", CAN_BE_LOST, indirect=True)
def test_a_lost_server_is_told_to_everybody_at_once(backend: Backend) -> None:
    waiting = backend.clone()
    waiter = Asked(lambda: waiting.get("never", PATIENCE))
    assert backend.store.get("never", 0.05) is None
    backend.lose()
    assert isinstance(waiter.result(), errors.StoreLost)
    with pytest.raises(errors.StoreLost):
        backend.store.get("key", PATIENCE)
    for call in (  # it stays lost
        lambda: backend.store.set("key", b"x"),
        lambda: backend.store.get("key", PATIENCE),
        lambda: backend.store.get_many(["key"]),
        lambda: backend.store.claim("key", b"x"),
        lambda: backend.store.add("key", 1),
        backend.store.clone,
    ):
        with pytest.raises(errors.StoreLost):
            call()
