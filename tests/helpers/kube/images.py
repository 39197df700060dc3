"""Images made by hand, for a machine that reaches no registry: archives that `ctr images import` takes.

pause      what holds a pod's network.
lastcall   Debian's Python and this repository's package with what its webhook needs: the init container's,
           and the webhook's own.
training   a virtual environment with torch and transformers and without lastcall. Nothing but folders and
           links: what is behind them
           is mounted from this machine (`MOUNTS`), since torch alone has more than a gigabyte.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
PAUSE, LASTCALL, TRAINING = (f"tests.lastcall.dev/{name}:1" for name in ("pause", "lastcall", "training"))
PYTHON = "/env/bin/python"  # of the training image
MOUNTS = {"usr": Path("/usr"), "packages": Path(sysconfig.get_path("purelib"))}  # read-only, at the same path
if not Path(sys.base_prefix).is_relative_to("/usr"):
    MOUNTS["base"] = Path(sys.base_prefix)
_PACKAGES = "usr/local/lib/python3.11/dist-packages"  # where Debian's Python looks for what is not Debian's


def write(folder: Path, image: Path) -> list[Path]:
    """The archives of all three, in `folder`. `image`: the files of kube_build."""
    folder.mkdir()
    return [
        _archive(
            folder,
            PAUSE,
            lambda layer: layer.add(image / "bin/busybox", "bin/busybox"),
            ["/bin/busybox", "sleep", "2147483647"],
        ),
        _archive(folder, LASTCALL, lambda layer: _fill_lastcall(layer, image), ["python3"]),
        _archive(folder, TRAINING, _fill_training, [PYTHON]),
    ]


def _fill_lastcall(layer: tarfile.TarFile, image: Path) -> None:
    for path in sorted(image.iterdir()):
        layer.add(path, path.name)
    _link(layer, "usr/bin/python3", "python3.11")
    _link(layer, "bin/sh", "busybox")
    _folder(layer, "tmp")
    layer.add(ROOT / "src" / "lastcall", f"{_PACKAGES}/lastcall", filter=_without_caches)
    for distribution in _needed(_wanted()):
        for path in distribution.files or []:
            if ".." not in path.parts and "__pycache__" not in path.parts:
                layer.add(str(path.locate()), f"{_PACKAGES}/{path}")


def _wanted() -> list[str]:
    """By the project's own file: what is installed may be told of an older one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["kube"]]


def _needed(lines: list[str]) -> list[importlib.metadata.Distribution]:
    """What has to be installed for these requirements, as it is installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    while lines:
        wanted = Requirement(lines.pop())
        if wanted.name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found[wanted.name] = importlib.metadata.distribution(wanted.name)
            lines += found[wanted.name].requires or []
    return list(found.values())


def _fill_training(layer: tarfile.TarFile) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        _link(layer, name, f"usr/{name}")
    for path in ("tmp", "data", "proc", "sys", "dev", *(str(path)[1:] for path in MOUNTS.values())):
        _folder(layer, path)
    _link(
        layer,
        PYTHON[1:],
        str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")),
    )
    _text(layer, "env/pyvenv.cfg", f"home = {sys.base_prefix}/bin\ninclude-system-site-packages = false\n")
    # A .pth names the folder: the .pth files in that folder, lastcall's among them, are then not read.
    _text(layer, "env/lib/python3.11/site-packages/packages.pth", f"{MOUNTS['packages']}\n")
    _text(layer, "etc/passwd", "root:x:0:0:root:/tmp:/bin/sh\n")


def _archive(folder: Path, name: str, fill: Callable[[tarfile.TarFile], None], entrypoint: list[str]) -> Path:
    path = folder / f"{re.sub('[^a-z]', '-', name)}.tar"
    layer = folder / "layer"
    with tarfile.open(layer, "w") as tar:
        fill(tar)
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    with tarfile.open(path, "w") as tar:
        tar.add(layer, "layer.tar")
        _text(tar, "config.json", json.dumps(config))
        _text(
            tar,
            "manifest.json",
            json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]),
        )
    layer.unlink()
    return path


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), 0o644
    tar.addfile(entry, io.BytesIO(text.encode()))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _folder(tar: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    tar.addfile(entry)


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry
