"""Packages and sources of Debian 12 in a folder of ours:

nothing is installed, no service starts, and apt's own lists stay as they are.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SETTINGS = Path("/etc/apt")


class Missing(Exception):
    """Something that only Debian has, with what to do about it."""


class Debian:
    """apt with lists and a cache of its own below `folder`, which also knows the source packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._options = [
            "-o", "Dir::Etc::sourcelist=/dev/null", "-o", f"Dir::Etc::sourceparts={folder}/sources.list.d",
            "-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache",
            "-o", "APT::Sandbox::User=root",  # the user _apt may not look into somebody's home directory
        ]  # fmt: skip

    def update(self) -> None:
        for name in ("sources.list.d", "lists/partial", "cache/archives/partial"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        for path in (_SETTINGS / "sources.list", *sorted((_SETTINGS / "sources.list.d").glob("*"))):
            if path.suffix in (".list", ".sources") and path.exists():
                (self._folder / "sources.list.d" / path.name).write_text(_with_sources(path.read_text()))
        self._apt("apt-get", "update", "-q")

    def source(self, name: str, version: str, target: Path) -> Path:
        """The upstream archive of a source package, downloaded into `target`."""
        found = self._apt("apt-cache", "showsrc", name)
        if f"really{version}-" not in found:
            raise Missing(
                f"apt has no source of {name} {version}, which Debian 12 (bookworm) has. It runs "
                "on Debian 12 alone"
            )
        target.mkdir(parents=True, exist_ok=True)
        self._apt("apt-get", "source", "-q", "--download-only", name, where=target)
        (archive,) = target.glob(f"{name}_*{version}.orig.tar.*")
        return archive

    def unpack(self, target: Path, *names: str) -> None:
        """The files of these packages below `target`, as if it were the root of a file system."""
        parcels = self._folder / "parcels"
        parcels.mkdir(exist_ok=True)
        target.mkdir(parents=True, exist_ok=True)
        self._apt("apt-get", "download", "-q", *names, where=parcels)
        for name in names:
            (parcel,) = parcels.glob(f"{name}_*.deb")
            run(["dpkg-deb", "-x", str(parcel), str(target)])

    def _apt(self, program: str, *words: str, where: Path | None = None) -> str:
        return run([program, *self._options, *words], where)


def run(words: list[str], where: Path | None = None) -> str:
    done = subprocess.run(
        words, cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(
            f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout


def _with_sources(text: str) -> str:
    """A list of apt's, in either of its formats, that names the sources beside the packages."""
    lines: list[str] = []
    for line in text.splitlines():
        lines.append("Types: deb deb-src" if line.startswith("Types:") else line)
        if line.startswith("deb "):
            lines.append(line.replace("deb ", "deb-src ", 1))
    return "\n".join(lines) + "\n"
