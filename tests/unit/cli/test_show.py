from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from helpers.cli.harness import Cli, MakeRun
from helpers.core.bare_core import SIZES
from lastcall.core.checkpoint import record as records
from lastcall.types import Kind


def pairs(out: str) -> dict[str, str]:
    return {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in out.splitlines()
        if line.startswith("  ") and len(line.split()) > 1
    }


def test_the_newest_is_shown_with_all_that_its_record_says(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2, kind=Kind.JIT, reason="SIGTERM")
    said = cli("show", root)
    assert said.code == 0
    assert said.lines[0] == str(root / "checkpoint-2")
    facts = pairs(said.out)
    assert facts["status"] == "valid"
    assert (facts["step"], facts["kind"], facts["reason"], facts["exact"]) == ("2", "jit", "SIGTERM", "yes")
    assert (facts["metrics"], facts["incarnation"], facts["world"]) == ("loss 0.02", "1", "1 process")
    assert "are shared with the previous checkpoint" in facts["size"]  # the frozen file was taken over
    assert facts["resumes"] == "a run that starts now would resume from this one, at step 2"


def test_every_field_of_the_record_is_in_the_json(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1)
    said = cli("show", root, "--json").json
    assert {field.name for field in dataclasses.fields(records.Record)} <= set(said)
    record = records.read(root / "checkpoint-1")
    for name in (
        "sequence",
        "step",
        "reason",
        "exact",
        "because",
        "run",
        "incarnation",
        "world",
        "created",
        "seconds",
        "written",
        "save",
    ):
        assert said[name] == getattr(record, name), name
    assert (said["kind"], said["algorithm"], said["missing"], said["metrics"]) == (
        "periodic",
        record.algorithm,
        [],
        {"loss": 0.01},
    )
    files = {file.name: file for file in record.files}
    assert {file["name"]: (file["size"], file["digest"], file["chunks"]) for file in said["files"]} == {
        name: (file.size, file.digest, len(file.chunks)) for name, file in files.items()
    }


def test_tensors_are_counted_by_type_from_the_headers(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1)
    said = cli("show", root, "--json").json
    count, nbytes = sum(map(len, SIZES.values())), sum(sum(names.values()) for names in SIZES.values())
    assert said["tensors"] == {
        "count": count,
        "bytes": nbytes,
        "dtypes": {"U8": {"count": count, "bytes": nbytes}},
    }
    assert {file["name"]: file["tensors"] for file in said["files"]} == {
        "state.json": None,
        "model.safetensors": 3,
        "base.safetensors": 1,
        "optimizer.safetensors": 2,
    }


def test_a_checkpoint_is_chosen_by_its_path_also_from_inside_the_run(
    cli: Cli, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run("run", 1, 2)
    said = cli("show", root / "checkpoint-1")
    assert pairs(said.out)["step"] == "1"
    assert pairs(said.out)["resumes"] == "a run that starts now would resume from checkpoint-2, at step 2"
    monkeypatch.chdir(root)
    assert pairs(cli("show", "checkpoint-1").out)["resumes"].endswith("from checkpoint-2, at step 2")
    monkeypatch.chdir(root / "checkpoint-1")
    assert pairs(cli("show", ".").out)["step"] == "1"
    assert cli("show", ".", "--json").json["resume"] == {
        "name": "checkpoint-2",
        "step": 2,
        "exact": True,
        "this": False,
    }


def test_a_damaged_one_is_shown_as_far_as_it_can_be_read(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1, 2)
    os.truncate(root / "checkpoint-2" / "model.safetensors", 4)
    said = cli("show", root)
    assert pairs(said.out)["status"].startswith("damaged: model.safetensors has 4 bytes")
    assert "the file is truncated after 4 bytes" in said.out
    assert pairs(said.out)["resumes"] == "a run that starts now would resume from checkpoint-1, at step 1"
    (root / "checkpoint-2" / records.NAME).write_bytes(b"{}")
    said = cli("show", root / "checkpoint-2")
    assert (said.code, "damaged: lastcall.json" in said.out) == (0, True)
    assert cli("show", root / "checkpoint-2", "--json").json["files"] == []


def test_nothing_to_show_is_said_clearly(cli: Cli, make_run: MakeRun, tmp_path: Path) -> None:
    root = make_run("runs/a", 1)
    make_run("runs/b", 1)
    assert "holds 2 runs. Name one of them" in cli("show", tmp_path / "runs").err
    missing = cli("show", root / "checkpoint-7")
    assert (missing.code, missing.err) == (
        1,
        f"lastcall: {root / 'checkpoint-7'} does not exist. List what exists with: lastcall ls {root}\n",
    )
    (tmp_path / "new" / ".lastcall").mkdir(parents=True)
    assert "holds no committed checkpoint" in cli("show", tmp_path / "new").err


def test_without_a_valid_one_a_run_would_begin_from_the_beginning(cli: Cli, make_run: MakeRun) -> None:
    root = make_run("run", 1)
    (root / "checkpoint-1" / "model.safetensors").unlink()
    assert "would start from scratch" in cli("show", root).out
    assert cli("show", root, "--json").json["resume"] is None
