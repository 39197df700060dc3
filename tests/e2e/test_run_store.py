"""`lastcall run` and the store that it holds for the ranks below it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.scripts.launch_harness import Launched
from helpers.processes.forkserver import until
from lastcall import errors
from lastcall.core.store import client

TELL = 'echo "store $LASTCALL_STORE"; '


def reached(told: str) -> client.StoreClient:
    found = client.parse_port_and_secret(told)
    assert found is not None, told
    return client.StoreClient("127.0.0.1", *found)


def test_the_store_outlives_an_incarnation_and_what_was_said_in_it_does_not(tmp_path: Path) -> None:
    script = TELL + "while [ ! -e go ]; do sleep 0.02; done; [ -e again ] || { touch again; rm go; exit 3; }"
    with Launched(tmp_path, ["sh", "-c", script], "--restart", "on-failure") as launched:
        told = launched.expect("store")
        first = reached(told)
        assert first.claim("notice", b"stop") == b"stop"
        (tmp_path / "go").touch()
        assert launched.expect("store", 2) == told
        second = reached(told)
        assert second.get("notice", 0) is None
        with pytest.raises(errors.StoreLost):
            first.get("notice", 60)
        (tmp_path / "go").touch()
        assert launched.wait() == 0, launched.log()
        with pytest.raises(errors.StoreLost):
            second.get("notice", 60)
        first.close()
        second.close()


def test_off_means_no_store(tmp_path: Path) -> None:
    with Launched(tmp_path, ["sh", "-c", TELL], LASTCALL_ENABLED="0") as launched:
        assert launched.wait() == 0, launched.log()
        assert launched.lines() == ["store "]


def test_signals_find_the_launcher_as_before_while_a_rank_waits(tmp_path: Path) -> None:
    """Ears: a signal that reached the server's thread would end the launcher at once."""
    with Launched(
        tmp_path, ["sh", "-c", TELL + "trap 'exit 7' TERM; while :; do sleep 0.02; done"]
    ) as launched:
        rank = reached(launched.expect("store"))
        threads = os.listdir(f"/proc/{launched.pid}/task")
        assert len(threads) >= 2
        launched.send()
        assert launched.wait() == 7, launched.log()
        with pytest.raises(errors.StoreLost):
            rank.get("notice", 60)
        rank.close()


def test_a_killed_launcher_is_a_lost_store(tmp_path: Path) -> None:
    with Launched(tmp_path, ["sh", "-c", TELL + "while :; do sleep 0.02; done"]) as launched:
        rank = reached(launched.expect("store"))
        launched.process.kill()
        until(lambda: launched.process.poll() is not None, "the end of the launcher")
        with pytest.raises(errors.StoreLost):
            rank.get("notice", 60)
        rank.close()
