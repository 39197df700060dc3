from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lastcall
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.saves import fallback


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In a train worker."""
    context = SimpleNamespace()
    monkeypatch.setattr(internals, "train_context", lambda: context)
    return context


def test_what_is_named_reaches_the_worker(context: Any) -> None:
    seen: list[dict[str, Any]] = []
    fallback.install(context, SimpleNamespace(name=seen.append))  # type: ignore[arg-type]
    model, progress = torch.nn.Linear(2, 1), {"epoch": 0}
    lastcall.ray.protect(model=model, progress=progress)
    assert seen == [{"model": model, "progress": progress}]


def test_what_cannot_be_put_back_in_place_is_refused_with_a_remedy(context: Any) -> None:
    with pytest.raises(TypeError, match=r"epoch cannot be restored in place.*progress=\{'epoch': 0\}"):
        lastcall.ray.protect(model=torch.nn.Linear(2, 1), epoch=0)


def test_where_nothing_is_protected_that_is_said_and_training_goes_on(
    context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lastcall"):
        lastcall.ray.protect(model=torch.nn.Linear(2, 1))
    assert "RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1" in caplog.text


def test_outside_of_a_train_function_it_says_where_it_belongs() -> None:
    with pytest.raises(RuntimeError, match="belongs in the function that Ray Train runs"):
        lastcall.ray.protect(model=torch.nn.Linear(2, 1))
