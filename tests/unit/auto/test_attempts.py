from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch.distributed as dist

from lastcall.auto import attempts


def rendezvous(*, shared: bool = True) -> tuple[types.ModuleType, dist.Store]:
    """As torch's module: one store for all attempts."""
    module = types.ModuleType("rendezvous")
    kept = dist.HashStore()
    module._create_c10d_store = lambda *args, **kwargs: kept  # type: ignore[attr-defined]
    module._torchelastic_use_agent_store = lambda: shared  # type: ignore[attr-defined]
    return module, kept


def made(module: Any, monkeypatch: pytest.MonkeyPatch, attempt: str | None) -> Any:
    if attempt is None:
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    return module._create_c10d_store("host", 1, rank=0)


def test_an_attempt_does_not_read_what_the_one_before_left(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = rendezvous()
    attempts.apply(module)
    for attempt in ("0", "1", "2"):
        store = made(module, monkeypatch, attempt)
        assert not store.check(["address"])
        store.set("address", attempt)
    assert made(module, monkeypatch, "1").get("address") == b"1"


@pytest.mark.parametrize("attempt", [None, "0"])
def test_the_first_attempt_has_torchs_own_store(monkeypatch: pytest.MonkeyPatch, attempt: str | None) -> None:
    module, kept = rendezvous()
    attempts.apply(module)
    assert made(module, monkeypatch, attempt) is kept


def test_a_store_that_is_not_shared_between_attempts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module, kept = rendezvous(shared=False)
    attempts.apply(module)
    assert made(module, monkeypatch, "1") is kept


def test_it_is_applied_once() -> None:
    module, _ = rendezvous()
    attempts.apply(module)
    first = module._create_c10d_store
    attempts.apply(module)
    assert module._create_c10d_store is first


@pytest.mark.parametrize("missing", ["_create_c10d_store", "_torchelastic_use_agent_store"])
def test_a_torch_that_makes_its_stores_otherwise_is_left_alone(missing: str) -> None:
    module, _ = rendezvous()
    delattr(module, missing)
    before = dict(vars(module))
    attempts.apply(module)
    assert vars(module) == before


def test_this_torch_has_what_is_patched() -> None:
    real = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name
    assert hasattr(real, "_create_c10d_store") and hasattr(real, "_torchelastic_use_agent_store")
