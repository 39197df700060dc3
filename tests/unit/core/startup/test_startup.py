"""What is known before the first step, of a fresh run and of one that is resumed, alone and together; and who
never gets there."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.core.answers import NOW, a_notice
from helpers.core.solo import Plain, Solo
from helpers.ranks.thread_ranks import at_once
from lastcall import errors
from lastcall.core.checkpoint import departure
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.context import RunContext
from lastcall.core.notice.ending import FINISHED
from lastcall.core.process import identity
from lastcall.core.ranks.world import World
from lastcall.core.save.saver import Request
from lastcall.core.startup import startup
from lastcall.core.startup.startup import Started, Startup
from lastcall.core.store.memory import MemoryStore
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage.files import Files
from lastcall.testing import FakeClock
from lastcall.types import Kind, Outcome


class Start:
    """One incarnation, as far as to its first step."""

    def __init__(
        self,
        root: Path,
        *,
        world: World | None = None,
        run: str = "",
        saves: dict[str, Any] | None = None,
        **jit: Any,
    ) -> None:
        self.subject = Plain() if world is None else Rank(world)
        config = JITCheckpointConfig(**{"threads": 1, **jit}, environ={})
        periodic = PeriodicCheckpointConfig(**(saves or {}), environ={})
        clock = FakeClock(NOW) if world is None else None
        self.context = RunContext.create(
            root, self.subject, config, periodic, world=world, run=run, clock=clock
        )
        self.events: list[tuple[str, dict[str, object]]] = []
        self.context.events.heard = lambda at, kind, facts: self.events.append((kind, dict(facts)))
        self.started: Started | None = None

    def run(self, stop_requested: Callable[[], bool] = lambda: False) -> Started:
        self.started = Startup(self.context, stop_requested).run()
        return self.started

    def close(self) -> None:
        if self.started is not None:
            if self.started.together is not None:
                self.started.together.ranks.close()
                self.started.together.save.close()
            self.started.engine.close()
        self.context.catalog.close()


class Rank(Plain):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.rank, self.size = world.rank, world.size


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Start]]:
    made: list[Start] = []

    def begin(**more: Any) -> Start:
        made.append(Start(tmp_path, **more))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def trained(root: Path, steps: int, kind: Kind = Kind.JIT, metrics: dict[str, float] | None = None) -> None:
    """An incarnation before this one, that saved where it stopped."""
    with Solo(root, steps=0) as solo:
        solo.train(steps - solo.subject.step)
        capture = dataclasses.replace(solo.subject.capture(), metrics=metrics or {})
        solo.checkpointer.save(capture, kind, FINISHED if kind is Kind.FINAL else "SIGTERM")


# ---- a fresh run -------------------------------------------------------------------------------------------


def test_a_fresh_run_starts_from_the_beginning(
    start: Callable[..., Start], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    begun = start()
    started = begun.run()
    assert (started.resumed, started.committed, started.best, started.mirror, started.together) == (None,) * 5
    assert started.incarnation == 1 and not started.had_finished and begun.subject.step == 0
    assert json.loads((tmp_path / ".lastcall/run.json").read_text()) == {
        "run": started.run,
        "incarnations": 1,
    }
    assert (started.saver.run, started.saver.incarnation, started.saver.last) == (started.run, 1, None)
    assert f"Starting from the beginning: {tmp_path} holds no checkpoint" in caplog.text
    assert begun.events[-1] == (
        "start",
        {"incarnation": 1, "resumed": None, "seconds": 0.0, "periodic": False},
    )


def test_what_was_started_cannot_be_replaced(start: Callable[..., Start]) -> None:
    started = start().run()
    for field in dataclasses.fields(Started):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(started, field.name, None)


def test_a_started_run_holds_its_directory(
    start: Callable[..., Start], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().run()
    second = start()
    with pytest.raises(errors.BusyError):
        second.run()
    assert not second.context.outcome.decided


def test_a_run_is_called_as_its_adapter_says(start: Callable[..., Start]) -> None:
    begun = start(run="bert-1")
    assert begun.run().run == "bert-1" and begun.context.catalog.run == "bert-1"


# ---- a resumed run -----------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_state_and_the_identity_of_the_one_before(
    start: Callable[..., Start], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    trained(tmp_path, 4)
    run = json.loads((tmp_path / ".lastcall/run.json").read_text())["run"]
    begun = start()
    started = begun.run()
    assert started.resumed is not None and started.resumed.path.name == "checkpoint-4"
    assert (started.run, started.incarnation, started.committed) == (run, 2, (4, 0))
    assert begun.subject.step == 4 and begun.subject.resumed == {"rank": 0, "step": 4}
    assert started.saver.last == started.resumed and not started.had_finished
    assert "Resuming from checkpoint-4 (step 4, jit, reason SIGTERM, exact; digests hold" in caplog.text
    assert begun.events[-1][1]["resumed"] == "checkpoint-4"


def test_the_next_commit_is_newer_than_all_that_are_there(
    start: Callable[..., Start], tmp_path: Path
) -> None:
    trained(tmp_path, 2)
    trained(tmp_path, 4)
    begun = start()
    started = begun.run()
    begun.subject.mutate()
    entry = started.saver.save(begun.subject.capture(), Request(Kind.JIT, "SIGTERM"))
    assert (entry.record.incarnation, entry.record.run) == (3, started.run)
    assert Catalog(tmp_path, Files()).entries()[0].record.step == 5


def test_a_run_that_had_finished_is_known_to_have(start: Callable[..., Start], tmp_path: Path) -> None:
    trained(tmp_path, 4, Kind.FINAL)
    started = start().run()
    assert started.had_finished and started.committed == (4, 0)


def test_a_checkpoint_that_is_not_exact_is_resumed_from_and_does_not_count_as_this_boundary(
    start: Callable[..., Start], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    with Solo(tmp_path) as solo:
        capture = dataclasses.replace(solo.subject.capture(), exact=False, because="the loader had gone on")
        solo.checkpointer.save(capture, Kind.RESCUE, "SIGTERM")
    started = start().run()
    assert started.resumed is not None and started.committed is None
    assert "not exact: the loader had gone on" in caplog.text


@pytest.mark.parametrize(("mode", "best"), [("min", 0.5), ("max", 2.0)])
def test_the_best_value_of_the_monitored_metric_is_that_of_all_checkpoints_that_are_there(
    start: Callable[..., Start], tmp_path: Path, mode: str, best: float
) -> None:
    for step, loss in ((1, 1.0), (2, 0.5), (3, 2.0)):
        trained(tmp_path, step, metrics={"loss": loss})
    saves = {"save_strategy": "steps", "save_steps": 1, "monitor": "loss", "mode": mode}
    assert start(saves=saves).run().best == best


def test_without_a_monitored_metric_nothing_is_best(start: Callable[..., Start], tmp_path: Path) -> None:
    trained(tmp_path, 1, metrics={"loss": 1.0})
    assert start().run().best is None


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    start: Callable[..., Start], tmp_path: Path
) -> None:
    trained(tmp_path, 2)
    trained(tmp_path, 4)
    with (tmp_path / "checkpoint-4/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    started = start().run()
    assert started.resumed is not None and started.resumed.record.step == 2


def test_a_lost_identity_is_no_reason_not_to_resume(start: Callable[..., Start], tmp_path: Path) -> None:
    trained(tmp_path, 2)
    (tmp_path / ".lastcall/run.json").write_text('{"run": 7, "incarnations": "many"}')
    started = start().run()
    assert started.resumed is not None and started.incarnation == 2


# ---- who never gets there ----------------------------------------------------------------------------------


def one_that_leaves(root: Path) -> None:
    """A process of another machine that was told to stop and may still be saving."""
    (root / ".lastcall").mkdir()
    departure.DepartureNote(root / ".lastcall", 0).say("SIGTERM", 30.0)
    (path,) = (root / ".lastcall").glob("leaving*.json")
    path.write_text(path.read_text().replace(identity.Process.own().host, "elsewhere/1"))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_notice_before_the_first_step_loses_nothing_and_is_said_to_be_saved(
    start: Callable[..., Start], tmp_path: Path, signum: int, code: int
) -> None:
    one_that_leaves(tmp_path)
    begun = start()
    begun.context.latch.offer(a_notice(signum=signum))
    with pytest.raises(errors.Preempted, match="asked to stop before the first step") as left:
        begun.run(lambda: begun.context.latch.raised)
    assert left.value.code == code and begun.context.outcome.value is Outcome.SAVED
    assert not (tmp_path / ".lastcall/run.json").exists()  # it has not begun


def test_one_that_leaves_is_waited_for_until_it_must_be_gone(
    start: Callable[..., Start], tmp_path: Path
) -> None:
    one_that_leaves(tmp_path)
    begun = start()
    assert begun.run().incarnation == 1
    assert begun.context.clock.now() >= NOW + 30.0


@pytest.mark.parametrize("moment", ["_tidied", "_equip", "_identity", "_resumed"])
def test_a_start_that_fails_lets_go_of_the_directory(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError(moment)

    with monkeypatch.context() as patched:
        patched.setattr(startup.Startup, moment, fail)
        with pytest.raises(ZeroDivisionError, match=moment):
            start().run()
    assert start().run().resumed is None  # the next one finds it free


# ---- together ----------------------------------------------------------------------------------------------


def test_all_ranks_start_as_one_run_with_what_they_have_together(start: Callable[..., Start]) -> None:
    store = MemoryStore()
    ranks = [start(world=World(rank, 2, store.clone)) for rank in range(2)]
    found: list[Any] = at_once(*(partial(each.run) for each in ranks))
    assert len({each.run for each in found}) == 1 and [each.incarnation for each in found] == [1, 1]
    assert [each.together.ranks.rank for each in found] == [0, 1]
    assert [(each.resumed, each.committed) for each in found] == [(None, None)] * 2


def test_a_checkpoint_of_another_number_of_ranks_is_resumed_from_and_does_not_count_as_this_boundary(
    start: Callable[..., Start], tmp_path: Path
) -> None:
    trained(tmp_path, 4)
    store = MemoryStore()
    ranks = [start(world=World(rank, 2, store.clone)) for rank in range(2)]
    found: list[Any] = at_once(*(partial(each.run) for each in ranks))
    assert [(each.resumed.record.step, each.committed) for each in found] == [(4, None)] * 2
