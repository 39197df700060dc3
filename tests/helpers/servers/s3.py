"""A real S3 server on this machine: rclone's, with buckets as folders of a folder of the test's."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.processes.forkserver import until
from helpers.servers import ports

KEY, SECRET = "lastcall", "last-call-secret"
RCLONE = Path(sys.executable).with_name("rclone")


@dataclass(frozen=True)
class Server:
    folder: Path
    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """As OpenShift AI's data connections name it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_S3_ENDPOINT": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def bucket(self, name: str) -> Path:
        """Make it; its objects are files in this folder."""
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name


@contextlib.contextmanager
def served(folder: Path, port: int | None = None, host: str = "127.0.0.1") -> Iterator[Server]:
    port = port or ports.free_port()
    folder.mkdir(parents=True, exist_ok=True)
    rclone = RCLONE if RCLONE.exists() else Path(shutil.which("rclone") or "rclone")
    arguments = [
        "serve",
        "s3",
        "--auth-key",
        f"{KEY},{SECRET}",
        "--addr",
        f"{host}:{port}",
        "--vfs-cache-mode",
        "off",
        str(folder),
    ]
    environment = {**os.environ, "RCLONE_CONFIG": "/dev/null"}
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen([rclone, *arguments], stdout=log, stderr=log, env=environment)
    try:
        until(lambda: _answers(host, port), "the S3 server")
        yield Server(folder, f"http://{host}:{port}", process)
    finally:
        process.kill()
        process.wait()


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False
