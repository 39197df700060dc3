"""What lies in the folder after a notice, and what becomes of it."""

from __future__ import annotations

import signal
from pathlib import Path

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Nursery, until

SCRIPTS = Path(__file__).parent / "scripts"


def digests(path: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in path.read_text().splitlines())


def test_accelerate_loads_a_finished_run_without_lastcall(accelerated: Nursery, tmp_path: Path) -> None:
    done = accelerated.run(tmp_path, SCRIPTS / "loop.py", tmp_path / "run", tmp_path / "result", EPOCHS="1")
    assert done.code == 0, done.log()
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    opened = accelerated.run(tmp_path, SCRIPTS / "official.py", checkpoint, tmp_path / "opened")
    assert opened.code == 0, opened.log()
    wanted = digests(tmp_path / "result")
    del wanted["counters"]  # given to protect(), which Accelerate does not know
    assert digests(tmp_path / "opened") == wanted


def test_a_pass_that_takes_too_long_is_rescued_and_leaves_no_trace(
    accelerated: Nursery, tmp_path: Path
) -> None:
    script = SCRIPTS / "loop.py"
    assert (
        accelerated.run(
            tmp_path, script, tmp_path / "unused", tmp_path / "reference", LASTCALL_ENABLED="0"
        ).code
        == 0
    )
    quick = {"LASTCALL_KILL_WAIT_SECONDS": "0", "LASTCALL_GRACE_SECONDS": "2"}
    child = accelerated.start(tmp_path, script, tmp_path / "run", tmp_path / "result", **quick, STUCK="9")
    until(lambda: "stuck" in child.lines(), "the long pass")
    child.send(signal.SIGTERM)
    assert child.wait() == chain.SAVED, child.log()
    (record,) = chain.records(tmp_path / "run")
    assert (record["kind"], record["exact"]) == ("rescue", True), record
    last = accelerated.run(tmp_path, script, tmp_path / "run", tmp_path / "result", **quick)
    assert last.code == 0, last.log()
    assert (tmp_path / "result").read_text() == (tmp_path / "reference").read_text(), last.log()


def test_a_damaged_file_of_accelerates_is_not_loaded(accelerated: Nursery, tmp_path: Path) -> None:
    script, quick = SCRIPTS / "loop.py", {"LASTCALL_KILL_WAIT_SECONDS": "0"}
    child = accelerated.start(tmp_path, script, tmp_path / "run", tmp_path / "result", **quick)
    chain.strike(child, chain.Blow(6, 0.0))
    assert child.wait() == chain.SAVED, child.log()
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    file = checkpoint / "optimizer.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    last = accelerated.run(tmp_path, script, tmp_path / "run", tmp_path / "result", **quick)
    assert last.code == 0, last.log()
    assert "optimizer.bin" in last.log() and "Starting from the beginning" in last.log()
