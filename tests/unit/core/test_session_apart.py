"""Sessions whose directories differ: how they begin, who copies, and what is left of them."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.core import mirrors
from helpers.core.bare_core import flip
from helpers.core.mirrors import Failing, Held, Watched
from helpers.ranks.sessions import Crew, periodic, saved, strategy
from lastcall import errors
from lastcall.core.engine import digest
from lastcall.core.process.identity import Process
from lastcall.core.session import Session
from lastcall.core.transfer import parts
from lastcall.core.transfer.distribute import Distribution


def crew(tmp_path: Path, place: Watched, names: str, **more: Any) -> Crew:
    """A rank for each letter, which names its directory."""
    return Crew([tmp_path / name for name in names], len(names), mirror=place.url, **more)


def refused(results: list[Any], match: str) -> None:
    for result in results:
        assert isinstance(result, (errors.RanksError, OSError)), results
    assert any(match in str(result) for result in results), results


def stop_at(made: Crew, step: int, rank: int = 0) -> Crew:
    def hook(at: int, now: int) -> None:
        if at == rank and now >= step and not made.contexts[rank].latch.raised:
            made.notify(rank)

    made.hook = hook
    return made


def uploads(session: Session) -> bool:
    """Whether this rank is the one that uploads."""
    assert session._upload_duty is not None
    return session._upload_duty.uploads()


def distribution(session: Session) -> Distribution:
    assert session._started.together is not None
    return session._started.together.distribution


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def listening() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lastcall-part")]


def test_ranks_with_directories_of_their_own_save_and_go_on(tmp_path: Path, place: Watched) -> None:
    saved(stop_at(crew(tmp_path, place, "abb"), 4, rank=2).train(1000))
    assert len(list(tmp_path.glob("[ab]/checkpoint-*"))) == 1 == len(place.checkpoints())
    second = crew(tmp_path, place, "abb")
    (step,) = map(step_of, tmp_path.glob("a/checkpoint-*"))
    assert second.train(step + 2) == [step + 2] * 3
    assert [subject.resumed for subject in second.subjects] == [
        {"rank": rank, "step": step} for rank in range(3)
    ]
    mirrors.until(lambda: not listening())


def test_two_machines_may_have_one_directory_that_the_first_does_not_see(
    tmp_path: Path, place: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took it from each other when they told directories apart by machine."""
    real, numbers = Process.own(), itertools.count()
    monkeypatch.setattr(Process, "own", lambda: dataclasses.replace(real, host=f"machine {next(numbers)}/1"))
    saved(stop_at(crew(tmp_path, place, "abb"), 4, rank=2).train(1000))
    assert len(list(tmp_path.glob("[ab]/checkpoint-*"))) == 1 == len(place.checkpoints())
    shutil.rmtree(tmp_path / "b")
    second = crew(tmp_path, place, "abb")
    (step,) = map(step_of, tmp_path.glob("a/checkpoint-*"))
    assert second.train(step + 2) == [step + 2] * 3
    assert place.done("fetch").count(f"checkpoint-{step}/manifest.json") == 1  # once for both
    assert not list(tmp_path.glob("b/.lastcall/agreement/*"))


def life(tmp_path: Path, place: Watched, until: int) -> int:
    """A notice at this step; returns where the checkpoint is that it was answered with."""
    made = stop_at(crew(tmp_path, place, "ab"), until)
    saved(made.train(1000))
    return made.subjects[0].step


def test_a_machine_that_comes_back_does_not_bring_the_run_back_to_what_it_had(
    tmp_path: Path, place: Watched
) -> None:
    """It had committed more often than it could copy, was lost, and the run went on from the mirror without
    it."""
    stale = life(tmp_path, place, 4)
    place.hook = Failing("send", times=1_000_000, error=errors.StorageRefused)
    for _ in range(2):
        stale = life(tmp_path, place, stale + 2)
    place.hook = lambda operation, name: None
    (tmp_path / "a").rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "b")
    newest = life(tmp_path, place, stale + 2)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "away").rename(tmp_path / "a")
    assert (tmp_path / "a" / f"checkpoint-{stale}").is_dir()
    last = crew(tmp_path, place, "ab")
    assert last.train(newest + 2) == [newest + 2] * 2
    assert [subject.resumed for subject in last.subjects] == [
        {"rank": rank, "step": newest} for rank in range(2)
    ]


# ---- a place that has stopped answering --------------------------------------------------------------------


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize("call", [("read", "leaving"), ("names", "checkpoint-"), ("write", "run.json")])
def test_nobody_waits_at_the_start_for_a_place_that_does_not_answer_once_a_rank_was_told(
    tmp_path: Path, place: Watched, call: tuple[str, str], told: int
) -> None:
    place.hook = held = Held(*call)
    made = crew(tmp_path, place, "ab")
    results: list[Any] = []
    starting = threading.Thread(target=lambda: results.extend(made.train(1000)), daemon=True)
    starting.start()
    held.wait()
    made.notify(told)
    starting.join(mirrors.PATIENCE / 2)
    assert not starting.is_alive()
    held.let_go()
    saved(results)
    assert not list(tmp_path.glob("[ab]/checkpoint-*")) and not any(
        context.catalog.held for context in made.contexts
    )


def test_nobody_waits_for_a_machine_that_cannot_fetch_once_it_was_told(
    tmp_path: Path, place: Watched
) -> None:
    life(tmp_path, place, 4)
    shutil.rmtree(tmp_path / "b")
    held, made = Held("fetch", "manifest"), crew(tmp_path, place, "ab")
    place.hook = held
    results: list[Any] = []
    starting = threading.Thread(target=lambda: results.extend(made.train(1000)), daemon=True)
    starting.start()
    held.wait()
    made.notify(1)
    starting.join(mirrors.PATIENCE / 2)
    assert not starting.is_alive()
    held.let_go()
    saved(results)


# ---- the start ---------------------------------------------------------------------------------------------


def test_one_rank_without_a_mirror_is_refused_and_nobody_waits_for_it(tmp_path: Path, place: Watched) -> None:
    made = crew(tmp_path, place, "abc")
    made.contexts[1] = dataclasses.replace(
        made.contexts[1], jit=dataclasses.replace(made.contexts[1].jit, mirror=None)
    )
    refused(made.train(3), "rank 1 does not share the directory of rank 0")


def test_nobody_waits_for_a_leader_that_cannot_open_its_directory(tmp_path: Path, place: Watched) -> None:
    (tmp_path / "b" / ".lastcall" / "owner.json").mkdir(parents=True)
    made = crew(tmp_path, place, "abbc")
    refused(made.train(3), "not all ranks could begin: rank 1: IsADirectoryError")
    assert not any(context.catalog.held for context in made.contexts)


def test_nobody_waits_for_a_leader_that_fails_before_it_has_said_what_it_has(
    tmp_path: Path, place: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = crew(tmp_path, place, "abbc")

    def unchecked() -> list[str]:
        raise errors.UncheckedError("the xxhash package is missing")

    monkeypatch.setattr(made.contexts[1].catalog, "clean", unchecked)
    results = made.train(3)
    assert isinstance(results.pop(1), errors.UncheckedError)
    refused(results, "the xxhash package is missing")
    mirrors.until(lambda: not listening())


def test_a_notice_while_a_leader_brings_the_checkpoint_stops_all_of_them(
    tmp_path: Path, place: Watched
) -> None:
    saved(stop_at(crew(tmp_path, place, "abb"), 4).train(1000))
    shutil.rmtree(tmp_path / "b")
    made = crew(tmp_path, place, "abb")

    def told(operation: str, name: str) -> None:
        if operation == "fetch":
            made.notify(1)

    place.hook = told
    saved(made.train(1000))
    mirrors.until(lambda: not listening())


def test_a_checkpoint_that_cannot_be_brought_ends_all(
    tmp_path: Path, place: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(stop_at(crew(tmp_path, place, "abb"), 4).train(1000))
    shutil.rmtree(tmp_path / "b")
    place.hook = Failing("fetch", times=100)

    def unreachable(*_: object) -> None:
        raise errors.StorageError("no route to host")

    monkeypatch.setattr(parts.PartTransfer, "fetch", unreachable)
    refused(crew(tmp_path, place, "abb").train(1000), "could not be copied to")
    assert [step_of(path) for path in tmp_path.glob("a/checkpoint-*")], "it is not damaged"


def test_damage_that_is_found_on_the_way_makes_all_go_on_to_the_older_one(
    tmp_path: Path, place: Watched
) -> None:
    for step in (4, 400):
        saved(stop_at(crew(tmp_path, place, "ab"), step).train(100_000))
    older, newest = sorted((tmp_path / "a").glob("checkpoint-*"), key=step_of)
    shutil.rmtree(tmp_path / "b")
    for where in (newest, place.root / newest.name):
        flip(next(iter(sorted(where.glob("*00001*.safetensors")))), -1)
    made = crew(tmp_path, place, "ab")
    step = step_of(older)
    assert made.train(step + 1) == [step + 1] * 2
    assert {subject.resumed["step"] for subject in made.subjects if subject.resumed} == {step}


def test_ranks_that_cannot_check_each_others_digests_do_not_begin(
    tmp_path: Path, place: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = crew(tmp_path, place, "ab")
    made.store.claim(
        "start",
        b'{"run": "r", "incarnation": 1, "token": "t", "algorithm": "blake2b-128", '
        b'"root": "/a", "mirror": true}',
    )
    assert digest.ALGORITHM != "blake2b-128"
    with pytest.raises(
        errors.RanksError, match="rank 0 writes digests of the kind blake2b-128.*pip install xxhash"
    ):
        made.begin(1)


# ---- who copies --------------------------------------------------------------------------------------------


def torn_at(made: Crew, step: int, rank: int) -> Crew:
    """Training fails inside an optimizer step: this rank has nothing that is whole."""

    def hook(at: int, now: int) -> None:
        if (at, now) == (rank, step):
            made.subjects[rank].gate.enter()
            raise ValueError("a bad batch")

    made.hook = hook
    return made


@pytest.mark.parametrize("torn", [0, 1])
def test_only_the_rank_that_has_the_checkpoint_copies_it(tmp_path: Path, place: Watched, torn: int) -> None:
    made = torn_at(crew(tmp_path, place, "ab"), 4, torn)
    made.train(1000)
    (copied,) = place.checkpoints()
    (there,) = (tmp_path / "ba"[torn]).glob("checkpoint-*")
    assert {path.name for path in (place.root / copied).iterdir()} == {path.name for path in there.iterdir()}
    assert [uploads(made.sessions[rank]) for rank in (0, 1)] == [torn == 1, torn == 0]
    assert [made.sessions[rank].has(copied) for rank in (0, 1)] == [True, True] and not made.sessions[0].has(
        "checkpoint-1"
    )


def test_a_rank_that_copies_after_another_overwrites_nothing(tmp_path: Path, place: Watched) -> None:
    saved(stop_at(crew(tmp_path, place, "ab"), 4).train(1000))
    (first,) = map(step_of, tmp_path.glob("a/checkpoint-*"))
    shutil.rmtree(tmp_path / "b")  # so that the other looks at what is there when it starts
    made = torn_at(crew(tmp_path, place, "ab"), first + 3, 0)
    tear = made.hook

    def hook(rank: int, step: int) -> None:
        if step == first + 3 and rank == 0:
            periodic(made.sessions[0]).begin("test")
            mirrors.until(lambda: f"checkpoint-{step}" in place.checkpoints())
            before.update({path: path.read_bytes() for path in (place.root / f"checkpoint-{step}").iterdir()})
        elif step == first + 3:
            periodic(made.sessions[1]).begin("test")
            periodic(made.sessions[1]).wait()
            made.sessions[1].forget_resumed()  # so that it is saved again
        tear(rank, step)

    before: dict[Path, bytes] = {}
    made.hook = hook
    made.train(1000)
    assert f"checkpoint-{first + 3}.replaced-0" in place.checkpoints()
    assert before and all(path.read_bytes() == data for path, data in before.items())


def test_a_checkpoint_on_another_machine_is_not_counted_on_when_that_is_lost(
    tmp_path: Path, place: Watched
) -> None:
    made = crew(tmp_path, place, "ab")
    kept: dict[int, bool] = {}

    def hook(rank: int, step: int) -> None:
        if step == 4:
            periodic(made.sessions[rank]).begin("test")
            periodic(made.sessions[rank]).wait()
            kept[rank] = strategy(made.sessions[rank])._position().kept

    made.hook = hook
    assert made.train(6) == [6, 6]
    assert kept == {0: True, 1: False}


# ---- from one machine to another ---------------------------------------------------------------------------


def left_elsewhere(tmp_path: Path, place: Watched) -> Path:
    """A checkpoint that only the second machine has, as survivors leave it there that could not copy it."""
    saved(stop_at(crew(tmp_path, place, "ab"), 4).train(1000))
    for name in place.folders():
        shutil.rmtree(place.root / name)
    (found,) = (tmp_path / "a").glob("checkpoint-*")
    return found.rename(tmp_path / "b" / found.name)


def test_what_only_another_machine_has_is_gone_on_from(tmp_path: Path, place: Watched) -> None:
    step = step_of(left_elsewhere(tmp_path, place))
    made = crew(tmp_path, place, "ab")
    assert made.train(step + 2) == [step + 2] * 2
    assert [(subject.resumed or {}).get("step") for subject in made.subjects] == [step, step]


def test_what_another_machine_has_and_is_damaged_is_left_there(
    tmp_path: Path, place: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    flip(next(iter(sorted(left_elsewhere(tmp_path, place).glob("*.safetensors")))), -1)
    made = crew(tmp_path, place, "ab")
    assert made.train(2) == [2, 2]
    assert [subject.resumed for subject in made.subjects] == [None, None]
    assert "Could not fetch the checkpoint that rank 1 has on its machine: " in caplog.text


def sharing(made: Crew, name: str, told: Callable[[], bool] = lambda: False) -> None:
    """All ranks save step 4, and then share a checkpoint."""

    def hook(rank: int, step: int) -> None:
        if step == 4:
            periodic(made.sessions[rank]).begin("test")
            periodic(made.sessions[rank]).wait()
            distribution(made.sessions[rank]).share(name, "test", told)

    made.hook = hook
    assert made.train(6) == [6] * made.size


def test_a_checkpoint_is_shared_with_all_machines(tmp_path: Path, place: Watched) -> None:
    sharing(crew(tmp_path, place, "abbc"), "checkpoint-4")
    assert {path.parent.name for path in tmp_path.glob("[abc]/checkpoint-4")} == {"a", "b", "c"}


def test_what_cannot_be_shared_is_said_and_holds_nobody_up(
    tmp_path: Path, place: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.hook = Failing("fetch", times=100)

    def unreachable(*_: object) -> None:
        raise errors.StorageError("no route to host")

    monkeypatch.setattr(parts.PartTransfer, "fetch", unreachable)
    sharing(crew(tmp_path, place, "abb"), "checkpoint-4")
    assert "Could not copy checkpoint-4 to" in caplog.text and "no route to host" in caplog.text


def test_what_is_nowhere_is_not_shared(tmp_path: Path, place: Watched) -> None:
    sharing(crew(tmp_path, place, "abb"), "checkpoint-3")
    assert not list(tmp_path.glob("b/checkpoint-*"))


def test_a_notice_ends_the_sharing(tmp_path: Path, place: Watched) -> None:
    sharing(crew(tmp_path, place, "abb"), "checkpoint-4", lambda: True)
    assert not list(tmp_path.glob("b/checkpoint-*"))
