from __future__ import annotations

import importlib
import os
import types
from typing import Any

import pytest
import torch.distributed as dist

from lastcall.auto import attempts


def rendezvous(*, shared: bool = True) -> tuple[types.ModuleType, dist.Store]:  # type: ignore[name-defined]
    """As torch's module: one store for all attempts."""
    module = types.ModuleType("rendezvous")
    kept = dist.HashStore()  # type: ignore[attr-defined]
    module._create_c10d_store = lambda *args, **kwargs: kept  # type: ignore[attr-defined]
    module._torchelastic_use_agent_store = lambda: shared  # type: ignore[attr-defined]
    return module, kept


def made(module: Any, monkeypatch: pytest.MonkeyPatch, attempt: str | None) -> Any:
    monkeypatch.delenv(attempts.ROUND, raising=False)
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
    # torch.distributed has a function of that name
    real = importlib.import_module("torch.distributed.rendezvous")
    assert hasattr(real, "_create_c10d_store") and hasattr(real, "_torchelastic_use_agent_store")
    dynamic = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    assert hasattr(dynamic.DynamicRendezvousHandler, "next_rendezvous")
    assert dynamic._RendezvousState().round == 0


class Handler:
    """As torchrun's: `rounds` are those that it joins, one after the other."""

    def __init__(self, *rounds: object) -> None:
        self._rounds = list(rounds)
        self._state_holder = types.SimpleNamespace(state=types.SimpleNamespace(round=-1))

    def next_rendezvous(self) -> str:
        self._state_holder.state.round = self._rounds.pop(0)
        return "joined"


def told(*rounds: object) -> Any:
    module = types.ModuleType("dynamic_rendezvous")
    handler = type("DynamicRendezvousHandler", (Handler,), {})
    module.DynamicRendezvousHandler = handler  # type: ignore[attr-defined]
    attempts.tell(module)
    attempts.tell(module)
    return handler(*rounds)


def test_machines_that_have_counted_differently_find_each_other_in_the_round_of_their_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, _ = rendezvous()
    attempts.apply(module)
    agent = told(0, 1)
    monkeypatch.setenv(attempts.ROUND, "of somebody above")
    assert agent.next_rendezvous() == "joined"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    module._create_c10d_store().set("address", "of the first attempt")
    agent.next_rendezvous()
    stores = []
    for counted in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", counted)
        stores.append(module._create_c10d_store())
    assert not stores[0].check(["address"])
    stores[0].set("address", "here")
    assert stores[1].get("address") == b"here"


def test_a_torchrun_that_does_not_know_its_round_leaves_no_other_one_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(attempts.ROUND, "3")
    told(None).next_rendezvous()
    assert attempts.ROUND not in os.environ
