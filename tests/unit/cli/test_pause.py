from __future__ import annotations

import getpass
import json
import os
import threading
from pathlib import Path

import pytest

from helpers.cli.harness import Cli, MakeRun
from helpers.processes.forkserver import Nursery, until
from helpers.processes.scripts import Script
from lastcall import testing
from lastcall.cli import pause, watch

TRAIN = """
    import sys, time
    import torch
    import lastcall

    model = torch.nn.Linear(4, 1)
    config = lastcall.JITCheckpointConfig(kill_wait=0.0)
    with lastcall.protect(sys.argv[1], model=model, config=config) as run:
        print("began at", run.step, flush=True)
        for step in run.steps(int(sys.argv[2])):
            time.sleep(0.005)
            run.report(loss=1.0 / (step + 1))
            if step == 20:
                print("twenty", flush=True)
"""

# Says what a session says, and leaves as it is told once the pause is there.
ACTOR = """
    import sys, time
    from pathlib import Path
    from lastcall import clock, events
    from lastcall.core.checkpoint.catalog import Catalog
    from lastcall.storage import files

    root = Path({root!r})
    catalog = Catalog(root, files.Files())
    catalog.open(clock.Clock())
    log = events.EventLog(root / ".lastcall" / "events-0.jsonl", clock.Clock())
    log.emit("start", incarnation=1, resumed="checkpoint-1", seconds=0.0)
    log.flush()
    print("began")
    while not (root / ".lastcall" / "pause.json").exists():
        time.sleep(0.01)
    {then}
    log.close()
    catalog.close()
    print("left")
    time.sleep(600)
"""


@pytest.fixture
def root(make_run: MakeRun) -> Path:
    return make_run("run", 1)


def test_a_pause_is_a_file_that_says_when_and_by_whom_and_resume_takes_it_away(cli: Cli, root: Path) -> None:
    said = cli("pause", root)
    assert said.code == 0
    assert said.out.startswith(f"{root} is paused. No run is active in it; one that starts will wait.")
    body = json.loads((root / ".lastcall" / watch.PAUSE).read_text())
    assert (set(body), body["by"]) == ({"at", "by"}, getpass.getuser())
    said = cli("resume", root)
    assert (said.code, said.out.startswith(f"{root} is resumed")) == (0, True)
    assert sorted(os.listdir(root / ".lastcall")) == ["lock", "staging"]


def test_to_pause_or_resume_twice_is_fine_and_the_first_request_stays(cli: Cli, root: Path) -> None:
    cli("pause", root)
    first = (root / ".lastcall" / watch.PAUSE).read_bytes()
    said = cli("pause", root, "--json")
    assert (said.code, said.json["new"], said.json["paused"]) == (0, False, True)
    assert "is paused already" in cli("pause", root, "--wait").out
    assert (root / ".lastcall" / watch.PAUSE).read_bytes() == first
    assert cli("resume", root, "--json").json == {
        "schema": 1,
        "directory": str(root),
        "paused": False,
        "was_paused": True,
    }
    assert cli("resume", root, "--json").json["was_paused"] is False
    assert cli("resume", root).out == f"{root} was not paused\n"


def test_a_directory_that_no_run_has_used_cannot_be_paused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "hf" / "checkpoint-500").mkdir(parents=True)
    for command in ("pause", "resume"):
        said = cli(command, tmp_path / "hf")
        assert (said.code, said.err) == (
            1,
            f"lastcall: {tmp_path / 'hf'} is not the directory of a lastcall run: it has no .lastcall "
            "folder. Give the directory that was passed to protect().\n",
        )
    assert os.listdir(tmp_path / "hf") == ["checkpoint-500"]


def test_a_file_system_without_links_will_do(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert cli("pause", root, "--json").json["new"] is True
    assert cli("pause", root, "--json").json["new"] is False
    assert json.loads((root / ".lastcall" / watch.PAUSE).read_text())["by"]


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert pause._user() == str(os.getuid())


@pytest.mark.parametrize(
    ("then", "code", "words", "checkpoint"),
    [
        ('log.emit("committed", save="jit", step=9, path="checkpoint-9"); log.emit("stop", outcome="saved", '
         'step=9)',
         0, "has saved checkpoint-9 and exited", "checkpoint-9"),
        ('log.emit("stop", outcome="saved", step=1)', 0, "has saved checkpoint-1 and exited", "checkpoint-1"),
        ('log.emit("stop", outcome="finished", step=1)', 0, "finished before it could be paused", "checkpoint-1"),  # noqa: E501
        ('log.emit("not-saved", save="jit", because="the disk is full"); log.emit("stop", outcome="not '
         'saved", step=9)',
         1, "exited WITHOUT saving: not saved (the disk is full)", None),
        ("import os; os.kill(os.getpid(), 9)", 1, "exited WITHOUT saving: killed", None),
    ],
)  # fmt: skip
def test_waiting_says_how_the_run_has_left(
    then: str, code: int, words: str, checkpoint: str | None, cli: Cli, root: Path, tmp_path: Path
) -> None:
    with Script(tmp_path, ACTOR.format(root=str(root), then=then)) as script:
        script.expect("began")
        said = cli("pause", root, "--wait")
        assert (said.code, words in said.out) == (code, True), said.out
    assert cli("watch", root, "--once", "--json").json["state"] == "paused"
    cli("resume", root)
    (tmp_path / "again").mkdir()
    with Script(tmp_path / "again", ACTOR.format(root=str(root), then=then)) as script:
        script.expect("began")
        said = cli("pause", root, "--wait", "--json")
    assert (said.code, said.json["was_running"], said.json["left"], said.json["checkpoint"]) == (
        code,
        True,
        True,
        checkpoint or None,
    )


def test_waiting_can_be_limited_and_the_pause_stays(cli: Cli, root: Path, tmp_path: Path) -> None:
    with Script(tmp_path, ACTOR.format(root=str(root), then="time.sleep(600)")) as script:
        script.expect("began")
        said = cli("pause", root, "--wait", "--timeout", "0.2")
        assert (said.code, "is still active. The pause stays" in said.out) == (1, True)
        assert cli("pause", root).out.startswith(
            f"The run in {root} has already been asked to save and stop."
        )
        assert cli("pause", root, "--json").json["left"] is False
    assert (root / ".lastcall" / watch.PAUSE).exists()


def test_a_pause_that_is_taken_back_ends_the_waiting(cli: Cli, root: Path, tmp_path: Path) -> None:
    with Script(tmp_path, ACTOR.format(root=str(root), then='print("seen"); time.sleep(600)')) as script:
        script.expect("began")

        def take_back() -> None:
            script.expect("seen")
            (root / ".lastcall" / watch.PAUSE).unlink()

        other = threading.Thread(target=take_back)
        other.start()
        said = cli("pause", root, "--wait")
        other.join()
    assert said.code == 1
    assert "was withdrawn before the run exited" in said.err


def test_a_real_run_saves_leaves_waits_and_goes_on(cli: Cli, nursery: Nursery, tmp_path: Path) -> None:
    script, directory = nursery.write(tmp_path, TRAIN), tmp_path / "run"
    first = nursery.start(tmp_path, script, directory, 100_000)
    first.expect("twenty")
    said = cli("pause", directory, "--wait", "--json")
    assert (said.code, said.json["outcome"], said.json["was_running"]) == (0, "saved", True), (
        said.out + first.log()
    )
    assert first.wait() == 75
    saved = testing.assert_resumable(directory, exact=True)
    assert saved.path.name == said.json["checkpoint"]
    assert cli("verify", directory, "--newest").code == 0

    second = nursery.start(tmp_path, script, directory, saved.record.step + 30)
    second.expect_log("This run is paused")
    assert cli("watch", directory, "--once", "--json").json["state"] == "paused"
    assert not [line for line in second.lines() if line.startswith("began")]
    cli("resume", directory)
    assert second.expect("began at") == f"began at {saved.record.step}"
    assert second.wait() == 0
    until(
        lambda: cli("watch", directory, "--once", "--json").json["outcome"] == "finished",
        "the end of the run in the events",
    )
