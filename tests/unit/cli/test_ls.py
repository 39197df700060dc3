from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from helpers.cli.harness import Cli, MakeRun
from helpers.core.bare_core import State, World, flip
from lastcall.cli import ls
from lastcall.core.checkpoint import record as records
from lastcall.types import Kind

FIELDS = {
    "name",
    "path",
    "status",
    "valid",
    "problem",
    "step",
    "kind",
    "reason",
    "exact",
    "because",
    "complete",
    "size",
    "written",
    "seconds",
    "created",
    "sequence",
    "incarnation",
    "world",
    "metrics",
}


def row(out: str, name: str) -> list[str]:
    return next(line for line in out.splitlines() if line.startswith(f"{name} ")).split()


def test_the_newest_comes_first_with_what_the_record_says(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 100, 347, 200, kind=Kind.JIT, reason="SIGTERM")
    said = cli("ls", root)
    assert said.code == 0
    head, *rows = said.lines
    assert head.split() == [
        "CHECKPOINT",
        "STEP",
        "KIND",
        "REASON",
        "SIZE",
        "TOOK",
        "EXACT",
        "VALID",
        "CREATED",
        "AGE",
    ]
    assert [line.split()[0] for line in rows] == ["checkpoint-200", "checkpoint-347", "checkpoint-100"]
    assert rows[1].split()[:4] == ["checkpoint-347", "347", "jit", "SIGTERM"]
    assert "yes    yes" in rows[1]
    assert "95." in rows[1] and "kB" in rows[1]


def test_a_folder_with_a_record_is_known_by_any_name_and_prune_leaves_it_alone(
    cli: Cli, make_run: MakeRun
) -> None:
    root = make_run("run", 100, 200, 300)
    (root / "checkpoint-100").rename(root / "step_100")
    shutil.rmtree(root / ".lastcall", ignore_errors=True)
    assert [line.split()[0] for line in cli("ls", root).lines[1:]] == [
        "checkpoint-300",
        "checkpoint-200",
        "step_100",
    ]
    assert cli("verify", root).code == 0
    cli("prune", root, "--keep", "1", "--yes")
    assert (root / "step_100").is_dir()


def test_the_json_has_every_field_and_sizes_in_bytes(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 7, kind=Kind.JIT, reason="SIGTERM")
    said = cli("ls", root, "--json").json
    assert said["schema"] == 1
    (run,) = said["runs"]
    assert (run["directory"], run["run"], run["incarnations"]) == (str(root), None, None)
    (found,) = run["checkpoints"]
    assert set(found) == FIELDS
    record = records.read(root / "checkpoint-7")
    assert found["size"] == record.size == sum(file.size for file in record.files)
    assert (found["step"], found["kind"], found["reason"], found["exact"], found["valid"]) == (
        7,
        "jit",
        "SIGTERM",
        True,
        True,
    )
    assert (found["status"], found["problem"], found["path"]) == ("valid", None, str(root / "checkpoint-7"))
    assert (found["created"], found["metrics"]) == (record.created, {"loss": 0.07})


def test_the_run_says_who_it_is(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 7)
    (root / ".lastcall" / "run.json").write_text(json.dumps({"run": "abc", "incarnations": 3}))
    (run,) = cli("ls", root, "--json").json["runs"]
    assert (run["run"], run["incarnations"]) == ("abc", 3)
    (root / ".lastcall" / "run.json").write_text("[]")
    assert cli("ls", root, "--json").json["runs"][0]["run"] is None


def test_a_checkpoint_that_has_lost_a_file_or_some_bytes_is_damaged_and_said_how(
    cli: Cli, make_run: MakeRun
) -> None:
    root = make_run("run", 1, 2, 3)
    (root / "checkpoint-1" / "model.safetensors").unlink()
    os.truncate(root / "checkpoint-2" / "optimizer.safetensors", 10)
    (root / "checkpoint-3" / "state.json").unlink()
    (root / "checkpoint-3" / "state.json").symlink_to("/etc/hostname")
    said = cli("ls", root)
    assert said.code == 0
    for step in (1, 2, 3):
        assert "damaged" in row(said.out, f"checkpoint-{step}")
    assert "checkpoint-1: model.safetensors is missing" in said.lines
    assert any(line.startswith("checkpoint-2: optimizer.safetensors has 10 bytes, ") for line in said.lines)
    assert "checkpoint-3: state.json is not a plain file" in said.lines


def test_a_record_that_was_changed_is_damage_and_a_flipped_byte_in_a_file_is_for_verify(
    cli: Cli, make_run: MakeRun
) -> None:
    root = make_run("run", 1, 2)
    flip(root / "checkpoint-1" / records.NAME, 30)
    flip(root / "checkpoint-2" / "model.safetensors", -1)
    found = {item["name"]: item for item in cli("ls", root, "--json").json["runs"][0]["checkpoints"]}
    assert (found["checkpoint-1"]["status"], found["checkpoint-1"]["step"]) == ("damaged", None)
    assert records.NAME in found["checkpoint-1"]["problem"]
    assert found["checkpoint-2"]["valid"]


def test_what_is_no_checkpoint_is_shown_as_what_it_is(cli: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    root = make_run("run", 1, 2, 3)
    (root / "checkpoint-1").rename(root / "checkpoint-1.damaged-0")
    (root / "checkpoint-2" / records.SENTINEL).touch()
    (root / "checkpoint-9").mkdir()
    (root / "checkpoint-9" / "pytorch_model.bin").write_bytes(b"x" * 500)
    (root / ".lastcall" / "staging" / "checkpoint-4").mkdir(parents=True)
    (root / "checkpoint-5.damaged-0").mkdir()
    (root / "checkpoint-6").symlink_to(root / "checkpoint-3")
    (root / "checkpoint-7").touch()
    (root / "notes").mkdir()
    found = {item["name"]: item for item in cli("ls", root, "--json").json["runs"][0]["checkpoints"]}
    assert {name: item["status"] for name, item in found.items()} == {
        "checkpoint-3": "valid",
        "checkpoint-1.damaged-0": "set aside",
        "checkpoint-5.damaged-0": "set aside",
        "checkpoint-2": "incomplete",
        "checkpoint-4": "incomplete",
        "checkpoint-9": "foreign",
    }
    assert [name for name, item in found.items() if item["valid"]] == ["checkpoint-3"]
    assert next(iter(found)) == "checkpoint-3"  # what a run could resume from comes first
    assert (found["checkpoint-9"]["size"], found["checkpoint-1.damaged-0"]["step"]) == (500, 1)
    said = cli("ls", root).out
    assert "foreign" in row(said, "checkpoint-9") and "incomplete" in row(said, "checkpoint-4")


def test_a_run_that_lies_in_a_folder_called_staging_is_not_mistaken(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("staging", 1)
    assert "yes" in row(cli("ls", root).out, "checkpoint-1")


def test_a_partial_checkpoint_says_so(cli: Cli, tmp_path: Path) -> None:
    state = State(seed=1)
    with World(tmp_path / "run") as world:
        entry = world.save(state, 5)
    (entry.path / "optimizer.safetensors").unlink()
    missing = [file for file in entry.record.files if file.name != "optimizer.safetensors"]
    changed = records.Record(
        1,
        5,
        Kind.RESCUE,
        "SIGTERM",
        False,
        tuple(missing),
        "the time did not suffice",
        ("optimizer.safetensors",),
    )
    (entry.path / records.NAME).write_bytes(changed.to_json())
    said = cli("ls", tmp_path / "run")
    assert "partial" in row(said.out, "checkpoint-5")
    assert said.lines[-1] == "checkpoint-5 is not exact: the time did not suffice"
    (found,) = cli("ls", tmp_path / "run", "--json").json["runs"][0]["checkpoints"]
    assert (found["complete"], found["exact"], found["valid"]) == (False, False, True)


def test_a_directory_of_runs_is_listed_run_by_run(cli: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    make_run("runs/b", 2)
    make_run("runs/a", 1)
    (tmp_path / "runs" / "deep" / "c" / ".lastcall").mkdir(parents=True)
    (tmp_path / "runs" / ".hidden" / "d" / ".lastcall").mkdir(parents=True)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs" / "a")
    said = cli("ls", tmp_path / "runs")
    heads = [line for line in said.lines if line.endswith(":")]
    assert heads == [f"{tmp_path}/runs/{name}:" for name in ("a", "b", "deep/c")]
    assert said.lines[-1] == "no checkpoints yet"
    directories = [
        run["directory"]
        for run in cli("ls", tmp_path / "runs" / "b", tmp_path / "runs", "--json").json["runs"]
    ]
    # each once, in the order asked for
    assert directories == [f"{tmp_path}/runs/{name}" for name in ("b", "a", "deep/c")]


def test_a_checkpoint_is_not_a_run(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1)
    said = cli("ls", root / "checkpoint-1")
    assert said.code == 1
    assert f"Show it with: lastcall show {root / 'checkpoint-1'}" in said.err


def test_a_run_of_others_without_a_private_folder_is_listed_and_nothing_is_made_in_it(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "hf" / "checkpoint-500").mkdir(parents=True)
    assert "foreign" in cli("ls", tmp_path / "hf").out
    assert os.listdir(tmp_path / "hf") == ["checkpoint-500"]


def test_what_is_pruned_while_it_is_looked_at_was_never_there(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run("run", 1, 2)
    real = records.read

    def pruned(folder: Path) -> records.Record:
        if folder.name == "checkpoint-1":
            shutil.rmtree(folder, ignore_errors=True)
        return real(folder)

    monkeypatch.setattr(records, "read", pruned)
    assert [item.path.name for item in ls.survey(root)] == ["checkpoint-2"]
    assert ls.look(root / "checkpoint-1") is None


def test_a_reason_that_was_made_to_do_harm_does_none(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, reason="\x1b]0;owned\x07\nSIGTERM")
    assert "\x1b" not in cli("ls", root).out
    assert "\\x1b]0;owned\\x07\\nSIGTERM" in cli("ls", root).out
