"""What the ranks have decided stays decided when memory is lost, on some of them or on all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lastcall import errors
from lastcall.core.store import anchored
from lastcall.core.store.anchored import Anchored
from lastcall.core.store.folder import FolderStore
from lastcall.core.store.memory import MemoryStore

PATIENCE = 60.0


def pair(folder: Path) -> tuple[Anchored, MemoryStore, Anchored, MemoryStore]:
    """Two ranks, each with a link to the store in memory that can be cut by closing it."""
    memory = MemoryStore()
    links = memory.clone(), memory.clone()
    return (
        Anchored(links[0], FolderStore(folder)),
        links[0],
        Anchored(links[1], FolderStore(folder)),
        links[1],
    )


def test_a_healthy_run_leaves_nothing_in_the_directory_but_claims(tmp_path: Path) -> None:
    one, _, two, _ = pair(tmp_path / "agreement")
    one.set("position/0", b"7")
    assert (
        two.get("position/0", PATIENCE) == b"7" and two.add("count", 1) == 1 and two.get_many(["a"]) == [None]
    )
    assert not (tmp_path / "agreement").exists()
    assert one.claim("decision", b"7") == b"7" and two.get("decision", PATIENCE) == b"7"
    assert [path.name for path in (tmp_path / "agreement").iterdir()] == ["decision"]


def test_e5_a_store_that_goes_when_all_have_finished_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    """E5: rank 0 has tidied up and gone, and its store with it, while another rank still listens."""
    memory, over = MemoryStore(), threading.Event()
    link = memory.clone()
    one = Anchored(link, FolderStore(tmp_path / "agreement"), None, over)
    one.set("position/0", b"7")
    ear = one.clone()
    over.set()
    link.close()
    memory.close()
    one.set("pulse/0", b"8")
    ear.set("position/1", b"9")
    assert one.lost and not (tmp_path / "agreement").exists()


def test_there_is_one_register_when_one_rank_is_cut_off(tmp_path: Path) -> None:
    one, link, two, _ = pair(tmp_path)
    link.close()
    assert one.claim("decision", b"mine") == b"mine"
    assert two.claim("decision", b"theirs") == b"mine"
    assert one.lost and not two.lost


def test_what_a_rank_says_after_its_link_was_cut_is_heard(tmp_path: Path) -> None:
    one, link, two, _ = pair(tmp_path)
    link.close()
    one.set("position/0", b"7")
    assert two.get("position/0", PATIENCE) == b"7"
    assert two.get_many(["position/0", "position/1"]) == [b"7", None]


def test_a_rank_that_waits_hears_one_that_is_cut_off_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchored, "_GLANCE", 0.05)
    one, link, two, _ = pair(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.get, "news/1", PATIENCE)
        assert two.clone().get("nothing", 0.01) is None
        link.close()
        one.claim("news/1", b"SIGTERM")
        assert waiting.result(PATIENCE) == b"SIGTERM"


def test_what_was_on_its_way_when_the_link_was_cut_is_said_again(tmp_path: Path) -> None:
    one, link, two, _ = pair(tmp_path)
    link.set = lambda key, value: None  # as TCP does: taken, and lost on the way
    one.set("position/0", b"7")
    link.close()
    assert one.get("anything", 0) is None and one.lost
    assert two.get("position/0", PATIENCE) == b"7"


def test_what_was_said_before_is_repeated_for_a_rank_that_is_cut_off_later(tmp_path: Path) -> None:
    """It cannot look where it was said first."""
    one, _, two, link = pair(tmp_path)
    one.set("load/0", b"checkpoint-9")
    link.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.get, "load/0", PATIENCE)
        while not waiting.done():
            one.get("vote/0/decision", 0.01)
        assert waiting.result() == b"checkpoint-9" and two.lost


def test_a_slow_answer_is_not_a_lost_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchored, "_AGAIN", 0.01)
    memory = MemoryStore()
    link = memory.clone()
    one = Anchored(link, FolderStore(tmp_path), memory.clone)
    one.set("position/0", b"7")
    link.close()
    assert one.get("position/0", 0) == b"7"
    while one.lost:  # it is taken up by whatever is asked next
        one.get("nothing", 0.01)
    assert one.add("count", 1) == 1 and memory.add("count", 1) == 2 and memory.get("position/0", 0) == b"7"


def test_all_ranks_agree_through_the_directory_alone(tmp_path: Path) -> None:
    one, link_one, two, link_two = pair(tmp_path)
    link_one.close()
    link_two.close()
    one.set("position/0", b"1")
    two.set("position/1", b"2")
    assert sorted([one.add("count", 1), two.add("count", 1)]) == [1, 2]
    assert (
        one.get_many(["position/0", "position/1"])
        == two.get_many(["position/0", "position/1"])
        == [b"1", b"2"]
    )
    assert one.claim("decision", b"2") == two.claim("decision", b"1") == b"2"
    assert two.get("decision", PATIENCE) == b"2"


def test_a_clone_of_a_lost_store_goes_on_in_the_directory(tmp_path: Path) -> None:
    one, link, two, _ = pair(tmp_path)
    link.close()
    clone = one.clone()
    clone.set("key", b"x")
    assert clone.lost and two.get("key", PATIENCE) == b"x"


def test_without_memory_and_directory_the_store_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = MemoryStore()
    store = Anchored(memory, FolderStore(tmp_path / "file"))
    store.set("key", b"x")
    memory.lose()
    for _ in range(2):
        with pytest.raises(errors.StoreLost):
            store.get("key", PATIENCE)
    with pytest.raises(errors.StoreLost):
        store.claim("key", b"x")
