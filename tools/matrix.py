"""`make matrix`: the tests on every Python that is found here, from 3.11 to 3.14.

On each interpreter, in an environment of its own without any framework: the quick tests whose files reach no
framework. With `--torch` also the quick tests of the rest, smokes of the adapters included, in a second
environment with the frameworks; that needs gigabytes where only a CUDA build of torch exists. Prints a table
and exits with 1 when a test fails.

Discarded: tox and nox. They find no interpreter of pyenv that is not on PATH, and know nothing of frameworks.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
FOLDERS = ("unit", "property", "conformance")
FRAMEWORKS = {"torch", "numpy", "safetensors", "torchdata", "webdataset", "more_itertools"}
FRAMEWORKS |= {
    "transformers",
    "accelerate",
    "peft",
    "kubeflow",
    "kubeflow_trainer_api",
    "ray",
    "lightning",
    "pyarrow",
}
_WITHOUT = ["xxhash", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
_WITHOUT += ["starlette", "uvicorn", "cryptography", "boto3", "PyYAML"]
_SCRIPT = re.compile(r"\b(?:import|from) (?:" + "|".join(FRAMEWORKS) + r")\b|lastcall\.protect\(")


class Row(NamedTuple):
    version: str
    what: str
    result: str
    failed: bool


def interpreters() -> dict[str, Path]:
    """Of each version the first that starts: on PATH, then those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, Path] = {}
    for version in VERSIONS:
        folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
        candidates = [folder / f"python{version}" for folder in folders]
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        for candidate in candidates:
            if candidate.exists() and _version(candidate) == version:
                found[version] = candidate
                break
    return found


def _version(python: Path) -> str | None:
    """None for what is there and does not start, as pyenv's stand-ins for versions that are not chosen."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def selected(with_frameworks: bool) -> list[Path]:
    """The quick test files that reach a framework, or those that do not."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    if with_frameworks:
        files += [
            file
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if file not in files and "mark.smoke" in file.read_text(encoding="utf-8")
        ]
    return [file for file in files if reaches(file) == with_frameworks]


@cache
def reaches(file: Path) -> bool:
    """Whether a file imports a framework: itself, through what it imports of ours, or in a script."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    ours = file.is_relative_to(ROOT / "src")
    for node in _module_level(tree) if ours else ast.walk(tree):
        for name in _imported(node):
            if name.split(".")[0] in FRAMEWORKS or any(reaches(other) for other in _files(name)):
                return True
        if not ours and isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _SCRIPT.search(node.value):
                return True
            script = file.parent / "scripts" / Path(node.value[:200]).name
            if node.value.endswith(".py") and script.is_file() and reaches(script):
                return True
    return False


def _module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when the module is imported: neither functions nor what only a type checker reads."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not typing_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(name: str) -> Iterator[Path]:
    path = name.replace(".", "/")
    for base in (ROOT / "src", ROOT / "tests", ROOT):
        for file in (base / f"{path}.py", base / path / "__init__.py"):
            if file.is_file():
                yield file


def _environment(python: Path, name: str, packages: list[str]) -> Path:
    folder = ROOT / ".venv-matrix" / name
    if not (folder / ".made").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        subprocess.run(
            [*pip, "-c", ROOT / "constraints.txt", "hatchling", "editables", *packages], check=True
        )
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", "-e", ROOT], check=True)
        (folder / ".made").touch()
    return folder / "bin/python"


def _tests(python: Path, files: list[Path], jobs: int) -> tuple[str, bool]:
    command = [str(python), "-m", "pytest", "-n", str(jobs), "--dist", "loadfile", "-m", "quick and not slow"]
    ran = subprocess.run(
        [*command, *files], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    sys.stdout.write(ran.stdout if ran.returncode else "")
    lines = [line.strip("= ") for line in ran.stdout.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit code {ran.returncode}"), ran.returncode != 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/matrix.py", description="The tests on every Python found here."
    )
    parser.add_argument(
        "--only", choices=VERSIONS, action="append", help="this version only; may be repeated"
    )
    parser.add_argument("--torch", action="store_true", help="also with torch, Transformers and Accelerate")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (2)")
    parser.add_argument(
        "--list", action="store_true", help="print the test files that need no framework, and end"
    )
    given = parser.parse_args(argv)
    if given.list:
        sys.stdout.writelines(f"{file.relative_to(ROOT)}\n" for file in selected(with_frameworks=False))
        return 0
    found = {version: path for version, path in interpreters().items() if version in (given.only or VERSIONS)}
    rows: list[Row] = []
    for version, python in found.items():
        kinds = [("without a framework", False, _WITHOUT)]
        if given.torch:
            kinds.append(("with torch", True, ["-r", str(ROOT / "requirements-dev.txt")]))
        for what, frameworks, packages in kinds:
            sys.stdout.write(f"Python {version} ({python}), {what} ...\n")
            sys.stdout.flush()
            try:
                own = _environment(python, f"{version}-torch" if frameworks else version, packages)
                rows.append(Row(version, what, *_tests(own, selected(frameworks), given.jobs)))
            except subprocess.CalledProcessError as error:
                rows.append(Row(version, what, f"no environment: {error}", failed=True))
    missing = [version for version in VERSIONS if version not in found and not given.only]
    rows += [Row(version, "", "not found here: not tested", failed=False) for version in missing]
    sys.stdout.writelines(f"{row.version:<6}{row.what:<22}{row.result}\n" for row in rows)
    return 1 if not found or any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
