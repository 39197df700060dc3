"""The SDK's local process backend without a network: it makes an empty virtual environment and installs what
it is told with pip, so it is told of two wheels on disk. One is lastcall itself. The other is called torch,
and is a line that leads to the packages of this environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

from kubeflow.trainer import LocalProcessBackendConfig, TrainerClient

from helpers.processes.forkserver import ROOT
from lastcall.kubeflow import TransformersTrainer

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "OMP_NUM_THREADS": "1", "LASTCALL_KILL_WAIT_SECONDS": "0"}


def wheels(folder: Path) -> tuple[str, str]:
    """What pip is to install: torch and lastcall."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "-w",
    ]
    subprocess.run([*build, str(folder), str(ROOT)], check=True, timeout=180)
    (ours,) = folder.glob("lastcall-*.whl")
    return f"torch @ {_torch(folder).as_uri()}", f"lastcall @ {ours.as_uri()}"


def _torch(folder: Path) -> Path:
    info = "torch-2.13.0.dist-info"
    files = {
        "torch_here.pth": sysconfig.get_path("purelib") + "\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ntorchrun = torch.distributed.run:main\n",
    }
    path = folder / "torch-2.13.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")))
    return path


class Jobs:
    """Jobs of one client, and the wheels that they need."""

    def __init__(self, torch: str, lastcall: str) -> None:
        self.client = TrainerClient(LocalProcessBackendConfig())
        self._torch, self._lastcall = torch, lastcall

    def submit(self, output_dir: Path | str, func: Any, func_args: dict[str, Any], **said: Any) -> str:
        env = {**OFFLINE, **said.pop("env", {})}
        trainer = TransformersTrainer(
            func=func,
            func_args=func_args,
            output_dir=str(output_dir),
            packages_to_install=[self._torch],
            package=self._lastcall,
            env=env,
            **{"enable_progress_tracking": False, **said},
        )
        name: str = self.client.train(runtime="torch-distributed", trainer=trainer)
        return name

    def wait(self, name: str, timeout: int = 150) -> str:
        status: str = self.client.wait_for_job_status(
            name, {"Complete", "Failed"}, timeout, polling_interval=1
        ).status
        return status

    def log(self, name: str) -> str:
        return "\n".join(self.client.get_job_logs(name))
