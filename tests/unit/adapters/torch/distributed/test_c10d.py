"""What is particular to torch's stores; what they share with the others is in
tests/conformance/test_store.py."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.processes.forkserver import environment
from lastcall import errors
from lastcall.adapters.torch.distributed import c10d
from lastcall.adapters.torch.distributed.c10d import C10dStore


@pytest.fixture(autouse=True)
def quick_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")


class Stuck:
    """A store behind a cut link: connected, and without an answer."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def clone(self) -> Stuck:
        return self

    def _hang(self, *_: Any) -> None:
        self.released.wait(60)

    set = check = compare_set = add = _hang


def test_a_call_that_does_not_come_back_is_a_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_PATIENCE", 0.05)
    for call in (
        lambda store: store.set("key", b"x"),
        lambda store: store.get("key", 60),
        lambda store: store.claim("key", b"x"),
        lambda store: store.add("key", 1),
        lambda store: store.get_many(["key"]),
    ):
        stuck = Stuck()
        store = C10dStore(stuck)
        for _ in range(2):
            with pytest.raises(errors.StoreLost, match="no answer"):
                call(store)
        stuck.released.set()
        store.close()


def test_a_store_that_cannot_be_cloned_says_what_to_do() -> None:
    with pytest.raises(errors.StoreLost, match="`lastcall run`"):
        C10dStore(object())


def test_a_store_that_is_gone_cannot_be_opened() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection = dist.TCPStore(
        "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1)
    )
    del server
    with pytest.raises(errors.StoreLost):
        C10dStore(connection)


def test_a_killed_setter_that_did_not_ring_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_LOOK", 0.02)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = C10dStore(server)
    found: list[bytes | None] = []
    waiter = threading.Thread(target=lambda: found.append(store.get("key", 60)))
    waiter.start()
    server.set("key", b"silently")
    waiter.join()
    assert found == [b"silently"]
    store.close()


LEAVING = """
import sys, threading
import torch.distributed as dist
from lastcall.adapters.torch.distributed.c10d import C10dStore

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store = C10dStore(server)
for number in range(3):
    clone = store.clone()
    threading.Thread(target=clone.get, args=("never", 60), daemon=True).start()
assert store.get("never", 0.2) is None
threading.excepthook = lambda args: None
print("leaves")
"""


def test_a_process_that_leaves_while_its_threads_wait_leaves_in_peace() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING],
        env=environment(RES_OPTIONS="timeout:1 attempts:1"),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (ended.returncode, ended.stdout) == (0, "leaves\n"), ended.stderr
    assert "waitForInput" not in ended.stderr and "terminate" not in ended.stderr
