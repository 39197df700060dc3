"""`make wheel`: builds the sdist and the wheel into dist/, checks them, and tries the wheel in a clean
environment.

python tools/wheel.py            without torch: the command line works, and says what is missing
python tools/wheel.py --torch    also with the extra `torch`, from the index: the tutorial runs
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import lastcall  # noqa: E402 - this checkout's, whichever one is installed
from lastcall import installing  # noqa: E402

WHEEL = f"lastcall-{lastcall.__version__}-py3-none-any.whl"
PIP = ("-m", "pip", "--disable-pip-version-check")


def build(source: Path, folder: Path, *kinds: str) -> None:
    options = [word for kind in kinds for word in ("-t", kind)]
    _run([sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options], cwd=source)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def same_from_sdist(sdist: Path, wheel: Path, scratch: Path) -> list[str]:
    """The files in which the wheel that the sdist builds differs."""
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    build(scratch / sdist.name.removesuffix(".tar.gz"), scratch, "wheel")
    one, other = contents(wheel), contents(scratch / wheel.name)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def environment(folder: Path, *arguments: str) -> Path:
    """A virtual environment in which pip has installed this; its folder of programs."""
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    _run([sys.executable, *PIP, "--python", str(programs / "python"), "install", "-q", *arguments])
    return programs


def bare(programs: Path, folder: Path) -> list[str]:
    """What does not work without torch."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("LASTCALL_", "PYTHON"))
    }

    def said(*command: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(programs / command[0]), *command[1:]],
            capture_output=True, text=True, check=False, cwd=folder, env=clean, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    problems = []
    for command, code, words in (
        (("lastcall", "--version"), 0, f"lastcall {lastcall.__version__}"),
        (("lastcall", "--help"), 0, "drill"),
        (("lastcall", "ls", "."), 1, "lastcall: "),
        (("lastcall", "doctor", "--json"), None, '"schema"'),
        (("lastcall", "run", "--", "python3", "-c", "raise SystemExit(3)"), 3, ""),
        (("python", "-c", "import lastcall; lastcall.JITCheckpointConfig(grace=5)"), 0, ""),
        (("python", "-c", "import lastcall; lastcall.protect"), 1, installing.extra("torch")),
        (("python", "-c", "import lastcall.dcp"), 1, installing.extra("torch")),
        (("python", "-c", "import lastcall.kubeflow"), 1, installing.extra("kubeflow")),
    ):
        got, text = said(*command)
        if (code is not None and got != code) or words not in text:
            problems.append(f"{' '.join(command)}: exit code {got}, expected {code} and {words!r}:\n{text}")
    return problems


def _run(command: Sequence[str], cwd: Path = ROOT) -> None:
    subprocess.run(command, cwd=cwd, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds, checks and tries the wheel.")
    parser.add_argument("--torch", action="store_true", help="install torch, too, and run the tutorial")
    args = parser.parse_args(arguments)
    dist = ROOT / "dist"
    for old in dist.glob("lastcall-*"):
        old.unlink()
    build(ROOT, dist, "sdist", "wheel")
    wheel, sdist = dist / WHEEL, dist / f"lastcall-{lastcall.__version__}.tar.gz"
    _run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    with tempfile.TemporaryDirectory(prefix="lastcall-wheel-") as name:
        scratch = Path(name)
        if different := same_from_sdist(sdist, wheel, scratch / "sdist"):
            raise SystemExit(f"The sdist builds another wheel; these files differ: {', '.join(different)}")
        work = scratch / "work"
        work.mkdir()
        if problems := bare(environment(scratch / "bare", str(wheel)), work):
            raise SystemExit("\n".join(problems))
        if args.torch:
            from helpers.docs import blocks  # of tests/

            programs = environment(scratch / "torch", "-c", str(ROOT / "constraints.txt"), f"{wheel}[torch]")
            blocks.run(ROOT / "docs" / "tutorial.md", work, programs)
    sys.stdout.write(f"{wheel.relative_to(ROOT)} and {sdist.name} are whole, and the wheel works\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
