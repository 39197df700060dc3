from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World, flip
from lastcall.cli import doctor, main
from lastcall.core.checkpoint import record as records
from lastcall.doctor.checks import configuration, rundir
from lastcall.doctor.finding import Finding
from lastcall.launch.shell.commandline import Launch
from lastcall.types import Kind


@pytest.fixture
def root(tmp_path: Path) -> Path:
    state = State(seed=1)
    with World(tmp_path / "run") as world:
        for step in (10, 20):
            state.step(step)
            world.save(state, step, Kind.PERIODIC)
    return tmp_path / "run"


def look(root: Path, starting: bool = False) -> dict[str, Finding]:
    """What is not ok."""
    known = doctor._directory(root)
    assert known is not None
    findings = rundir.check(known, starting)
    assert findings
    return {item.name: item for item in findings if item.level != "ok"}


def tell(root: Path, *events: dict[str, object]) -> None:
    with (root / ".lastcall" / "events-0.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"at": time.time() - 100, **event}) + "\n")


def test_a_good_directory_is_fine(root: Path) -> None:
    assert look(root) == {}
    known = doctor._directory(root)
    assert known is not None and [record.step for record in known.records] == [20, 10]


def test_an_empty_directory_is_fine(tmp_path: Path) -> None:
    assert look(tmp_path) == {}
    assert doctor._directory(tmp_path / "later") is doctor._directory(None) is None


def test_a_flipped_bit_in_the_newest_is_a_risk_that_says_what_serves_instead(root: Path) -> None:
    flip(root / "checkpoint-20" / "optimizer.safetensors", -1)
    found = look(root)["checkpoints"]
    assert (
        found.level == "risk"
        and "checkpoint-20" in found.says
        and "would resume from checkpoint-10" in found.says
    )


def test_a_short_file_in_the_newest_is_a_risk(root: Path) -> None:
    path = root / "checkpoint-20" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert look(root)["checkpoints"].level == "risk"


def test_a_record_that_cannot_be_read_may_be_the_newest(root: Path) -> None:
    (root / "checkpoint-20" / records.NAME).write_text("{")
    assert look(root)["checkpoints"].level == "risk"


def test_where_all_are_damaged_the_run_begins_anew(root: Path) -> None:
    for step in (10, 20):
        (root / f"checkpoint-{step}" / "model.safetensors").unlink()
    found = look(root)["checkpoints"]
    assert (
        found.level == "risk"
        and "would start from scratch" in found.says
        and found.facts["damaged"] == ["checkpoint-20", "checkpoint-10"]
    )


def test_an_older_damaged_one_is_a_warning(root: Path) -> None:
    (root / "checkpoint-10" / "model.safetensors").unlink()
    assert look(root)["checkpoints"].level == "warning"


def test_a_checkpoint_too_large_to_be_read_in_passing_is_left_to_verify(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(root / "checkpoint-20" / "model.safetensors", -1)
    monkeypatch.setattr(rundir, "_READ_UP_TO", 1000)
    assert look(root) == {}


def test_an_incomplete_checkpoint_tells_of_a_kill(root: Path) -> None:
    (root / ".lastcall" / "staging" / "checkpoint-30").mkdir(parents=True)
    assert look(root)["incomplete"].level == "warning"


def test_a_directory_in_use_matters_to_who_starts_another_run(root: Path) -> None:
    known = rundir.Directory(root, active=True, pid=7)
    assert [(item.name, item.level) for item in rundir.check(known, starting=True)] == [("in-use", "warning")]
    assert {item.level for item in rundir.check(known, starting=False)} == {"ok"}


def test_a_paused_run_is_a_warning(root: Path) -> None:
    (root / ".lastcall" / "pause.json").write_text("{}")
    assert look(root)["paused"].remedy == f"lastcall resume {root}"


def test_a_notice_that_was_not_saved_is_a_risk_with_its_reason(root: Path) -> None:
    tell(
        root,
        {"kind": "start"},
        {"kind": "not-saved", "because": "No space left"},
        {"kind": "stop", "outcome": "not saved"},
    )
    found = look(root)["last-end"]
    assert found.level == "risk" and "No space left" in found.says
    tell(root, {"kind": "start"}, {"kind": "stop", "outcome": "finished"})
    assert look(root) == {}  # what came after it counts


def test_a_run_that_was_killed_without_a_word_is_a_warning_unless_the_guardian_saved_it(root: Path) -> None:
    tell(root, {"kind": "start"})
    assert look(root)["last-end"].level == "warning"
    with World(root) as world:
        world.save(State(seed=2), 30, Kind.GUARD)
    assert look(root) == {}


def test_a_checkpoint_from_the_future_tells_of_a_wrong_clock(root: Path) -> None:
    path = root / "checkpoint-20"
    changed = dataclasses.replace(records.read(path), created=time.time() + 3600)
    (path / records.NAME).write_bytes(changed.to_json())
    assert look(root)["clock"].level == "warning"


def test_without_periodic_saves_and_guardian_a_kill_costs_everything(root: Path) -> None:
    known = doctor._directory(root)

    def level(environ: dict[str, str], known: rundir.Directory | None = None, guard: bool = False) -> str:
        config, _ = configuration.check(environ, Launch())
        return rundir.check_unannounced(config, known, guard).level

    assert level({}) == "warning"
    assert (
        level({"LASTCALL_SAVE_STEPS": "10"})
        == level({}, guard=True)
        == level({"LASTCALL_SAVE_STEPS": "10"}, guard=True)
        == "ok"
    )
    assert level({}, known) == "ok"  # the program has periodic checkpoints, whatever the environment says


def test_a_program_that_says_that_it_saves_periodically_is_believed_before_its_first_such_save(
    tmp_path: Path,
) -> None:
    config, _ = configuration.check({}, Launch())
    (tmp_path / ".lastcall").mkdir()
    for periodic, level in ((True, "ok"), (False, "warning")):
        tell(tmp_path, {"kind": "start", "periodic": periodic})
        assert rundir.check_unannounced(config, doctor._directory(tmp_path), guard=False).level == level


# ---- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1000", 1000), ("20GB", 20 * 10**9), ("1.5 g", 15 * 10**8), ("2TiB", 2 * 10**12), ("3kb", 3000)],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert doctor._bytes(text) == nbytes


@pytest.mark.parametrize(
    "option",
    [
        ("--size", "big"),
        ("--termination-grace", "0"),
        ("--termination-grace", "nan"),
        ("--termination-grace", "x"),
        ("a", "b"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["doctor", *option]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("lastcall doctor: ")
    assert "For example: " in said.err or "lastcall doctor --help" in said.err


def test_what_follows_two_dashes_is_the_command_and_never_the_directory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main.main(["doctor", "--json", "--", "bash", "-c", "python x.py || true", "--json"])
    body = json.loads(capsys.readouterr().out)
    assert set(body) == {"schema", "verdict", "findings", "settings", "versions"}
    assert body["verdict"] == "risk"
    assert any(item["name"] == "exit-code" and item["level"] == "risk" for item in body["findings"])
    assert any(
        item["name"] == "storage" and "no directory was given" in item["says"] for item in body["findings"]
    )
    assert set(body["findings"][0]) == {"name", "level", "says", "remedy", "facts"}


def test_settings_that_were_set_are_shown_with_where_they_came_from(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTCALL_GRACE_SECONDS", "77")
    main.main(["doctor", str(root), "--no-write-test"])
    printed = capsys.readouterr().out
    assert any(line.split() == ["grace", "77.0", "LASTCALL_GRACE_SECONDS"] for line in printed.splitlines())
    assert "save_total_limit" not in printed
    main.main(["doctor", str(root), "--no-write-test", "--settings"])
    assert any(
        line.split() == ["save_total_limit", "None", "default"]
        for line in capsys.readouterr().out.splitlines()
    )
