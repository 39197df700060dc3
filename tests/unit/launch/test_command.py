"""The launcher says who it is, so that whoever it leaves behind can tell when it is gone."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from lastcall.cli.main import main
from lastcall.core.process import registry
from lastcall.core.process.identity import Process
from lastcall.launch import command


def test_the_launcher_signs_its_registry_and_takes_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with command._registry() as book:
        assert registry.Membership(book.folder, tmp_path).launcher() == dataclasses.asdict(Process.own())
        book.clear()
        assert registry.Membership(book.folder, tmp_path).launcher(), (
            "the next incarnation has the same launcher"
        )
    assert not book.folder.exists()


def test_a_launcher_that_cannot_say_who_it_is_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(registry.Registry, "sign", full)
    with command._registry() as book:
        assert registry.Membership(book.folder, tmp_path).launcher() == {}
    assert "if the launcher is killed, the training below it continues" in caplog.text


@pytest.mark.parametrize("text", ["--resume_from_checkpoint", "'--resume {path}", ""])
def test_b3_resume_args_say_where_the_path_goes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B3"""
    assert main(["run", "--resume-args", text, "--", "true"]) == 78
    assert "--resume-args '--resume_from_checkpoint {path}'" in capsys.readouterr().err
