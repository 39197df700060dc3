"""`lastcall run -- accelerate launch`: the real ones, whose own exit code says nothing of a save."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from helpers.processes.forkserver import ROOT, Nursery, environment, until
from helpers.ranks.jobs import LASTCALL_RUN
from helpers.servers.ports import free_port

PLAIN = Path(__file__).parent / "scripts" / "plain.py"
FINETUNE = ROOT / "examples" / "finetune.py"
LAUNCH = [
    str(Path(sys.executable).with_name("accelerate")),
    "launch",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
]


def struck(folder: Path, options: list[str], script: list[str], moment: str, **env: str) -> str:
    """One life, told to stop when it has said so much. Returns what it said."""
    said = folder / "said"
    given = environment(LASTCALL_KILL_WAIT_SECONDS="0", GLOO_SOCKET_IFNAME="lo", **env)
    command = [*LASTCALL_RUN, *LAUNCH, "--dynamo_backend", "no", *options, *script]
    with said.open("w") as file:
        job = subprocess.Popen(command, env=given, stdout=file, stderr=file)
    try:
        until(lambda: f"\n{moment}" in said.read_text() or job.poll() is not None, moment, 120.0)
        job.send_signal(signal.SIGTERM)
        code = job.wait(60)
    finally:
        job.kill()
        job.wait()
    assert code == 75, said.read_text()
    return said.read_text()


def test_two_processes_that_save_by_themselves(accelerated: Nursery, tmp_path: Path) -> None:
    """--multi_gpu is how Accelerate starts more than one process on a machine; the script asks for the
    CPU."""
    options = ["--multi_gpu", "--num_processes", "2", "--main_process_port", str(free_port())]
    out = tmp_path / "out"
    said = struck(tmp_path, options, [str(PLAIN), str(out), str(tmp_path / "result")], "at 6", EPOCHS="60")
    (folder,) = out.iterdir()
    assert f"stopped and saved in out/{folder.name}" in said
    assert {"random_states_0.pkl", "random_states_1.pkl", "lastcall.json"} <= {
        path.name for path in folder.iterdir()
    }


def test_one_process_with_a_trainer(tmp_path: Path) -> None:
    options = ["--cpu", "--num_processes", "1"]
    out = tmp_path / "out"
    said = struck(tmp_path, options, [str(FINETUNE), "--output-dir", str(out)], "{'loss'", HF_HUB_OFFLINE="1")
    (folder,) = out.glob("checkpoint-*")
    assert f"stopped and saved in out/{folder.name}" in said
