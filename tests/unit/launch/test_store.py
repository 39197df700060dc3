"""The store that `lastcall run` holds for the processes below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastcall.core.store import client, server
from lastcall.launch import environment, store
from lastcall.launch.options import LaunchOptions


def reached(told: str) -> client.StoreClient:
    found = client.parse_port_and_secret(told)
    assert found is not None
    return client.StoreClient("127.0.0.1", *found)


def test_what_is_told_leads_to_the_store_and_to_an_empty_one_after_clear() -> None:
    with store.served() as serving:
        assert serving.told is not None
        first = reached(serving.told)
        assert first.add("count", 1) == 1
        serving.clear()
        second = reached(serving.told)
        assert second.add("count", 1) == 1
        first.close()
        second.close()


def test_each_launcher_has_a_secret_of_its_own() -> None:
    with store.served() as one, store.served() as two:
        assert one.told is not None and two.told is not None
        assert one.told.partition(":")[2] != two.told.partition(":")[2]
        assert len(one.told.partition(":")[2]) == 32


def test_a_launcher_without_a_port_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(host: str, port: int) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(server, "_listen", refuse)
    with store.served() as serving:
        assert serving.told is None
        serving.clear()
    assert "Could not start a store for the ranks of this run: Operation not permitted" in caplog.text


@pytest.mark.parametrize(("told", "expected"), [("4711:abc", "4711:abc"), (None, None)])
def test_the_command_is_told_of_this_launchers_store_and_never_of_another(
    told: str | None, expected: str | None
) -> None:
    built = environment.build(
        LaunchOptions(("true",), auto=False), 75, Path("/registry"), {"LASTCALL_STORE": "1:outer"}, told
    )
    assert built.get("LASTCALL_STORE") == expected
