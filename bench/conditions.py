"""Where and when the numbers were made: they mean nothing without it."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from bench import disk


def conditions(folder: Path) -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "kernel": f"{platform.system()} {platform.release()}",
        "cores": f"{len(os.sched_getaffinity(0))} ({_cpu_model()}), load {os.getloadavg()[0]:.1f}",
        "memory": f"{memory / disk.GB:.0f} GB",
        "disk": f"{disk.kind_of(folder)} at {folder}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, safetensors {_version('safetensors')}, lastcall "
        f"{_version('lastcall')}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
