from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch

from lastcall import errors
from lastcall.adapters.ray.saves import state
from lastcall.adapters.ray.saves.restoring import Restoring
from lastcall.adapters.ray.worker.steps import Boundary

LOCAL = pyarrow.fs.LocalFileSystem()


class Net(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(inputs))


def trained(steps: int, width: int = 4) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(width)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(steps):
        step(net, optimizer)
    return net, optimizer


def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 3) * torch.arange(1.0, 3.0)[:, None]).square().sum().backward()
    optimizer.step()


@contextlib.contextmanager
def steps_are_counted() -> Iterator[None]:
    """As they are in a train worker: torch has more hooks than ours to go through."""
    boundary = Boundary(lambda frame: None)
    boundary.install()
    yield
    boundary.remove()


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_what_an_optimizer_trains_is_found_with_the_module_around_it() -> None:
    net, optimizer = trained(2)
    modules, optimizers = state.found()
    assert any(each is net for each in modules) and any(each is optimizer for each in optimizers)
    assert not any(each is net.inner for each in modules)


def test_it_is_put_back_before_the_first_step_and_training_goes_on_as_though_nothing_had_been(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, optimizer = trained(3)
    body = {
        "modules": [{"class": state.kind(net), "state": net.state_dict()}],
        "optimizers": [
            {
                "class": state.kind(optimizer),
                "shapes": state.shapes(net.parameters()),
                "state": optimizer.state_dict(),
            },
        ],
        "named": {},
    }
    body = _copied(body)
    step(net, optimizer)
    other, fresh = trained(0)
    restoring = Restoring(body, "SIGTERM")
    restoring.begin()
    with caplog.at_level(logging.INFO, "lastcall"), steps_are_counted():
        step(other, fresh)
        restored = {name: value.clone() for name, value in other.state_dict().items()}
        step(other, fresh)
        restoring.end()
    assert all(torch.equal(value, restored[name]) for name, value in net.state_dict().items())
    assert (
        "Restored what was saved after SIGTERM: Net, AdamW" in caplog.text
        and "start from scratch" in caplog.text
    )
    assert caplog.text.count("Restored what was saved") == 1


def test_what_does_not_fit_is_left_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    net, _ = trained(2)
    body = {
        "modules": [{"class": state.kind(net), "state": _copied(net.state_dict())}],
        "optimizers": [],
        "named": {},
    }
    wider, fresh = trained(0, width=5)
    restoring = Restoring(body, "SIGTERM")
    restoring.begin()
    step(wider, fresh)
    restoring.end()
    assert "Not restored, since nothing in the script has its class and its shapes: Net" in caplog.text
    assert same(wider, trained(1, width=5)[0])


def test_what_was_named_goes_back_in_place() -> None:
    net, _ = trained(2)
    body = {
        "modules": [],
        "optimizers": [],
        "named": {"model": _copied(net.state_dict()), "progress": {"epoch": 3}, "seen": [1, 2]},
    }
    other, _ = trained(0)
    progress, seen = {"epoch": 0}, [0]
    Restoring(body, "SIGTERM").named({"model": other, "progress": progress, "seen": seen, "new": {}})
    assert same(net, other) and progress == {"epoch": 3} and seen == [1, 2]


def test_a_rank_reads_its_own_state_and_that_of_rank_0_where_it_has_none(tmp_path: Path) -> None:
    state.write(LOCAL, str(tmp_path / "s"), 0, {"named": {"rank": 0}})
    state.write(LOCAL, str(tmp_path / "s"), 2, {"named": {"rank": 2}})
    assert [state.read(LOCAL, str(tmp_path / "s"), rank)["named"]["rank"] for rank in (0, 1, 2)] == [0, 0, 2]


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    state.write(LOCAL, str(tmp_path), 0, {"named": {}})
    file = tmp_path / "rank-0.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.CheckpointError, match="damaged"):
        state.read(LOCAL, str(tmp_path), 0)


def test_nothing_is_executed_when_a_state_is_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    state.write(LOCAL, str(tmp_path), 0, {"named": {"evil": Evil()}})
    with pytest.raises(Exception, match="weights_only|Unsupported"):
        state.read(LOCAL, str(tmp_path), 0)
    assert not (tmp_path / "executed").exists()


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def body_of(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    shapes = state.shapes(net.parameters())
    optimizers = [{"class": state.kind(optimizer), "shapes": shapes, "state": optimizer.state_dict()}]
    return _copied(
        {
            "modules": [{"class": state.kind(net), "state": net.state_dict()}],
            "optimizers": optimizers,
            "named": {},
        }
    )


def test_b5_it_is_not_laid_over_what_the_script_has_restored_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lightning with RayTrainReportCallback: the weights of step 5 must not come over those of step 3, with
    the counts of step 3."""
    own, optimizer = trained(3)
    restoring = Restoring(body_of(*trained(5)), "SIGTERM", lambda: True)
    restoring.begin()
    with steps_are_counted():
        step(own, optimizer)
    restoring.end()
    assert same(own, trained(4)[0])
    assert caplog.text.count("are not restored: the script resumes from checkpoints of its own") == 1
