"""Small trainings whose end shows whether a roundtrip was exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from helpers.models.roundtrip import Saved
from lastcall.adapters.torch.state.entries import StateSet

State = dict[str, Any]


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8, 3),
    ).to(dtype)


def step(state: State) -> None:
    """One step on whatever is in a state: model, optimizers, scheduler, scaler, ema."""
    net = state["model"]
    first = next(net.parameters())
    optimizers = [value for name, value in state.items() if name.startswith("optimizer")]
    batch = torch.randn(5, 6, dtype=first.dtype)

    def closure() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = net(batch).float().square().mean()
        scaler = state.get("scaler")
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    loss = closure()
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        elif "scaler" in state:
            state["scaler"].step(optimizer)
        else:
            optimizer.step()
    if "scaler" in state:
        state["scaler"].update()
    scheduler = state.get("scheduler")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss.item())
    elif scheduler is not None:
        scheduler.step()
    if "after" in state:
        state["after"](state)


def saved(state: State) -> State:
    return {name: value for name, value in state.items() if name != "after"}


def assert_continues_exactly(build: Callable[[], State], steps: int = 4, rescued: bool = False) -> Saved:
    """Train, save, go on; build anew with other numbers, restore, go on: both must end the same, bit for
    bit."""
    torch.manual_seed(1)
    one = build()
    states = StateSet(saved(one))
    for _ in range(steps):
        step(one)
    checkpoint = Saved(states, states.small() if rescued else None)
    torch.manual_seed(2)
    other = build()
    others = StateSet(saved(other))
    checkpoint.restore(others)
    again = Saved(others)
    assert (again.text, again.data) == (checkpoint.text, checkpoint.data), (
        "what was restored is not what was saved"
    )
    for state in (one, other):
        torch.manual_seed(3)
        for _ in range(steps):
            step(state)
    end, other_end = Saved(states), Saved(others)
    assert (end.text, end.data) == (other_end.text, other_end.data), "training went on differently"
    return checkpoint
