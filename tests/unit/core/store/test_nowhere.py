"""Ranks that share no directory: what they have decided is in memory, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.processes import forkserver as nursery
from lastcall import errors
from lastcall.core.store import anchored
from lastcall.core.store.anchored import Anchored
from lastcall.core.store.memory import MemoryStore
from lastcall.core.store.nowhere import NullStore

PATIENCE = 60.0


def apart(memory: MemoryStore) -> tuple[Anchored, MemoryStore]:
    """A rank, and its link to the store in memory, which can be cut by closing it and comes back at once."""
    link = memory.clone()
    return Anchored(link, NullStore(), memory.clone), link


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchored, "_AGAIN", 0.01)


def test_decisions_are_made_in_memory() -> None:
    memory = MemoryStore()
    (one, _), (two, _) = apart(memory), apart(memory)
    assert one.claim("decision", b"mine") == b"mine" == two.claim("decision", b"theirs")
    assert two.get("decision", PATIENCE) == b"mine" and one.add("count", 1) == 1
    assert one.get_many(["decision", "nothing"]) == [b"mine", None] and one.get("nothing", 0.01) is None
    assert one.clone().get("decision", PATIENCE) == b"mine"


def lost(what: Callable[[], object]) -> None:
    with pytest.raises(errors.StoreLost):
        what()


def test_who_has_lost_the_store_decides_nothing_and_hears_nothing() -> None:
    memory = MemoryStore()
    one, _ = apart(memory)
    one.set("position", b"7")
    memory.lose()
    lost(lambda: one.claim("decision", b"mine"))
    lost(lambda: one.add("count", 1))
    assert one.get("position", 0.01) is None and one.get_many(["position"]) == [None] and one.lost
    one.close()


@pytest.mark.parametrize("how", ["claim", "add", "get", "get_many", "set"])
def test_whoever_is_connected_again_says_again_what_it_has_said(how: str) -> None:
    memory = MemoryStore()
    (one, link), (two, _) = apart(memory), apart(memory)
    link.close()
    tries: dict[str, Callable[[], object]] = {
        "claim": lambda: lost(lambda: one.claim("decision", b"mine")),
        "add": lambda: lost(lambda: one.add("count", 1)),
        "get": lambda: one.get("nothing", 0.0),
        "get_many": lambda: one.get_many(["nothing"]),
        "set": lambda: one.set("other", b"8"),
    }
    tries[how]()
    one.set("position", b"7")
    nursery.until(lambda: one.get_many(["position"]) == [b"7"], "the connection to come back", PATIENCE)
    assert two.get("position", PATIENCE) == b"7" and not one.lost
    assert one.claim("decision", b"mine") == b"mine"
