"""What a killed rank leaves to the survivors: enough to make its part of the checkpoint, and an honest word
where it is not."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from helpers.models.roundtrip import read, write
from lastcall import errors
from lastcall.adapters.torch.last_state import reconstruct, state_record
from lastcall.adapters.torch.last_state.first_gradient import FirstGradient
from lastcall.adapters.torch.last_state.recorder import Mail
from lastcall.adapters.torch.subject import TorchSubject
from lastcall.core.guard import mailbox
from lastcall.core.sync.gate import Gate
from lastcall.formats.safetensors import Stored
from lastcall.types import Capture, Group

Record = mailbox.Record


class Rank:
    """One rank of a run without the others: what it draws, takes and counts is its own."""

    def __init__(self, folder: Path, number: int, **extra: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data = TensorDataset(torch.randn(40, 6) + number)
        self.loader = DataLoader(data, batch_size=4, shuffle=True)
        self.own = torch.Generator().manual_seed(number)
        state = {
            "model": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.loader,
        }
        self.subject = TorchSubject({**state, "own": self.own, **extra})
        self.subject.install(Gate())
        box = mailbox.Mailbox.create(folder, "run", 1, number)
        assert box is not None
        subject = self.subject
        self.mail = Mail(
            box, subject, subject.state.values, subject._trackers, subject._randomness, subject._positions
        )
        self.mail.install()
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        self.batches = iter(self.loader)
        self.boundary()

    def boundary(self) -> None:
        self.subject.refresh(time.perf_counter())
        assert self.subject._copy is not None
        assert self.mail.boundary(self.subject._copy) > 0

    def step(self, backwards: int = 1) -> None:
        for _ in range(backwards):
            (batch,) = next(self.batches)
            noise = random.random() + float(np.random.rand()) + torch.rand((), generator=self.own).item()
            (self.net(batch) * noise).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.subject.step += 1

    def train(self, steps: int) -> Capture:
        for _ in range(steps):
            self.step()
            self.boundary()
        return self.subject.capture()

    def records(self) -> list[Record]:
        return self.mail.box.records()

    def close(self) -> None:
        self.mail.remove()
        self.mail.box.close()
        self.subject.remove()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Any]:
    made: list[Rank] = []

    def make(number: int, **extra: Any) -> Rank:
        made.append(Rank(tmp_path, number, **extra))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def contents(groups: tuple[Group, ...], *without: str) -> dict[tuple[str, str], bytes]:
    return {
        (g.name, entry.name): read(entry.source)
        for g in groups
        for entry in g.entries
        if g.name not in without
    }


def killed_before_boundary(rank: Rank, step: int) -> list[Record]:
    """What is in the mail of a rank that was killed inside that step, after its first gradient."""
    return [
        record
        for record in rank.records()
        if record.step < step or (record.step == step and record.phase == "F")
    ]


def assert_is(composed: reconstruct.Composed, truth: Capture, other: Capture) -> None:
    """The dead rank's own state is its own; what all ranks have alike is the survivor's."""
    assert json.loads(json.dumps(composed.document)) == truth.document
    own, true, shared = contents(composed.groups), contents(truth.groups), contents(other.groups)
    buffers = {key for key in true if key[0] == "model" and ("running" in key[1] or "num_batches" in key[1])}
    assert len(buffers) == 3
    for key, data in own.items():
        assert data == (true[key] if key in buffers or key[0] == "own" else shared[key]), key
    assert own.keys() == true.keys()


def test_with_the_boundary_record_of_the_step_the_part_is_exact(ranks: Any) -> None:
    dead, survivor = ranks(1), ranks(2)
    truth, other = dead.train(3), survivor.train(3)
    assert truth.document != other.document
    composed = reconstruct.compose(other.document, other.groups, dead.records(), 3, survivor.records())
    assert (composed.exact, composed.because) == (True, "")
    assert_is(composed, truth, other)


def test_with_the_record_after_the_forward_the_part_is_exact(ranks: Any) -> None:
    dead = ranks(1)
    truth = dead.train(3)
    survivor = ranks(2)
    other = survivor.train(3)
    composed = reconstruct.compose(
        other.document, other.groups, killed_before_boundary(dead, 3), 3, survivor.records()
    )
    assert (composed.exact, composed.because) == (True, "")
    assert_is(composed, truth, other)


def test_the_part_of_a_dead_rank_is_restored_like_any_other(ranks: Any) -> None:
    dead, survivor = ranks(1), ranks(2)
    dead.train(3)
    other = survivor.train(3)
    composed = reconstruct.compose(
        other.document, other.groups, killed_before_boundary(dead, 3), 3, survivor.records()
    )
    resumed = ranks(7)
    data = contents(composed.groups)
    stored = {
        g.name: {e.name: Stored(e.dtype, e.shape, 0, e.source.nbytes) for e in g.entries}
        for g in composed.groups
    }
    loading = resumed.subject.prepare(json.loads(json.dumps(composed.document)), stored)
    for group, targets in loading.targets.items():
        for name, target in targets.items():
            write(target, data[group, name])
    loading.finish()
    assert resumed.subject.step == 3
    assert resumed.own.get_state().equal(dead.own.get_state())
    assert resumed.net[1].running_mean.equal(dead.net[1].running_mean)
    assert resumed.scheduler.last_epoch == 3


def test_the_last_backward_of_an_accumulation_counts(ranks: Any) -> None:
    dead = ranks(1)
    dead.train(1)
    dead.step(backwards=3)
    dead.boundary()
    truth = dead.subject.capture()
    survivor = ranks(2)
    survivor.train(1)
    survivor.step(backwards=3)
    survivor.boundary()
    other = survivor.subject.capture()
    composed = reconstruct.compose(
        other.document, other.groups, killed_before_boundary(dead, 2), 2, survivor.records()
    )
    assert composed.exact, composed.because
    assert_is(composed, truth, other)


def test_a_value_that_differs_between_the_ranks_is_named(ranks: Any) -> None:
    dead, survivor = ranks(1, level=4, same={"a": [1.5]}), ranks(2, level=5, same={"a": [1.5]})
    dead.train(2)
    other = survivor.train(2)
    composed = reconstruct.compose(
        other.document, other.groups, killed_before_boundary(dead, 2), 2, survivor.records()
    )
    assert not composed.exact
    assert composed.because == "'level' was not the same on the other ranks at step 1"
    whole = reconstruct.compose(other.document, other.groups, dead.records(), 2, survivor.records())
    assert whole.exact
    assert whole.document["state"]["level"] == 4


def test_a_tensor_that_differs_between_the_ranks_is_named(ranks: Any) -> None:
    dead, survivor = ranks(1, table={"t": torch.zeros(3)}), ranks(2, table={"t": torch.ones(3)})
    dead.train(1)
    other = survivor.train(1)
    composed = reconstruct.compose(
        other.document, other.groups, killed_before_boundary(dead, 1), 1, survivor.records()
    )
    assert "'table'" in composed.because
    whole = reconstruct.compose(other.document, other.groups, dead.records(), 1, survivor.records())
    assert whole.exact
    assert contents(whole.groups)["table", "t"] == bytes(12)


def test_a_generator_beside_other_values_is_taken_from_the_forward_and_the_values_are_not(ranks: Any) -> None:
    dead = ranks(1, mixed={"rng": random.Random(1), "count": 0})
    survivor = ranks(2, mixed={"rng": random.Random(2), "count": 0})
    for rank in (dead, survivor):
        rank.subject.state.values["mixed"]["rng"].random()
        rank.step()
        rank.subject.state.values["mixed"]["count"] = 1
        rank.boundary()
    other = survivor.subject.capture()
    composed = reconstruct.compose(
        other.document, other.groups, killed_before_boundary(dead, 1), 1, survivor.records()
    )
    assert composed.exact, composed.because
    assert composed.document["state"]["mixed"] == dead.subject.capture().document["state"]["mixed"]


def test_what_is_drawn_after_the_forward_is_told(ranks: Any) -> None:
    dead, survivor = ranks(1), ranks(2)
    for rank in (dead, survivor):
        rank.step()
        random.random()
        rank.boundary()
    other = survivor.subject.capture()
    composed = reconstruct.compose(
        other.document, other.groups, killed_before_boundary(dead, 1), 1, survivor.records()
    )
    assert composed.because == "random numbers are drawn between the forward and the boundary"


def test_without_the_step_in_the_mail_the_newest_record_serves_and_is_told(ranks: Any) -> None:
    dead, survivor = ranks(1), ranks(2)
    earlier = dead.train(2).document["run"]
    other = survivor.train(4)
    composed = reconstruct.compose(other.document, other.groups, dead.records(), 4, survivor.records())
    assert not composed.exact
    assert "step 2, the newest recorded" in composed.because
    assert composed.document["run"]["randomness"] == earlier["randomness"]
    assert composed.document["run"]["step"] == 4
    # The ranks have the same number of batches before them: otherwise one of them is at the end first, and
    # the other waits for it.
    assert (composed.document["run"]["loaders"], composed.document["state"]) == (
        other.document["run"]["loaders"],
        other.document["state"],
    )


def test_without_mail_the_part_is_that_of_the_survivor_and_is_told(ranks: Any) -> None:
    survivor = ranks(2)
    other = survivor.train(2)
    composed = reconstruct.compose(other.document, other.groups, [], 2, survivor.records())
    assert not composed.exact
    assert "no last state" in composed.because
    assert composed.document == other.document


def test_mail_of_another_release_is_told_and_not_used(ranks: Any) -> None:
    survivor = ranks(2)
    other = survivor.train(1)
    with pytest.raises(errors.CheckpointError):
        state_record.read(b"\x02\0\0\0\0\0\0\0{0")
    composed = reconstruct.compose(
        other.document, other.groups, [Record(1, "B", 1, b"nonsense of some length")], 1
    )
    assert "cannot be read" in composed.because
    assert composed.document == other.document


def test_what_is_too_large_for_the_mail_is_told(ranks: Any) -> None:
    dead, survivor = ranks(1, bank=torch.zeros(100_000)), ranks(2, bank=torch.ones(100_000))
    dead.train(1)
    other = survivor.train(1)
    composed = reconstruct.compose(other.document, other.groups, dead.records(), 1, survivor.records())
    assert composed.because == "'bank' is that of another rank: it is too large for the last state of a rank"
    assert contents(composed.groups)["bank", "value"] == contents(other.groups)["bank", "value"]


def test_a_state_dict_that_fails_ends_the_mail_and_not_the_training(
    ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Fragile:
        def state_dict(self) -> dict[str, object]:
            return {"good": 1}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    rank = ranks(1, fragile=Fragile())
    copy = rank.subject._copy
    with caplog.at_level(logging.WARNING, "lastcall"):
        rank.mail.boundary(copy._replace(small={}))
        rank.step()
    assert "can no longer record its last state" in caplog.text
    assert rank.records() == []


def test_what_cannot_be_afforded_is_not_written(ranks: Any) -> None:
    rank = ranks(1)
    rank.mail._affordable = lambda: False
    rank.step()
    assert [(record.step, record.phase) for record in rank.records()] == [(0, "B")]
    assert rank.mail.cost == 0.0


def test_mail_costs_are_counted(ranks: Any) -> None:
    rank = ranks(1)
    assert rank.mail.cost == 0.0
    rank.step()
    assert rank.mail.cost > 0.0


# ---- the first gradient ------------------------------------------------------------------------------------


class Fired:
    def __init__(self, *modules: torch.nn.Module) -> None:
        self.count = 0
        self.first = FirstGradient(modules, self.fire)
        self.first.install()

    def fire(self) -> None:
        self.count += 1


def test_one_hook_is_left_after_the_first_backward_and_fires_once_in_each() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    fired = Fired(net)
    for expected in (1, 2, 3):
        net(torch.randn(2, 3)).sum().backward()
        assert fired.count == expected
    assert sum(len(p._backward_hooks or ()) for p in net.parameters()) == 1
    fired.first.remove()
    net(torch.randn(2, 3)).sum().backward()
    assert fired.count == 3


def test_the_gradient_is_not_there_yet_when_it_fires() -> None:
    net = torch.nn.Linear(3, 3)
    seen: list[bool] = []
    FirstGradient([net], lambda: seen.append(all(p.grad is None for p in net.parameters()))).install()
    net(torch.randn(2, 3)).sum().backward()
    assert seen == [True]


def test_a_parameter_that_gets_no_gradient_any_more_is_replaced_by_another() -> None:
    one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    fired = Fired(torch.nn.ModuleList([one, two]))
    one(torch.randn(2, 3)).sum().backward()
    fired.first.fired = False
    two(torch.randn(2, 3)).sum().backward()
    assert not fired.first.fired
    fired.first.missed()
    two(torch.randn(2, 3)).sum().backward()
    assert (fired.first.fired, fired.count) == (True, 2)


def test_parameters_without_gradients_from_autograd_are_known_by_the_output() -> None:
    class Sharded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            gathered = self.weight.detach().requires_grad_()
            return {"step": 1, "logits": [gathered * x]}

    net = Sharded()
    fired = Fired(net)
    net(torch.ones(3))["logits"][0].sum().backward()
    assert fired.count == 0
    fired.first.missed()
    for expected in (1, 2):
        net(torch.ones(3))["logits"][0].sum().backward()
        assert fired.count == expected
    with torch.no_grad():
        net(torch.ones(3))


def test_a_model_that_never_settles_is_not_learned_for_ever() -> None:
    net = torch.nn.Linear(3, 3)
    fired = Fired(net)
    net(torch.randn(2, 3)).sum().backward()
    for _ in range(100):
        fired.first.missed()
    assert sum(len(p._backward_hooks or ()) for p in net.parameters()) == 2  # of the last lesson


def test_a_hook_that_nobody_can_afford_rests_and_comes_back() -> None:
    model = torch.nn.Linear(2, 1)
    fired: list[int] = []
    first = FirstGradient([model], lambda: fired.append(1))
    first.install()
    for resting, expected in ((False, 1), (True, 1), (True, 1), (False, 2)):
        first.rest() if resting else first.wake()
        model(torch.ones(1, 2)).sum().backward()
        assert len(fired) == expected and first.resting is resting
    first.remove()
