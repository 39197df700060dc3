"""What a loop carries, and small state that cannot be saved any more."""

from __future__ import annotations

import ast
import datetime
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lastcall
from lastcall import errors
from lastcall.adapters.torch.carry import flow, frames, owners, values
from lastcall.adapters.torch.overlooked import Overlooked
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage.files import Files


class Stop(Exception):
    pass


def begin(directory: Path, **state: Any) -> tuple[Any, torch.nn.Module, Callable[[], None]]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    config = JITCheckpointConfig(environ={}, signals=())
    return (
        lastcall.protect(directory / "run", config=config, model=model, optimizer=optimizer, **state),
        model,
        step,
    )


def newest(directory: Path) -> Entry:
    return Catalog(directory / "run", Files()).entries()[0]


# ---- F1 ----------------------------------------------------------------------------------------------------


class Sour:
    """An object whose state_dict() fails later."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise ValueError("gone sour")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("what", ["function", "cycle", "object"])
def test_f1_a_value_that_becomes_unsavable_costs_nothing_else(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra: dict[str, Any] = {"n": 0, "best": 1.0}
    sour = Sour()
    run, model, step = begin(tmp_path, extra=extra, sour=sour)
    run._subject.copy_every_boundary()  # a copy at every boundary, whatever the last ones have cost
    with caplog.at_level(logging.WARNING, "lastcall"), pytest.raises(Stop), run:
        for at in run.steps(9):
            step()
            extra["n"] = at
            if at == 2:
                extra["best"] = {"function": print, "cycle": extra, "object": 1.0}[what]
                sour.fails = what == "object"
            if at == 4:
                run.save()
                weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                raise Stop
            if at == 3:
                told = [record.getMessage() for record in caplog.records]
                named = {"function": "extra['best']", "cycle": "extra", "object": "sour"}[what]
                assert len(told) == 1 and named in told[0] and "A resumed run will differ" in told[0], (
                    "at the first boundary"
                )
    record = newest(tmp_path).record
    assert not record.exact and "is not saved" in f"{record.because} {record.doubt}"
    extra = {"n": 0, "best": 7.0}
    run, model, _ = begin(tmp_path, extra=extra, sour=Sour())
    with pytest.raises(Stop), run:
        assert run.resumed and all(
            torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items()
        )
        assert extra["best"] == (1.0 if what == "object" else 7.0)
        assert extra["n"] == (0 if what == "cycle" else 4)
        raise Stop


def test_f1_looks_for_what_was_overlooked_do_not_put_the_copies_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large process the first looks take long: what cannot be saved is named at the next boundary all
    the same."""
    looks: list[str] = []
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + len(looks))  # each takes a second

    def slow(look: Callable[[Overlooked], None]) -> Callable[[Overlooked], None]:
        def looked(self: Overlooked) -> None:
            look(self)
            looks.append(look.__name__)

        return looked

    monkeypatch.setattr(Overlooked, "begin", slow(Overlooked.begin))
    monkeypatch.setattr(Overlooked, "passed", slow(Overlooked.passed))
    run, _, step = begin(tmp_path, extra={"n": 0})
    with run:
        for _ in run.steps(3):
            step()
        assert "passed" in looks and run._subject._credit > -0.5, "the copies have paid for the looks"


def test_f1_periodic_saves_go_on_without_what_cannot_be_saved(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"best": 1.0}
    run, _, step = begin(
        tmp_path, extra=extra, periodic=PeriodicCheckpointConfig(save_strategy="steps", save_steps=2)
    )
    with run:
        for at in run.steps(6):
            step()
            extra["best"] = open if at else 1.0
    assert newest(tmp_path).record.step == 6


def test_f1_paths_and_dates_are_saved(tmp_path: Path) -> None:
    when = datetime.datetime(2026, 11, 16, 12, 30, 1, 5, datetime.UTC)
    extra: dict[str, Any] = {"best": None}
    run, _, step = begin(tmp_path, extra=extra)
    with run:
        for _ in run.steps(3):
            step()
            extra["best"] = [Path("a") / "b", when, when.date(), datetime.timedelta(1, 2, 3)]
    assert newest(tmp_path).record.exact
    extra = {"best": None}
    run, _, _ = begin(tmp_path, extra=extra)
    with run:
        assert extra["best"] == [Path("a") / "b", when, when.date(), datetime.timedelta(1, 2, 3)]


# ---- run.carry ---------------------------------------------------------------------------------------------


def test_the_mode_of_a_model_is_saved_and_not_worth_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """imagenet: train() and eval() in each epoch change it in every layer, 60 of them for a ResNet."""
    run, model, step = begin(tmp_path)
    with caplog.at_level(logging.INFO, "lastcall"), run:
        best = 0.0
        for at in run.steps(6):
            model.train(at % 2 == 0)
            step()
            best = max(best, at)
    assert "Also saving what the loop carries: `best`" in caplog.text and "training`" not in caplog.text
    assert any("training" in named for named in run._carrier._moving.values())


def test_a4_carry_brings_values_back(tmp_path: Path) -> None:
    for life in range(2):
        run, _, step = begin(tmp_path)
        with pytest.raises(Stop), run:
            state = run.carry(best=math.inf, seen=[])
            assert (state.best, state.seen) == ((2, [0, 1, 2]) if life else (math.inf, []))
            assert run.carry(best=5.0) is state and state["best"] == (2 if life else math.inf)
            for at in run.steps(9):
                step()
                if at == 3:
                    run.save()
                    raise Stop
                state.best, state["seen"] = at, [*state.seen, at]
            raise Stop


def test_a4_carry_refuses_what_it_cannot_save(tmp_path: Path) -> None:
    run, _, _ = begin(tmp_path)
    with run:
        with pytest.raises(errors.StateError, match=r"run.carry\(model=...\) cannot be saved"):
            run.carry(model=torch.nn.Linear(1, 1))
        with pytest.raises(AttributeError, match="run.carry\\(best=...\\)"):
            _ = run.carry().best


# ---- what a loop carries -----------------------------------------------------------------------------------

LOOP = """
def main():
    best, x = 9, get()
    for epoch in run.epochs(3):
        total = 0.0
        for i, batch in enumerate(run.batches(data)):
            loss = learn(batch, x)
            total += loss
            x = get()
            unused = 3
        mean = total / i
        if mean < best:
            best = mean
        try:
            y = risky()
        except ValueError:
            continue
        with open(y) as handle:
            text = handle.read()
    print(text)
"""


def test_a4_what_a_loop_still_needs_is_read_from_its_source() -> None:
    body = ast.parse(LOOP).body[0]
    assert isinstance(body, ast.FunctionDef)
    found = flow.Flow(body)
    outer, inner = flow.loops_at(body, 8)
    assert found.exposed(outer) & flow.assigned(outer) == {"best", "x", "i"}, (
        "an epoch without batches leaves `i` as it was"
    )
    assert found.exposed(inner) & flow.assigned(inner) == {"total", "x"}
    assert found.head[outer] & flow.assigned(outer) == {"best", "x", "i", "text"}
    assert found.head[inner] & flow.assigned(outer) == {"best", "x", "text", "total", "i"}


def test_a4_variables_of_frames_can_be_written_and_what_locals_gave_is_left_alone() -> None:
    import sys

    assert frames.writable()
    kept, number = locals(), 1
    frames.write(sys._getframe(), {"number": 2})
    assert number == 2 and "tmp" not in kept and kept.get("kept", kept) is kept
    assert frames.variables(sys._getframe())["number"] == 2 and kept


def test_a4_marks_tell_changes() -> None:
    tensor = torch.zeros(2)
    for before, change in [
        ([1, [2.0]], lambda value: value[1].append(3)),
        ({"a": {1}}, lambda value: value["a"].add(2)),
        (tensor, lambda value: value.add_(1)),
        ({"w": tensor}, lambda value: value["w"].add_(1)),
    ]:
        mark = values.mark(before)
        assert values.mark(before) == mark
        change(before)  # type: ignore[no-untyped-call]
        assert values.mark(before) != mark
    assert values.mark(math.nan) == values.mark(math.nan) and values.mark(1) != values.mark(True)


def test_a4_what_a_wrapper_of_torch_notes_of_its_own_process_is_not_carried() -> None:
    """DDP's `_lazy_init_ran`: put back into a new process, its set-up before the first forward would never
    run."""

    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = torch.nn.Dropout(0.1)
            self._seen = 0

    model = Mine()
    model.drop._noted = True  # type: ignore[assignment]
    assert {name for name in owners.Inside("model", model).read() if "_" in name} == {"_seen"}
    assert "drop.p" in owners.Inside("model", model).read()
