from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch.distributed as dist

from lastcall import errors
from lastcall.adapters.torch import world
from lastcall.settings import JITCheckpointConfig

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def jit(**given: str) -> JITCheckpointConfig:
    return JITCheckpointConfig(**given, environ={})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "TORCHELASTIC_RESTART_COUNT", "LASTCALL_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:  # type: ignore[name-defined]
    """What an agent with two workers sets, and its store."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")  # torch asks for the names of addresses
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for name, value in zip(NAMES, ("1", "2", "2", "127.0.0.1", str(store.port), "job", "True"), strict=True):
        monkeypatch.setenv(name, value)
    return store


def test_a_process_that_nobody_started_as_a_rank_is_alone() -> None:
    assert world.find(jit()).size == 1
    with pytest.raises(errors.StoreLost, match="a world of one has no store"):
        world.find(jit()).meet()


def test_torchrun_says_which_rank_it_is_before_there_is_a_group(torchrun: dist.TCPStore) -> None:  # type: ignore[name-defined]
    found = world.find(jit())
    assert (found.rank, found.size, found.address, found.many) == (1, 2, "127.0.0.1", True)
    store = found.meet()
    store.set("key", b"x")
    assert store.get("key", 30.0) == b"x"
    store.close()


def test_each_attempt_and_each_run_meet_under_names_of_their_own(
    torchrun: dist.TCPStore,  # type: ignore[name-defined]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = world.find(jit())
    first, other_run = found.meet(), world.find(jit()).meet()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = world.find(jit()).meet()
    first.set("start", b"x")
    assert first.get("start", 30.0) == b"x"
    assert (other_run.get("start", 0.0), again.get("start", 0.0)) == (None, None)
    for store in (first, other_run, again):
        store.close()


def test_an_agent_that_cannot_be_reached_is_an_error_with_a_remedy(
    torchrun: dist.TCPStore,  # type: ignore[name-defined]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datetime

    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(world, "_TIMEOUT", datetime.timedelta(seconds=1))
    with pytest.raises(
        errors.RanksError,
        match=r"could not reach torchrun's store at 127.0.0.1:1 .*init_process_group\(\) "
        r"before protect",
    ):
        world.find(jit()).meet()


def test_on_several_machines_rank_0_is_found_at_the_masters_address(
    torchrun: dist.TCPStore,  # type: ignore[name-defined]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    assert world.find(jit()).address == "node-0"


def test_separate_ranks_are_runs_of_their_own(torchrun: dist.TCPStore) -> None:  # type: ignore[name-defined]
    assert world.find(jit(ranks="separate")).size == 1


def test_separate_ranks_do_not_share_the_place_of_a_mirror(torchrun: dist.TCPStore) -> None:  # type: ignore[name-defined]
    shared = JITCheckpointConfig(ranks="separate", environ={"LASTCALL_MIRROR": "s3://runs/exp1"})
    with pytest.raises(
        errors.ConfigError,
        match="LASTCALL_MIRROR=s3://runs/exp1 is one mirror for 2 ranks.*Give each its own mirror",
    ):
        world.find(shared)
    assert world.find(jit(ranks="separate", mirror="s3://runs/exp1/1")).size == 1


def test_separate_ranks_are_not_given_one_place_by_their_script_either(
    torchrun: dist.TCPStore,  # type: ignore[name-defined]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):  # two runs of one rank, one after the other
        assert world.find(jit(ranks="separate", mirror="s3://runs/exp1")).size == 1
    monkeypatch.setenv("RANK", "0")
    assert world.find(jit(ranks="separate", mirror="s3://runs/exp1/0")).size == 1
    with pytest.raises(
        errors.ConfigError, match="'s3://runs/exp1' is one mirror for ranks 1 and 0.*Give each its own mirror"
    ):
        world.find(jit(ranks="separate", mirror="s3://runs/exp1"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the rank of that number may be started first
    assert world.find(jit(ranks="separate", mirror="s3://runs/exp1")).size == 1


def test_a_process_that_is_alone_has_the_place_for_itself() -> None:
    assert (
        world.find(JITCheckpointConfig(ranks="separate", environ={"LASTCALL_MIRROR": "s3://runs/exp1"})).size
        == 1
    )


@pytest.mark.parametrize(
    "changed", [("WORLD_SIZE", "1"), ("TORCHELASTIC_USE_AGENT_STORE", "False"), ("TORCHELASTIC_RUN_ID", "")]
)
def test_without_a_store_of_torchruns_only_a_group_makes_a_rank(
    torchrun: dist.TCPStore,  # type: ignore[name-defined]
    monkeypatch: pytest.MonkeyPatch,
    changed: tuple[str, str],
) -> None:
    monkeypatch.setenv(*changed)
    assert world.find(jit()).size == 1


def test_a_process_group_of_one_is_no_world(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert world.find(jit()).size == 1
    finally:
        dist.destroy_process_group()


def test_a_process_group_says_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: kept)
    found = world.find(jit())
    assert (found.rank, found.size) == (3, 4)
    found.meet().set("key", b"x")
    assert found.meet().get("key", 30.0) == b"x"


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "LASTCALL_ATTEMPT"])
def test_a_group_that_was_started_again_does_not_hear_the_one_before(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """torchrun keeps one store for all attempts."""
    kept = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: kept)
    for attempt in ("0", "1"):
        monkeypatch.setenv(variable, attempt)
        monkeypatch.setattr(world, "_runs", itertools.count(1))  # as in a new process
        store = world.find(jit()).meet()
        assert store.get("start", 0.0) is None
        store.set("start", b"x")


@pytest.mark.parametrize(
    ("local", "attempt", "warned"), [("1", "", True), ("2", "", False), ("1", "1", False)]
)
def test_restarts_that_each_machine_counts_by_itself_are_said(
    torchrun: dist.TCPStore,  # type: ignore[name-defined]
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    local: str,
    attempt: str,
    warned: bool,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("LASTCALL_ATTEMPT", attempt)
    world.find(jit())
    assert ("export LASTCALL_ENABLED=1" in caplog.text) is warned


def test_a_group_without_a_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> dist.Store:  # type: ignore[name-defined]
        raise ValueError("no default group")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", none)
    with pytest.raises(
        errors.RanksError, match="could not use the store of the process group: no default group"
    ):
        world.find(jit()).meet()
