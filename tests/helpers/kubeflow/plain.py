"""The training function of `functions` where nobody has heard of lastcall or Kubeflow: what its jobs
must come to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.processes.forkserver import environment
from helpers.servers.ports import free_port

TWO_NODES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "LASTCALL_KILL_WAIT_SECONDS": "0",
}

_SCRIPT = """
import torch.distributed
from helpers.kubeflow.functions import train

train(epochs={epochs})
if torch.distributed.is_initialized():  # else a rank may die of the other's end
    torch.distributed.destroy_process_group()
"""


def weights(folder: Path, epochs: int, ranks: int = 1) -> bytes:
    """The model that it saves at its end."""
    folder.mkdir()
    (folder / "script.py").write_text(_SCRIPT.format(epochs=epochs))
    launcher = (
        ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
        if ranks > 1
        else []
    )
    environ = {**environment(), **TWO_NODES, "LASTCALL_ENABLED": "0"}
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return (folder / "lost" / "final" / "model.safetensors").read_bytes()
