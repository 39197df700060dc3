"""What every part of one incarnation shares."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.core.solo import Plain
from lastcall.core.context import NoticeContext, RunContext
from lastcall.core.ranks.world import World
from lastcall.core.store.memory import MemoryStore
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage.files import Files
from lastcall.testing import FakeClock

JIT = JITCheckpointConfig(environ={})


def saves(**more: Any) -> PeriodicCheckpointConfig:
    return PeriodicCheckpointConfig(**more, environ={})


def made(root: Path, periodic: PeriodicCheckpointConfig | None = None, **more: Any) -> RunContext:
    return RunContext.create(root, Plain(), JIT, periodic or saves(), **more)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RunContext)])
def test_nothing_of_a_context_can_be_replaced(tmp_path: Path, field: str) -> None:
    context = made(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(context, field, None)


def test_making_a_context_touches_no_file(tmp_path: Path) -> None:
    made(tmp_path / "run")
    NoticeContext.beside(tmp_path / "private", JIT)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_directory_stays_where_it_was_when_the_script_changes_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    context = made(Path("runs/exp1"))
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    assert context.catalog.root == tmp_path / "runs/exp1"
    assert context.events.path == tmp_path / "runs/exp1/.lastcall/events-0.jsonl"


@pytest.mark.parametrize(
    ("strategy", "said", "wanted"),
    [
        ("no", None, False),
        ("steps", None, True),
        ("epoch", None, True),
        ("no", True, True),
        ("steps", False, False),
    ],
)
def test_memory_is_kept_for_a_copy_where_periodic_saves_are_wanted_or_an_adapter_says_so(
    tmp_path: Path, strategy: str, said: bool | None, wanted: bool
) -> None:
    more = {"save_steps": 10} if strategy == "steps" else {}
    assert (
        made(tmp_path, saves(save_strategy=strategy, **more), background_saves=said).background_saves
        is wanted
    )


def test_each_rank_has_events_and_progress_of_its_own(tmp_path: Path) -> None:
    store = MemoryStore()
    first, second = (made(tmp_path, world=World(rank, 2, store.clone)) for rank in range(2))
    assert (first.events.path.name, second.events.path.name) == ("events-0.jsonl", "events-1.jsonl")
    for context in (first, second):
        context.catalog.private.mkdir(parents=True, exist_ok=True)
        context.progress.update(1)
        context.progress.flush()
    assert {path.name for path in (tmp_path / ".lastcall").iterdir()} == {"progress.json", "progress-1.json"}


def test_the_catalog_keeps_what_the_periodic_configuration_says(tmp_path: Path) -> None:
    keep = made(tmp_path, saves(save_total_limit=3, monitor="loss", mode="max")).catalog.keep
    assert (keep.limit, keep.monitor, keep.mode) == (3, "loss", "max")


def test_one_clock_is_shared_by_all(tmp_path: Path) -> None:
    clock = FakeClock()
    context = made(tmp_path, clock=clock)
    assert context.clock is clock
    assert context.budget.until_safe(0, clock.now() + 60.0) == context.budget.seconds(0)
    assert NoticeContext.beside(tmp_path, JIT, clock=clock).clock is clock


def test_two_contexts_share_nothing_that_changes(tmp_path: Path) -> None:
    one, other = made(tmp_path), made(tmp_path)
    for name in ("latch", "gate", "budget", "outcome", "events", "progress", "catalog"):
        assert getattr(one, name) is not getattr(other, name)


def test_without_more_it_is_one_process_on_the_real_disk(tmp_path: Path) -> None:
    context = made(tmp_path)
    assert not context.world.many and context.world.rank == 0 and context.run == ""
    assert type(context.catalog.files) is Files and not context.latch.raised and not context.outcome.decided


def test_a_notice_can_be_answered_without_a_session(tmp_path: Path) -> None:
    context = NoticeContext.beside(tmp_path / "private", JIT, rank=3)
    assert context.events.path == tmp_path / "private/events-3.jsonl" and context.jit is JIT
    assert not context.latch.raised and not context.outcome.decided
