"""What is captured at a boundary and read later: whether it is still true is judged against that boundary,
and its memory stays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lastcall.adapters.torch.subject import TorchSubject
from lastcall.clock import Clock
from lastcall.core.notice.launcher_link import LauncherLink
from lastcall.core.sync.gate import Gate
from lastcall.types import Capture

LARGE = 1 << 19  # numbers: 2 MB of floats, too large for a boundary copy


class Loop:
    """A training loop, pass by pass."""

    def __init__(self, **state: object) -> None:
        self.weights = torch.nn.Parameter(torch.zeros(LARGE))
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)
        self.subject = TorchSubject({"weights": self.weights, "optimizer": self.optimizer, **state})
        self.subject.install(Gate())

    def step(self) -> None:
        self.weights.grad = torch.ones(LARGE)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.boundary()

    def boundary(self) -> None:
        self.subject.step += 1
        self.subject.arrive(0.0)


@pytest.fixture
def made() -> Iterator[list[Loop]]:
    loops: list[Loop] = []
    yield loops
    for loop in loops:
        loop.subject.remove()


def bytes_of(capture: Capture, name: str) -> bytes:
    (source,) = [entry.source for group in capture.groups for entry in group.entries if group.name == name]
    target = ctypes.create_string_buffer(source.nbytes)
    source.read_into(ctypes.addressof(target), 0, source.nbytes)
    return target.raw


def test_a_later_boundary_does_not_make_a_changed_state_true_again(made: list[Loop]) -> None:
    bank = torch.zeros(LARGE)
    loop = Loop(bank=bank)
    made.append(loop)
    loop.step()
    capture = loop.subject.behind_gate()
    assert capture.exact and capture.still()
    bank[0] = 1.0  # outside of optimizer.step(), in a pass of an accumulation
    loop.boundary()
    loop.subject.refresh(0.0)  # the next boundary's copy knows the bank as it is now
    assert not capture.still()


def test_a_large_array_that_changes_is_noticed_where_it_can_be_and_said_where_it_cannot(
    made: list[Loop],
) -> None:
    replay = np.zeros(LARGE, dtype=np.float32)
    loop = Loop(replay=replay)
    made.append(loop)
    loop.step()
    guarded = loop.subject.behind_gate()
    assert guarded.exact and guarded.still()
    replay[7] = 1.0
    assert not guarded.still()
    rescued = loop.subject.rescue()
    assert not rescued.exact
    assert "numpy array" in rescued.because


def test_weights_that_are_replaced_while_they_are_read_stay_in_memory(made: list[Loop]) -> None:
    loop = Loop()
    made.append(loop)
    loop.step()
    capture = loop.subject.behind_gate()
    before = loop.weights.detach().numpy().tobytes()
    loop.weights.data = torch.full((LARGE,), 9.0)
    torch.full((LARGE,), 5.0)  # would take the place of what was freed
    assert bytes_of(capture, "weights") == before


def test_a_folder_that_cannot_be_looked_into_is_not_paused(tmp_path: Path) -> None:
    outside = LauncherLink(tmp_path, tmp_path / ("x" * 5000), Clock(), 30.0)
    assert not outside.paused()
    assert outside.notice() is None
    assert outside.wait_while_paused(lambda: True)
