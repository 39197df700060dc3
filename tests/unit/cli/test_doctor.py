from __future__ import annotations

from pathlib import Path

import pytest

from lastcall.cli import doctor
from lastcall.doctor import finding
from lastcall.doctor.inspection import DoctorReport

SAYS = "a save needs 40 s (checkpoint-1200 took 40 s), the grace is 30 s: the save will not complete in time"
TORCHRUN = "lastcall run --grace 60 -- torchrun --nproc-per-node 8 t.py"
REMEDY = f"export LASTCALL_GRACE_SECONDS=60; or start it with: {TORCHRUN}"


def shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *findings: finding.Finding
) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    settings: dict[str, dict[str, object]] = {
        "grace": {"value": 30.0, "origin": "default"},
        "signals": {"value": ["SIGTERM", "SIGUSR1"], "origin": "LASTCALL_SIGNALS"},
    }
    doctor._print(DoctorReport(findings, settings, {}), everything=False)
    return capsys.readouterr().out.splitlines()


def test_a_finding_continues_below_itself_and_its_remedy_can_be_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(capsys, monkeypatch, finding.risk("platform-grace", SAYS, REMEDY), finding.ok("x", "fine"))
    assert lines[:6] == [
        "risk     platform-grace  a save needs 40 s (checkpoint-1200 took 40 s), the",
        "                         grace is 30 s: the save will not complete in time",
        "         -> export LASTCALL_GRACE_SECONDS=60; or start it with:",
        f"            {TORCHRUN}",
        "ok       x               fine",
        "",
    ]
    assert lines[6:8] == ["SETTING  VALUE             FROM", "signals  SIGTERM, SIGUSR1  LASTCALL_SIGNALS"]
    assert lines[-1] == "1 risk, 0 warnings: work would be lost here. See the remedies above."


def test_the_level_has_the_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = shown(
        capsys, monkeypatch, finding.warning("x", "risk of rain", "umbrella"), finding.ok("y", "ok")
    )
    assert lines[0] == "\x1b[33mwarning\x1b[0m  x  risk of rain"
    assert lines[2] == "\x1b[32mok\x1b[0m       y  ok"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("20GB", 20 * 10**9), ("1.5 k", 1500), ("7", 7), ("2MiB", 2_000_000)]
)
def test_a_size_is_read_as_people_write_it(text: str, nbytes: int) -> None:
    assert doctor._bytes(text) == nbytes


def test_a_directory_that_is_not_there_yet_is_no_error(tmp_path: Path) -> None:
    assert doctor._directory(tmp_path / "none") is None
    assert doctor._directory(None) is None
