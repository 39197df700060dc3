"""The launcher and the training processes know of each other through small files, also when one of them is
gone."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lastcall.core.process import registry
from lastcall.types import Notice

NOTICE = Notice("aws", "spot interruption", 10.0, 130.0)


def test_a_process_that_joins_is_a_member_and_its_changes_show(tmp_path: Path) -> None:
    book = registry.Registry(tmp_path)
    assert book.members() == []
    membership = registry.Membership(tmp_path, Path("runs/exp1"))
    assert book.members() == []
    membership.update(step=3)
    (member,) = book.members()
    assert (member.pid, member.step, member.outcome) == (os.getpid(), 3, None)
    assert member.root == str(Path("runs/exp1").absolute())
    assert registry.alive(member)
    membership.update(step=9, outcome="saved", checkpoint="checkpoint-9")
    (member,) = book.members()
    assert (member.step, member.outcome, member.checkpoint) == (9, "saved", "checkpoint-9")


def test_a_process_that_has_ended_is_not_alive_even_as_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = registry.process_start(child.pid)
    assert started is not None
    member = registry.Member(child.pid, started, "/")
    assert registry.alive(member)
    assert not registry.alive(dataclasses.replace(member, started=started + 1)), (
        "another process with the same number"
    )
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not registry.alive(member)
    child.wait()
    assert not registry.alive(member)


def test_a_notice_is_seen_once_and_a_new_one_again(tmp_path: Path) -> None:
    book, membership = registry.Registry(tmp_path), registry.Membership(tmp_path, tmp_path)
    assert membership.notice() is None
    book.post(NOTICE)
    assert membership.notice() == NOTICE
    assert membership.notice() is None
    sooner = dataclasses.replace(NOTICE, deadline=60.0)
    book.post(sooner)
    assert membership.notice() == sooner


def test_a_notice_posted_before_a_process_joins_is_seen_by_it(tmp_path: Path) -> None:
    registry.Registry(tmp_path).post(NOTICE)
    assert registry.Membership(tmp_path, tmp_path).notice() == NOTICE


def test_a_cleared_registry_knows_nobody_and_has_no_notice(tmp_path: Path) -> None:
    book, membership = registry.Registry(tmp_path), registry.Membership(tmp_path, tmp_path)
    membership.update(step=1)
    book.post(NOTICE)
    book.clear()
    assert book.members() == []
    assert membership.notice() is None
    membership.update(step=1)  # nothing has changed, but its file is gone
    assert [member.step for member in book.members()] == [1]


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"pid": 1}), json.dumps({"unknown": 1})])
def test_a_file_that_makes_no_sense_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "member-1.json").write_text(text)
    (tmp_path / "notice.json").write_text(text)
    assert registry.Registry(tmp_path).members() == []
    assert registry.Membership(tmp_path, tmp_path).notice() is None


def test_a_launcher_that_is_gone_disturbs_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    folder.mkdir()
    membership = registry.Membership(folder, tmp_path)
    membership.update(step=1)
    shutil.rmtree(folder)
    membership.update(step=2, outcome="finished")
    assert membership.notice() is None


def test_without_a_launcher_there_is_no_membership(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTCALL_REGISTRY", raising=False)
    assert registry.Membership.of_environment(tmp_path) is None
    monkeypatch.setenv("LASTCALL_REGISTRY", str(tmp_path))
    assert registry.Membership.of_environment(tmp_path) is not None
