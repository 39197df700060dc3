"""What happens to the directory of a run, and what a run does about it: nothing that was saved, or could be,
is lost without a word."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery
from lastcall.core.checkpoint import record as records
from lastcall.core.engine import digest

NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}
TRAIN = """
    import os, shutil, signal, time
    from pathlib import Path
    import lastcall
    from lastcall import testing
    from helpers.models import training

    def told():
        os.kill(os.getpid(), signal.SIGTERM)
        while not run._driver.notified:
            time.sleep(0.001)

    def deny(code):
        opened = os.open
        def refuse(path, flags, *more, **options):
            if str(path).endswith("/lock") and flags & os.O_RDWR:
                raise OSError(code, os.strerror(code), str(path))
            return opened(path, flags, *more, **options)
        os.open = refuse

    exec(os.environ.get("BEFORE", ""))
    files = testing.FaultyFiles(*eval(os.environ.get("FAULTS", "()")))
    model, optimizer = training.parts()
    with lastcall.protect(os.environ.get("WHERE", training.DIRECTORY), files=files, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, "step", run.step, flush=True)
        for step in run.steps(int(os.environ.get("STEPS", "8"))):
            if step == 3:
                exec(os.environ.get("AT", ""))
            if step == 5 and "TOLD" in os.environ:
                told()
            training.step(model, optimizer)
    print("after the block", flush=True)
    training.finish(model=model, optimizer=optimizer)
"""  # noqa: E501


class Case:
    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self._script = nursery.write(folder, TRAIN)
        self.run = folder / "run"

    def __call__(self, **env: str) -> Child:
        child = self._nursery.start(
            self._folder, self._script, self.run, self._folder / "result", **{**NOW, **env}
        )
        child.wait()
        return child


@pytest.fixture
def case(nursery: Nursery, tmp_path: Path) -> Case:
    return Case(nursery, tmp_path)


def test_c1_a_relative_directory_stays_where_it_was_when_the_script_goes_elsewhere(
    case: Case, tmp_path: Path
) -> None:
    first = case(WHERE="run/deeper", AT="os.chdir('/')", TOLD="1")
    assert first.code == chain.SAVED, first.log()
    (step,) = [record["step"] for record in chain.records(tmp_path / "run" / "deeper")]
    last = case(WHERE="run/deeper", AT="os.chdir('/')")
    assert last.code == 0 and last.lines()[0] == f"resumed {step} step {step}"


@pytest.mark.parametrize(
    "gone",
    [
        "shutil.rmtree(run.directory / '.lastcall')",
        "shutil.rmtree(run.directory)",
        "os.rename(run.directory, 'elsewhere')",
    ],
    ids=["our part", "all of it", "renamed"],
)
def test_c7_a_directory_that_is_gone_is_made_again(case: Case, gone: str) -> None:
    first = case(AT=gone, TOLD="1")
    assert first.code == chain.SAVED, first.log()
    assert "it has been recreated" in first.log()
    (step,) = [record["step"] for record in chain.records(case.run) if record["kind"] == "jit"]
    last = case()
    assert last.code == 0 and last.lines()[0] == f"resumed {step} step {step}", last.log()


def test_f6_an_end_that_cannot_be_saved_is_an_error(case: Case) -> None:
    child = case(FAULTS=f"[testing.Fault('pwrite', 1, {errno.ENOSPC}, lasting=True)]")
    assert child.code == 1 and "after the block" not in child.lines()
    assert "ERROR lastcall: The final checkpoint was not saved" in child.log() and "SaveError" in child.log()
    assert "raining finished" not in child.log()
    assert chain.records(case.run) == []
    events = (case.run / ".lastcall" / "events-0.jsonl").read_text()
    assert '"outcome": "failed"' in events and '"finished"' not in events


def test_f6_after_a_notice_it_dies_of_the_notice(case: Case) -> None:
    child = case(STEPS="6", TOLD="1", FAULTS=f"[testing.Fault('pwrite', 1, {errno.ENOSPC}, lasting=True)]")
    assert child.code == -15, child.log()


def test_f11_checkpoints_that_cannot_be_resumed_from_are_named_loudly(case: Case) -> None:
    case()
    path = case.run / "checkpoint-8" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    shutil.copytree(case.run / "checkpoint-8", case.run / "checkpoint-30")
    (case.run / "checkpoint-30" / records.NAME).unlink()
    (case.run / "checkpoint-40").symlink_to(case.run / "checkpoint-8")
    child = case(STEPS="4")
    assert child.lines()[0] == "resumed None step 0"
    (line,) = [line for line in child.log().splitlines() if "Starting from the beginning" in line]
    assert " ERROR " in line and "holds no checkpoint" not in child.log()
    for words in (
        "checkpoint-8.damaged-0",
        "checkpoint-30 has no commit record",
        "checkpoint-40 is a symbolic link",
    ):
        assert words in line
    child = case(STEPS="6")  # it goes on from what it has saved, and the newer ones are named all the same
    assert child.lines()[0] == "resumed 4 step 4"
    assert (
        "checkpoint-30 has no commit record" in child.log()
        and "checkpoint-40 is a symbolic link" in child.log()
    )
    assert child.log().count("is not resumed from") == 2, child.log()


def test_f11_an_empty_directory_is_no_alarm(case: Case) -> None:
    child = case(STEPS="2")
    assert "INFO lastcall: Starting from the beginning" in child.log() and "ERROR" not in child.log()


def test_a10_a_record_of_another_step_than_its_state_is_not_resumed_from(case: Case) -> None:
    case(STEPS="4")
    case(STEPS="8")
    path = case.run / "checkpoint-8" / records.NAME
    body = json.loads(path.read_bytes())
    del body["digest"]
    body["step"] = 7
    path.write_text(json.dumps({**body, "digest": digest.of(json.dumps(body, sort_keys=True).encode())}))
    os.rename(case.run / "checkpoint-8", case.run / "checkpoint-7")
    child = case(STEPS="8")
    assert "its record says step 7, and its state says step 8" in child.log()
    assert child.lines()[0] == "resumed 4 step 4"


def test_h7_a_newer_format_stops_the_start(case: Case) -> None:
    case(STEPS="4")
    path = case.run / "checkpoint-4" / records.NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "format": 2, "version": "1.2.3"}))
    child = case()
    assert child.code == 78 and child.lines() == []  # nothing that another attempt would mend
    assert "pip install lastcall-1.2.3-py3-none-any.whl" in child.log().splitlines()[-1]
    assert (case.run / "checkpoint-4").is_dir()


GUARDED = """
    import os, signal, time
    from pathlib import Path
    import lastcall
    from lastcall.storage.files import Files
    from helpers.models import training

    class Killed(Files):
        # killed when the files of the periodic save are written, and before it is one
        def rename(self, old, new):
            if new.name == "checkpoint-6" and "run" in globals():
                while run._driver.session._guard._busy.locked():
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGKILL)
            super().rename(old, new)

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, guard=True, files=Killed(), model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(8):
            if step == 4:  # the guard has its area, and a first copy in it
                while run._driver.session._guard._area is None:
                    time.sleep(0.001)
            training.step(model, optimizer)
            if run.resumed is not None:
                break
"""  # noqa: E501


def test_h8_killed_during_a_periodic_save_the_guard_has_that_step(nursery: Nursery, tmp_path: Path) -> None:
    script = nursery.write(tmp_path, GUARDED)
    seldom = {"LASTCALL_SAVE_STEPS": "6", "LASTCALL_GUARD_SECONDS": "1000", "LASTCALL_SPARE": "0"}

    def life() -> Child:
        child = nursery.start(tmp_path, script, tmp_path / "run", tmp_path / "result", **NOW, **seldom)
        child.wait()
        return child

    first = life()
    assert first.code == -9, first.log()
    assert chain.records(tmp_path / "run") == []
    assert life().lines()[0] == "resumed 6"


def test_h9_an_unreachable_bucket_at_the_start_is_one_clear_error(case: Case) -> None:
    pytest.importorskip("boto3")
    nowhere = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_MAX_ATTEMPTS": "1",
    }
    child = case(LASTCALL_MIRROR="s3://bucket/exp1", **nowhere)
    lines = child.log().splitlines()
    assert child.code == 1 and "s3://bucket/exp1: " in lines[-1] and "127.0.0.1:9" in lines[-1]
    assert len([line for line in lines if "lastcall: Still waiting" not in line]) < 15, child.log()
    assert "botocore" not in "".join(lines[:-1])


def test_h9_a_newline_in_the_name_of_the_directory_does_not_split_a_line_of_the_log(
    case: Case, tmp_path: Path
) -> None:
    child = case(WHERE=str(tmp_path / "a\nb"), STEPS="2")
    assert child.code == 0 and all("lastcall: " in line for line in child.log().splitlines()), child.log()
    assert r"a\nb holds no checkpoint" in child.log()


@pytest.mark.parametrize("name", ["/".join(["x" * 200] * 19), "y" * 300], ids=["long", "wide"])
def test_h9_a_path_that_is_too_long_is_refused_at_the_start(case: Case, name: str) -> None:
    child = case(WHERE=name)
    assert child.code == 78 and child.lines() == [], child.log()
    assert "shorter path" in child.log() or "ENAMETOOLONG" in child.log()


def test_a_dangling_link_is_called_a_link(case: Case, tmp_path: Path) -> None:
    """Wrong words of section F: it was "a file where a directory belongs"."""
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    child = case(WHERE=str(tmp_path / "link"))
    assert (
        child.code == 78 and f"is a link to {tmp_path / 'not mounted'}, which does not exist" in child.log()
    )


def test_a_disk_that_became_read_only_is_one_clear_error(case: Case) -> None:
    """Rough edges of section F: it was a bare OSError."""
    assert case().code == 0
    child = case(BEFORE="import errno; deny(errno.EROFS)")
    assert child.code == 78 and "Traceback" not in child.log(), child.log()
    assert (
        "lock cannot be opened (Read-only file system (EROFS))" in child.log() and "remount,rw" in child.log()
    )


def test_a_small_checkpoint_has_a_size(case: Case) -> None:
    """Wrong words of section F: "0 MB"."""
    case()
    child = case(STEPS="9")
    assert re.search(r"digests hold; [0-9.]+ kB in", child.log()), child.log()
