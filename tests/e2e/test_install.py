"""Install lines, as the pages have them, in an environment of its own. torch and what builds the wheel come
from the environment of these tests, and nothing comes from an index."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from helpers.docs import blocks
from helpers.processes import interpreters
from helpers.processes.forkserver import ROOT


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheel", ROOT / "tools" / "wheel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, wheels: ModuleType) -> Path:
    """What a user has: the files of the sdist, with the sdist and its wheel in dist/."""
    folder = tmp_path_factory.mktemp("checkout")
    copy = folder / "lastcall"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    wheels.build(copy, copy / "dist", "sdist", "wheel")
    return copy


def environment(folder: Path) -> Path:
    """An environment that sees torch, and what builds a wheel, but not this checkout; its programs."""
    python = interpreters.venv(folder)
    packages = interpreters.packages(python)
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def install(programs: Path, line: str, cwd: Path) -> None:
    """A line of a page, word for word, with this environment's pip."""
    (programs / "pip").write_text(f'#!/bin/sh\nexec {programs}/python -m pip "$@"\n')
    (programs / "pip").chmod(0o755)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LASTCALL_", "PYTHON"))},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's own way to say: without isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_QUIET": "1",
    }
    subprocess.run(["bash", "-c", line], cwd=cwd, env=env, check=True, timeout=120)


def line_of(page: str, begin: str) -> str:
    (line,) = {
        each
        for block in blocks.blocks(ROOT / page)
        for each in block.commands.splitlines()
        if each.startswith(begin)
    }
    return line


def where(programs: Path) -> Path:
    done = subprocess.run(
        [programs / "python", "-P", "-c", "import lastcall; print(lastcall.protect and lastcall.__file__)"],
        capture_output=True, text=True, check=True, cwd=programs,
    )  # fmt: skip
    return Path(done.stdout.strip())


def test_the_install_line_of_the_readme_works(checkout: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "venv")
    install(programs, line_of("README.md", "pip install"), checkout)
    assert where(programs).is_relative_to(tmp_path)


def test_the_wheel_line_of_the_page_works(checkout: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "venv")
    install(programs, line_of("docs/install.md", "pip install 'dist/"), checkout)
    assert where(programs).is_relative_to(tmp_path)


def test_the_sdist_builds_the_same_wheel(checkout: Path, tmp_path: Path, wheels: ModuleType) -> None:
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    assert wheels.same_from_sdist(sdist, checkout / "dist" / wheels.WHEEL, tmp_path) == []


def test_the_wheel_alone_works_and_names_what_is_missing(
    checkout: Path, tmp_path: Path, wheels: ModuleType
) -> None:
    programs = wheels.environment(
        tmp_path / "venv", "--no-deps", "--no-index", str(checkout / "dist" / wheels.WHEEL)
    )
    assert wheels.bare(programs, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_the_wheel_and_torch_the_tutorial_runs(checkout: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "venv")
    install(programs, line_of("docs/install.md", "pip install 'dist/"), checkout)
    (tmp_path / "work").mkdir()
    said = blocks.run(ROOT / "docs" / "tutorial.md", tmp_path / "work", programs)
    assert "Identical after" in said, said
    assert sys.prefix not in str(where(programs))
