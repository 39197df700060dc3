from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cli.harness import HOLD, Cli, MakeRun
from helpers.core.bare_core import flip
from helpers.processes.forkserver import environment
from helpers.processes.scripts import Script
from lastcall.cli import ls
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import digest, writer
from lastcall.core.restore import restore
from lastcall.types import Kind


def listing(root: Path) -> list[tuple[str, int, int]]:
    """All that is in a directory, with the times at which it was changed."""
    found = []
    for parent, folders, files in os.walk(root):
        for name in folders + files:
            info = os.lstat(os.path.join(parent, name))
            found.append((os.path.join(parent, name), info.st_mtime_ns, info.st_size))
    return sorted(found)


def test_checkpoints_that_hold_are_ok(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    said = cli("verify", root)
    assert (said.code, said.err) == (0, "")
    assert [line.split(" (")[0] for line in said.lines] == [
        f"{root}/checkpoint-2: ok",
        f"{root}/checkpoint-1: ok",
    ]


def test_a_flipped_byte_is_found_and_every_damaged_file_is_named(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    flip(root / "checkpoint-1" / "model.safetensors", -1)
    flip(root / "checkpoint-1" / "optimizer.safetensors", 9000)
    said = cli("verify", root)
    assert said.code == 1
    (damaged,) = [line for line in said.lines if "damaged" in line]
    assert damaged.startswith(f"{root}/checkpoint-1: damaged: ")
    assert "optimizer.safetensors: the bytes from 8192 to 16384 do not match their digest" in damaged
    assert "model.safetensors: the bytes from" in damaged
    assert said.lines[-1] == "1 of 2 checkpoints cannot be trusted"


def test_the_json_says_what_came_of_each(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    assert cli("verify", root, "--json").json["ok"] is True
    flip(root / "checkpoint-2" / "state.json", 3)
    said = cli("verify", root, "--json")
    assert (said.code, said.json["ok"]) == (1, False)
    one, other = said.json["checkpoints"]
    assert set(one) == {"name", "path", "step", "result", "problems", "size", "seconds"}
    assert (one["name"], one["step"], one["result"], len(one["problems"])) == (
        "checkpoint-2",
        2,
        "damaged",
        1,
    )
    assert (other["result"], other["problems"]) == ("ok", [])


def test_only_the_newest_on_request(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    flip(root / "checkpoint-1" / "model.safetensors", -1)
    assert cli("verify", root, "--newest").code == 0
    assert cli("verify", root / "checkpoint-1").code == 1
    assert (
        cli("verify", root / "checkpoint-2", root / "checkpoint-2", root, "--newest", "--json").json[
            "checkpoints"
        ][1:]
        == []
    )


def test_a_lost_file_a_changed_record_and_a_link_are_damage(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3)
    (root / "checkpoint-1" / "base.safetensors").unlink()
    flip(root / "checkpoint-2" / records.NAME, 40)
    moved = root / "checkpoint-3" / "model.safetensors"
    moved.rename(root / "kept")
    moved.symlink_to(root / "kept")
    said = cli("verify", root, "--json").json
    assert [item["result"] for item in said["checkpoints"]] == ["damaged"] * 3


def test_what_was_never_committed_cannot_be_checked(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1)
    (root / "checkpoint-8").mkdir()
    (root / "checkpoint-9").mkdir()
    (root / "checkpoint-9" / records.SENTINEL).touch()
    assert cli("verify", root).code == 0  # they are no checkpoints of this run
    for name in ("checkpoint-8", "checkpoint-9"):
        said = cli("verify", root / name)
        assert (said.code, "unchecked" in said.out) == (1, True)
    assert "does not exist" in cli("verify", root / "checkpoint-7").err
    shutil.rmtree(root / "checkpoint-1")
    said = cli("verify", root)
    assert (said.code, "holds no committed checkpoint" in said.err) == (1, True)


def test_one_that_was_set_aside_is_checked_when_it_is_named(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    flip(root / "checkpoint-1" / "model.safetensors", -1)
    (root / "checkpoint-1").rename(root / "checkpoint-1.damaged-0")
    assert cli("verify", root).code == 0
    assert "model.safetensors: the bytes" in cli("verify", root / "checkpoint-1.damaged-0").out


def test_a_run_at_work_is_not_disturbed_and_nothing_is_set_aside(
    cli: Cli, make_run: MakeRun, tmp_path: Path
) -> None:
    root = make_run("run", 1, 2)
    flip(root / "checkpoint-2" / "model.safetensors", -1)
    with Script(tmp_path, HOLD.format(root=str(root))) as script:
        script.expect("held")
        before = listing(root)
        assert cli("verify", root).code == 1
        assert listing(root) == before


def test_one_that_the_run_prunes_meanwhile_is_gone_rather_than_damaged(
    cli: Cli, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run("run", 1, 2)
    real = restore.verify

    def verify(entry: Entry, engine: writer.Engine) -> None:
        shutil.rmtree(root / "checkpoint-1", ignore_errors=True)
        real(entry, engine)

    monkeypatch.setattr(restore, "verify", verify)
    said = cli("verify", root)
    assert said.code == 0
    assert said.lines[-1] == f"{root}/checkpoint-1: gone (the run removed it in the meantime)"
    found = ls.look(root / "checkpoint-2")
    assert found is not None and found.record is not None


def test_a_digest_that_cannot_be_computed_here_is_not_called_ok(
    cli: Cli, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run("run", 1)
    monkeypatch.setattr(digest, "_KNOWN", {})
    said = cli("verify", root)
    assert said.code == 1
    assert "cannot be checked here" in said.out


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_bar_is_drawn_on_a_terminal_only_and_never_with_json(
    make_run: MakeRun, more: tuple[str, ...]
) -> None:
    root = make_run("run", 1, kind=Kind.JIT)
    ours, theirs = pty.openpty()
    try:
        argv = [sys.executable, "-m", "lastcall", "verify", str(root), *more]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=theirs, env=environment(), timeout=90)
        os.write(theirs, b"END")
        drawn = b""
        while not drawn.endswith(b"END"):
            drawn += os.read(ours, 10_000)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert (b"\r[" in drawn and b"% of " in drawn and b"\x1b[K" in drawn) is not bool(more)
    assert b"\x1b" not in done.stdout
