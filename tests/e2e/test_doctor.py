"""`lastcall doctor` finds each of the planted faults, and nothing else; on a healthy set-up it is quiet.

Every fault is planted for real into one healthy set-up: a run directory on a disk, seen by a doctor that is
PID 1 of a namespace of its own (so that the shells which started the tests are not found, too).
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.core.bare_core import State, World, flip
from helpers.processes import containers
from helpers.processes import forkserver as nursery
from lastcall.core.checkpoint import record as records
from lastcall.doctor.checks import storage
from lastcall.types import Kind

RUN = ("lastcall", "run", "--", "python", "train.py")


@dataclass
class Setup:
    """A healthy set-up; a fault changes something in it."""

    folder: Path
    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"LASTCALL_SAVE_STEPS": "500"})
    options: list[str] = field(default_factory=lambda: ["--no-write-test", "--termination-grace", "600"])
    command: tuple[str, ...] = RUN
    before: str = ""  # shell commands, inside the namespace; the doctor then takes the shell's place
    python: tuple[str, ...] = (sys.executable,)
    entry: str = 'exec "$@"'

    def script(self, text: str) -> str:
        path = self.folder / "entry.sh"
        path.write_text(text)
        return str(path)

    def doctor(self, *options: str) -> subprocess.CompletedProcess[str]:
        words = [*self.python, "-m", "lastcall", "doctor", str(self.root), *self.options, *options]
        if self.command:
            words += ["--", *self.command]
        program = f"{self.before}\n{self.entry}\n"
        (self.folder / "start.sh").write_text(program)
        alone = [*containers.ALONE, "bash", str(self.folder / "start.sh"), *words]
        environ = {
            name: value
            for name, value in nursery.environment().items()
            if not name.startswith(("SLURM_", "KUBERNETES_", "RUNAI_"))
        }
        return subprocess.run(
            alone, cwd=self.folder, env={**environ, **self.env}, capture_output=True, text=True, timeout=90
        )

    def found(self) -> dict[str, dict[str, Any]]:
        """What is not ok, by name; and the exit code agrees with it."""
        done = self.doctor("--json")
        assert done.stderr == "", done.stderr
        body = json.loads(done.stdout)
        levels = [item["level"] for item in body["findings"]]
        assert body["verdict"] == ("risk" if "risk" in levels else "ok")
        assert done.returncode == (1 if "risk" in levels else 0)
        assert all(item["remedy"] for item in body["findings"] if item["level"] != "ok")
        return {item["name"]: item for item in body["findings"] if item["level"] != "ok"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk that outlives a restart, which the usual place for temporary files does not."""
    made = Path(tempfile.mkdtemp(prefix="lastcall-doctor-", dir="/var/tmp"))
    try:
        mount = storage.mount_of(made)
        if mount is None or storage.check_place(made, mount).level != "ok":
            pytest.skip(f"/var/tmp is on {mount}, which the doctor rightly calls a risk")
        containers.need()
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def healthy(folder: Path) -> Setup:
    root = folder / "run"
    make_run(root)
    (folder / "train.py").write_text("import lastcall\n")
    return Setup(folder, root)


def make_run(root: Path, seconds: float | None = None) -> None:
    """Two committed checkpoints and the events of a run that saved; `seconds`: how long the saves took."""
    state = State(seed=1)
    with World(root) as world:
        for step in (10, 20):
            state.step(step)
            entry = world.save(state, step, Kind.JIT)
            if seconds is not None:
                changed = dataclasses.replace(entry.record, seconds=seconds)
                (entry.path / records.NAME).write_bytes(changed.to_json())
    tell(root, {"kind": "start", "incarnation": 1}, {"kind": "stop", "outcome": "saved", "step": 20})


def tell(root: Path, *events: dict[str, object]) -> None:
    with (root / ".lastcall" / "events-0.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"at": time.time() - 100, **event}) + "\n")


# ---- the planted faults, each with the names of the findings that it must lead to, and no others
# ------------------------------------


def script_without_exec(setup: Setup) -> None:
    setup.command = ("bash", setup.script("set -e\nexport A=1\npython train.py\n"))


def shell_as_pid_1(setup: Setup) -> None:
    setup.command = ()
    # the doctor, then what stands for the training
    setup.entry = '"$@"\ncode=$?\npython --version >/dev/null\nexit $code'


def sigterm_ignored_by_the_parent(setup: Setup) -> None:
    setup.command = ("python", "train.py")
    setup.before = "trap '' TERM"


def sigterm_blocked_by_the_parent(setup: Setup) -> None:
    setup.command = ("python", "train.py")
    block = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    setup.entry = f'exec {sys.executable} -c "{block}" "$@"'


def grace_shorter_than_a_save(setup: Setup) -> None:
    shutil.rmtree(setup.root)
    make_run(setup.root, seconds=20.0)
    setup.env["LASTCALL_GRACE_SECONDS"] = "12"


def more_grace_than_the_platform_gives(setup: Setup) -> None:
    setup.env["LASTCALL_GRACE_SECONDS"] = "120"
    setup.options[-1] = "45"


def directory_in_memory(setup: Setup) -> None:
    setup.root = Path("/dev/shm") / setup.folder.name / "run"


def read_only_directory(setup: Setup) -> None:
    root = shlex.quote(str(setup.root))
    setup.before = f"mount --bind {root} {root} && mount -o remount,bind,ro {root} || exit 99"


def too_little_space(setup: Setup) -> None:
    image, root = setup.folder / "image", setup.folder / "small"
    with image.open("wb") as file:
        file.truncate(32 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    root.mkdir()
    setup.before = f"mount -o loop {shlex.quote(str(image))} {shlex.quote(str(root))} || exit 99"
    setup.root = root / "run"
    setup.options += ["--size", "100MB"]


def misspelt_variable(setup: Setup) -> None:
    setup.env["LASTCALL_GRACE_SECOND"] = "120"


def invalid_value(setup: Setup) -> None:
    setup.env["LASTCALL_KILL_WAIT_SECONDS"] = "soon"


def switched_off(setup: Setup) -> None:
    setup.env["LASTCALL_ENABLED"] = "0"


def torchrun_kills_before_the_save_ends(setup: Setup) -> None:
    shutil.rmtree(setup.root)
    make_run(setup.root, seconds=40.0)
    setup.env["LASTCALL_GRACE_SECONDS"] = "120"
    setup.command = ("torchrun", "--nproc-per-node", "2", "train.py")


def damaged_newest_checkpoint(setup: Setup) -> None:
    flip(setup.root / "checkpoint-20" / "model.safetensors", -1)


def shared_memory_of_a_docker_container(setup: Setup) -> None:
    setup.before = "mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 99"
    setup.command = ("lastcall", "run", "--guard", "--", "python", "train.py")
    setup.options += ["--size", "100MB"]


def exit_codes_swallowed(setup: Setup) -> None:
    setup.command = ("bash", setup.script("lastcall run -- python train.py || true\n"))


def exit_codes_lost_in_a_pipe(setup: Setup) -> None:
    setup.command = ("bash", setup.script("exec lastcall run -- python train.py 2>&1 | tee log\n"))


def last_notice_not_saved(setup: Setup) -> None:
    tell(
        setup.root,
        {"kind": "start", "incarnation": 2},
        {"kind": "not-saved", "save": "jit", "because": "No space left on device"},
        {"kind": "stop", "outcome": "not saved", "step": 30},
    )


def exit_code_that_htcondor_does_not_know(setup: Setup) -> None:
    setup.env["_CONDOR_JOB_AD"] = "/var/lib/condor/job.ad"
    setup.command = ("python", "train.py")


FAULTS: dict[Callable[[Setup], None], set[str]] = {
    script_without_exec: {"script"},
    shell_as_pid_1: {"pid-1"},
    sigterm_ignored_by_the_parent: {"signals"},
    sigterm_blocked_by_the_parent: {"signals"},
    grace_shorter_than_a_save: {"grace"},
    more_grace_than_the_platform_gives: {"platform-grace"},
    directory_in_memory: {"storage"},
    read_only_directory: {"writable"},
    too_little_space: {"space"},
    misspelt_variable: {"variables"},
    invalid_value: {"settings"},
    switched_off: {"enabled"},
    torchrun_kills_before_the_save_ends: {"torchrun"},
    damaged_newest_checkpoint: {"checkpoints"},
    shared_memory_of_a_docker_container: {"shared-memory"},
    exit_codes_swallowed: {"script", "exit-code"},
    exit_codes_lost_in_a_pipe: {"exit-code"},
    last_notice_not_saved: {"last-end"},
    exit_code_that_htcondor_does_not_know: {"platform"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_nothing_else(healthy: Setup, fault: Callable[[Setup], None]) -> None:
    fault(healthy)
    found = healthy.found()
    assert set(found) == FAULTS[fault], found
    assert {item["level"] for item in found.values()} == {"risk"}


def test_a_healthy_set_up_is_quiet(healthy: Setup) -> None:
    healthy.options.remove("--no-write-test")
    done = healthy.doctor()
    *lines, last = done.stdout.splitlines()
    assert (done.returncode, done.stderr, last) == (
        0,
        "",
        "No risks found: a preemption here would lose no work.",
    ), done.stdout
    findings = lines[: lines.index("")]
    assert findings and all(line.startswith("ok ") for line in findings), done.stdout
    assert any("write-test" in line and "MB/s" in line for line in findings)
    assert sorted(path.name for path in healthy.root.iterdir()) == [
        ".lastcall",
        "checkpoint-10",
        "checkpoint-20",
    ]


def test_a_directory_that_is_not_there_yet_is_looked_at_and_not_made(healthy: Setup) -> None:
    healthy.root = healthy.folder / "later" / "run"
    healthy.options.remove("--no-write-test")
    assert healthy.found() == {}
    assert not (healthy.folder / "later").exists()


def test_the_remedies_are_printed_below_their_findings(healthy: Setup) -> None:
    script_without_exec(healthy)
    done = healthy.doctor()
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    place = next(index for index, line in enumerate(lines) if line.startswith("risk "))
    assert (
        "without exec" in lines[place]
        and "-> write in line 3 of" in lines[place + 1]
        and "exec python train.py" in lines[place + 1]
    )
    assert lines[-1] == "1 risk, 0 warnings: work would be lost here. See the remedies above."


def test_the_remedy_of_a_script_cures_it(healthy: Setup) -> None:
    script_without_exec(healthy)
    healthy.command = ("lastcall", "run", "--", *healthy.command)
    assert healthy.found() == {}
    healthy.command = ("bash", healthy.script("set -e\nexport A=1\nexec python train.py\n"))
    assert healthy.found() == {}


def test_lastcall_run_around_torchrun_cures_it(healthy: Setup) -> None:
    torchrun_kills_before_the_save_ends(healthy)
    healthy.command = ("lastcall", "run", "--", *healthy.command)
    assert healthy.found() == {}


def test_a_missing_xxhash_is_a_warning(healthy: Setup) -> None:
    """-S: nothing of site-packages is there. The checkpoints, whose digests need it, are left out of it."""
    healthy.root = healthy.folder / "other"
    healthy.python = (sys.executable, "-S")
    found = healthy.found()
    assert {name: item["level"] for name, item in found.items()} == {"versions": "warning"}
    assert found["versions"]["remedy"] == "pip install xxhash"


def test_it_works_where_a_run_is_at_work_and_writes_no_test_file_there(healthy: Setup) -> None:
    with World(healthy.root):
        healthy.options.remove("--no-write-test")
        found = healthy.found()
        assert {name: item["level"] for name, item in found.items()} == {"in-use": "warning"}
        healthy.command = ()
        assert healthy.found() == {}
