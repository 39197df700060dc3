"""tools/matrix.py: what it makes of results, and which files it takes for free of frameworks."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix() -> Any:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "tools/matrix.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(matrix: Any, *rows: str) -> str:
    return "\n".join(["# Page", "", matrix.BEGIN, *rows, matrix.END, "", "behind", ""])


def test_results_are_written_between_the_markers_and_those_of_other_runs_stay(matrix: Any) -> None:
    free, torch = matrix.KINDS
    before = page(matrix, "| 3.12 | 3.12.1: 7 passed | 3.12.1: 1 failed, 6 passed |", "| 3.13 | old | kept |")
    after = matrix.written(
        before,
        [
            matrix.Row("3.11", free, "3.11.7: 9 passed", False),
            matrix.Row("3.13", free, "3.13.0: 8 passed, 1 skipped", False),
            matrix.Row("3.14", "", "not found here: not tested", False),
        ],
    )
    assert after == page(
        matrix,
        f"| Python | {free} | {torch} |",
        "|---|---|---|",
        "| 3.11 | 3.11.7: 9 passed | not run |",
        "| 3.12 | 3.12.1: 7 passed | 3.12.1: 1 failed, 6 passed |",
        "| 3.13 | 3.13.0: 8 passed, 1 skipped | kept |",
        "| 3.14 | not run | not run |",
    )
    assert matrix.written(after, []) == after


def test_a_page_without_the_markers_is_refused(matrix: Any) -> None:
    with pytest.raises(SystemExit, match="has no markers"):
        matrix.written("# Page\n", [])


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("..\n1403 passed, 5 skipped, 40 deselected in 61.02s (0:01:01)\n", "1403 passed, 5 skipped"),
        ("=== 2 failed, 7 passed, 1 error in 3.00s ===\n\n", "2 failed, 7 passed, 1 error"),
        ("INTERNALERROR> KeyError: 5\n", ""),
        ("", ""),
    ],
)
def test_counts_are_kept_without_times(matrix: Any, output: str, counts: str) -> None:
    assert matrix.counted(output) == counts


def test_versions_of_an_interpreter_that_is_not_here_are_not_a_failure(
    matrix: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = matrix.Interpreter(Path(sys.executable), "3.11.7")
    monkeypatch.setattr(matrix, "interpreters", lambda roots: {"3.11": here})
    monkeypatch.setattr(matrix, "_environment", lambda found, name, packages: [str(found.python)])
    monkeypatch.setattr(matrix, "_tests", lambda python, files, jobs: ("3 passed", False))
    assert matrix.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:] == [
        "3.11  without a framework   3.11.7: 3 passed",
        *(f"{version}{' ' * 24}not found here: not tested" for version in ("3.12", "3.13", "3.14")),
    ]


def test_an_interpreter_of_another_system_is_started_in_it(
    matrix: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.14").touch()
    asked: list[tuple[str, ...]] = []

    def version(python: tuple[str, ...]) -> str | None:
        asked.append(python)
        return "3.14.2" if python[0] == "chroot" else None

    monkeypatch.setattr(matrix, "_version", version)
    found = matrix.interpreters([tmp_path])
    assert list(found) == ["3.14"] and found["3.14"].exact == "3.14.2"
    assert asked[-1] == (*found["3.14"].prefix, "/usr/bin/python3.14")
    assert found["3.14"].prefix[:2] == ("chroot", str(tmp_path))


def test_a_file_reaches_a_framework_through_what_it_imports_and_cycles_end(matrix: Any) -> None:
    free = matrix.selected(with_frameworks=False)
    assert ROOT / "tests/unit/script/test_own_entering.py" in free
    assert ROOT / "tests/unit/adapters/torch/randomness/test_mersenne.py" in free
    assert ROOT / "tests/unit/adapters/torch/randomness/test_rng.py" not in free
    assert ROOT / "tests/unit/script/test_own.py" not in free  # its stage imports torch
    assert len(free) > 100


def test_classifiers_name_the_versions_that_passed_and_those_whose_memory_is_read(matrix: Any) -> None:
    from lastcall.adapters.torch.randomness import mersenne

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    table = matrix.PAGE.read_text(encoding="utf-8").partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    rows = {found[1]: found[2] for found in matrix._CELL.finditer(table)}
    passed = [version for version, cell in rows.items() if "passed" in cell and "failed" not in cell]
    assert named == passed
    assert named == [f"{major}.{minor}" for major, minor in mersenne.TESTED]
