"""tools/settings_table.py: each setting is written once, in settings, and the guide has what stands
there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from lastcall import settings
from lastcall.settings import configurations

ROOT = Path(__file__).resolve().parents[2]
ROWS = settings.JIT + settings.PERIODIC


@pytest.fixture
def table() -> Any:
    spec = importlib.util.spec_from_file_location("settings_table", ROOT / "tools/settings_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guide_has_the_settings_of_the_source(table: Any) -> None:
    assert table.main(["--check"]) == 0


def test_every_setting_has_a_doc_line_and_a_row(table: Any) -> None:
    lines = table.doc_lines(Path(configurations.__file__).read_text())
    documented = [lines["JITCheckpointConfig"], lines["PeriodicCheckpointConfig"]]
    assert [set(one) for one in documented] == [
        {row.field for row in rows} for rows in (settings.JIT, settings.PERIODIC)
    ]
    made = table.tables()
    for row in ROWS:
        assert made.count(f"| `{row.field}` | `{row.variable}`") == 1
    assert all(line.endswith(".") and line[:1].isupper() for one in documented for line in one.values())


def test_pages_that_the_table_links_to_exist_and_belong_to_settings(table: Any) -> None:
    assert set(table.PAGES) <= {row.field for row in ROWS}
    assert all((ROOT / "docs" / page.partition("#")[0]).is_file() for page in table.PAGES.values())


@pytest.mark.parametrize(
    "change",
    [("| 3.0 |", "| 4.0 |"), ("LASTCALL_GRACE_SECONDS", "LASTCALL_GRACE"), ("Off means off", "Off means on")],
)
def test_a_guide_that_says_something_else_fails_the_check_and_is_mended_by_write(
    table: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = table.GUIDE.read_text()
    begin = right.index(table.BEGIN)
    wrong = right[:begin] + right[begin:].replace(*change, 1)
    assert wrong != right
    guide = tmp_path / "guide.md"
    guide.write_text(wrong)
    monkeypatch.setattr(table, "GUIDE", guide)
    assert table.main(["--check"]) == 1
    assert "--write" in capsys.readouterr().err
    assert table.main(["--write"]) == 0
    assert guide.read_text() == right


def test_a_guide_without_markers_is_refused(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text("# Guide\n")
    monkeypatch.setattr(table, "GUIDE", guide)
    with pytest.raises(SystemExit, match="no markers"):
        table.main(["--write"])


def test_a_new_setting_without_a_doc_line_is_found(table: Any) -> None:
    found = table.doc_lines(
        'class Config:\n    first: int\n    """One."""\n    second: int\n    third: int\n    """Three,\n    '
        'and more."""\n'
    )
    assert found == {"Config": {"first": "One.", "third": "Three, and more."}}
