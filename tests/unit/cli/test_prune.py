from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helpers.cli.harness import HOLD, Cli, MakeRun
from helpers.processes.scripts import Script
from lastcall import testing
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.storage import files as storage


def names(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name != ".lastcall"}


def steps(*numbers: int) -> set[str]:
    return {f"checkpoint-{number}" for number in numbers}


def disk(root: Path) -> int:
    """Bytes that the directory really takes, links counted once."""
    found = {}
    for parent, _, files in os.walk(root):
        for name in files:
            info = os.lstat(os.path.join(parent, name))
            found[info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def test_it_shows_first_and_removes_nothing(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3, 4)
    said = cli("prune", root, "--keep", 2)
    assert said.code == 0
    table = [line.split(maxsplit=4) for line in said.lines[1:-1]]
    assert [(line[0], line[1]) for line in table] == [
        ("keep", "checkpoint-4"),
        ("keep", "checkpoint-3"),
        ("remove", "checkpoint-2"),
        ("remove", "checkpoint-1"),
    ]
    assert said.lines[-1].startswith("Would remove 2 checkpoints, freeing ")
    assert said.lines[-1].endswith("Nothing was removed; to remove it, add --apply")
    assert names(root) == steps(1, 2, 3, 4)


def test_with_apply_it_removes_and_what_it_says_comes_back_does(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3, 4)
    promised = cli("prune", root, "--keep", 2, "--json").json
    assert (promised["applied"], [item["step"] for item in promised["remove"]]) == (False, [2, 1])
    before = disk(root)
    said = cli("prune", root, "--keep", 2, "--apply", "--json").json
    assert said["applied"] is True and said["failed"] == []
    assert names(root) == steps(3, 4)
    # The frozen file is shared with those that stay: it does not count. The lock holds a number now: a block
    # at most.
    assert abs(before - disk(root) - said["frees"]) <= 4096
    assert said["frees"] == promised["frees"] > 0
    assert said["frees"] < sum(item["size"] for item in said["remove"]) + 8 * 4096
    for name in steps(3, 4):
        testing_entry = next(
            entry for entry in Catalog(root, storage.Files()).entries() if entry.path.name == name
        )
        engine = writer.Engine(1)
        restore.verify(testing_entry, engine)
        engine.close()


def test_the_last_two_complete_ones_stay_whatever_is_asked_for(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3)
    cli("prune", root, "--keep", 1, "--apply")
    assert names(root) == steps(2, 3)
    said = cli("prune", root, "--keep", 1, "--apply")
    assert said.lines[-1] == "Nothing to remove."


def test_one_that_has_lost_a_file_does_not_count_as_one_of_the_last_two(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3, 4)
    (root / "checkpoint-4" / "model.safetensors").unlink()
    (root / "checkpoint-3" / "model.safetensors").unlink()
    assert cli("prune", root, "--keep", 1, "--apply").lines[-1] == "Nothing to remove."
    assert names(root) == steps(1, 2, 3, 4)


def test_the_best_stays(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3, 4, 5)  # the loss grows
    said = cli("prune", root, "--keep", 2, "--monitor", "loss", "--apply")
    assert "the best by loss" in next(line for line in said.lines if "checkpoint-1 " in line)
    assert names(root) == steps(1, 4, 5)
    cli("prune", root, "--keep", 2, "--monitor", "loss", "--mode", "max", "--apply")
    assert names(root) == steps(4, 5)


def test_a_misspelt_metric_costs_nothing(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3)
    said = cli("prune", root, "--keep", 1, "--monitor", "los", "--apply")
    assert (said.code, said.err) == (
        1,
        "lastcall: --monitor los: no checkpoint has this metric; they have loss.\n",
    )
    assert names(root) == steps(1, 2, 3)


def test_a_run_at_work_keeps_its_checkpoints(cli: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    root = make_run("run", 1, 2, 3)
    with Script(tmp_path, HOLD.format(root=str(root))) as script:
        script.expect("held")
        assert cli("prune", root, "--keep", 2).code == 0  # a look is always allowed
        said = cli("prune", root, "--keep", 2, "--apply")
    assert said.code == 1
    assert said.err.startswith(
        f"lastcall: A run is active in {root}, and its checkpoints must not be removed meanwhile."
    )
    assert f"lastcall pause {root} --wait" in said.err
    assert names(root) == steps(1, 2, 3)
    assert cli("prune", root, "--keep", 2, "--apply").code == 0  # it has gone


def test_damaged_ones_that_were_set_aside_go_only_when_asked_for(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, 3)
    (root / "checkpoint-1").rename(root / "checkpoint-1.damaged-0")
    (root / "checkpoint-9").mkdir()  # of another program
    (root / "checkpoint-8").mkdir()
    (root / "checkpoint-8" / records.SENTINEL).touch()
    cli("prune", root, "--keep", 1, "--apply")
    assert "checkpoint-1.damaged-0" in names(root)
    said = cli("prune", root, "--damaged", "--apply")
    assert said.lines[-1].startswith("Removed 1 checkpoint, freeing ")
    assert names(root) == steps(2, 3, 8, 9)


def test_spare_space_is_given_back_when_asked_for(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    spare = root / ".lastcall" / "spare"
    spare.mkdir(exist_ok=True)
    (spare / "spare-0").write_bytes(b"x" * 50_000)
    said = cli("prune", root, "--spare")
    assert said.lines[-1].startswith("Would remove the spare space, freeing 50.0 kB.")
    assert (spare / "spare-0").exists()
    said = cli("prune", root, "--spare", "--apply", "--json").json
    assert (said["spare"], said["frees"], said["remove"]) == (50_000, 50_000, [])
    assert os.listdir(spare) == []
    assert names(root) == steps(1, 2)


def test_it_wants_to_be_told_what_may_go(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1)
    said = cli("prune", root)
    assert (said.code, "choose what to remove: --keep N, --damaged, --spare" in said.err) == (2, True)
    for value in ("0", "-1", "many"):
        said = cli("prune", root, "--keep", value)
        assert said.code == 2
    assert "'many' is not a whole number of at least 1" in said.err


def test_what_cannot_be_removed_is_said_and_the_rest_goes(
    cli: Cli, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run("run", 1, 2, 3, 4)
    monkeypatch.setattr(
        storage, "Files", lambda: testing.FaultyFiles(testing.Fault("rename", 1, errno.EACCES))
    )
    said = cli("prune", root, "--keep", 2, "--apply")
    assert said.code == 1
    assert "checkpoint-2 could not be removed: Permission denied" in said.lines
    assert names(root) == steps(2, 3, 4)


def test_a_kill_in_the_middle_leaves_no_half_checkpoint(
    cli: Cli, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run("run", 1, 2, 3)
    monkeypatch.setattr(
        storage,
        "Files",
        lambda: testing.FaultyFiles(testing.Fault("unlink", 2, errno.EIO, lasting=True)),
    )
    assert cli("prune", root, "--keep", 2, "--apply").code == 1
    monkeypatch.undo()
    assert names(root) == steps(2, 3)
    assert {item["status"] for item in cli("ls", root, "--json").json["runs"][0]["checkpoints"]} == {"valid"}


def test_nothing_is_made_in_a_directory_where_nothing_is_to_go(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "hf" / "checkpoint-500").mkdir(parents=True)
    assert cli("prune", tmp_path / "hf", "--keep", 1, "--damaged", "--spare", "--apply").code == 0
    assert os.listdir(tmp_path / "hf") == ["checkpoint-500"]
